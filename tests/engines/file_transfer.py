"""A weight transfer engine that works without a GPU: vLLM's own call path, with files in the place of NCCL.

vLLM's workers import it with the worker extension below, which registers it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from safetensors import safe_open
from safetensors.torch import save_file
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from runner.engines.vllm.worker.extension import WeightWorker

BACKEND = "file"


@dataclass
class Meeting(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not typed
    """Where trainer and engine meet."""

    folder: str


@dataclass
class Parcel(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is not typed
    """What is in a file of that folder."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    file: str


class FileTransferEngine(WeightTransferEngine):  # type: ignore[misc]  # vLLM is not typed
    """Receives tensors through files."""

    init_info_cls = Meeting
    update_info_cls = Parcel

    def init_transfer_engine(self, init_info: Meeting) -> None:
        self.folder = Path(init_info.folder)
        if not self.folder.is_dir():
            raise ConnectionError(f"nobody is at {self.folder}")

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # vLLM's own waits for an accelerator, which a CPU has not.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Parcel) -> None:
        with safe_open(self.folder / update_info.file, framework="pt") as file:
            self.model.load_weights((name, file.get_tensor(name)) for name in update_info.names)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None: ...


@dataclass
class FileTrainerInfo(TrainerInitInfo):  # type: ignore[misc]  # vLLM is not typed
    """Where a trainer leaves its files."""

    backend: ClassVar[str] = BACKEND
    folder: str


class FileTrainer(TrainerWeightTransferEngine):  # type: ignore[misc]  # vLLM is not typed
    """Sends tensors through files; asks from threads of its own, as vLLM's NCCL trainer does."""

    init_info_cls = FileTrainerInfo

    @classmethod
    def trainer_init(cls, init_info: FileTrainerInfo, *, client: Any, source: Any = None) -> Self:
        trainer = cls(client=client, source=source)
        trainer.folder = Path(init_info.folder)
        trainer._ask(client.init_weight_transfer_engine, {"folder": init_info.folder})
        return trainer

    def send_weights(self) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in self.source}
        save_file(tensors, self.folder / "sent.safetensors")
        metadata = self.source.metadata()
        parcel = Parcel(
            [one.name for one in metadata],
            [str(one.dtype).removeprefix("torch.") for one in metadata],
            [list(one.shape) for one in metadata],
            "sent.safetensors",
        )
        self.client.start_weight_update()
        self._ask(self.client.update_weights, asdict(parcel))
        self.client.finish_weight_update()

    def _ask(self, call: Any, given: Any) -> None:
        with ThreadPoolExecutor(max_workers=1) as threads:
            threads.submit(call, given).result()


class FileWorker(WeightWorker):
    """A worker extension of a user's, which inherits from ours."""


WeightTransferEngineFactory.register_engine(BACKEND, FileTransferEngine)
WeightTransferTrainerFactory.register_engine(BACKEND, FileTrainer)
