"""Weight transfer through a file, for machines without GPUs: both ends of vLLM's backend "file", on one machine.

NCCL and IPC need a GPU. With `VllmEngine(weight_transfer_config={"backend": "file"})` and
`LocalTransfer(FileTransferInfo(folder, rank=0), source)`, a transfer makes the same calls of vLLM as with NCCL or IPC,
but the tensors go through a file. vLLM imports this module when an engine has that backend.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from safetensors import safe_open
from safetensors.torch import save_file
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from runner.engines.vllm.worker.extension import FILE_BACKEND

__all__ = ["FileTransferInfo"]

_FILE_NAME: Final = "sent.safetensors"


@dataclass
class _InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not typed
    """The folder that trainer and engine share."""

    folder: str


@dataclass
class _UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is not typed
    """A file in the shared folder, and the forms of its tensors."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    file: str


class FileTransferEngine(WeightTransferEngine):  # type: ignore[misc]  # vLLM is not typed
    """The engine's end of a transfer, in vLLM's worker."""

    init_info_cls = _InitInfo
    update_info_cls = _UpdateInfo

    def init_transfer_engine(self, init_info: _InitInfo) -> None:
        """Join the trainer.

        Raises:
            ConnectionError: the folder in `init_info` does not exist on this machine.
        """
        self.folder = Path(init_info.folder)
        if not self.folder.is_dir():
            raise ConnectionError(
                f"{self.folder} is not a folder on the engine's machine: give FileTransferInfo an existing folder that "
                "trainer and engine share"
            )

    def start_weight_update(self) -> None:
        """Prepare every layer for new tensors."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the tensors. vLLM's own method also synchronises with an accelerator, and fails without one."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: _UpdateInfo) -> None:
        """Load the tensors of a file."""
        with safe_open(self.folder / update_info.file, framework="pt") as file:
            self.model.load_weights((name, file.get_tensor(name)) for name in update_info.names)

    def finish_weight_update(self) -> None:
        """Process every layer after its tensors were loaded."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing, since there is nothing to close."""


@dataclass
class FileTransferInfo(TrainerInitInfo):  # type: ignore[misc]  # vLLM is not typed
    """Init info of a trainer that joins an engine through a file: `FileTransferInfo(folder, rank=0)`."""

    backend: ClassVar[str] = FILE_BACKEND
    folder: str
    """An existing folder for the weights, with room for all of them."""


class FileTrainer(TrainerWeightTransferEngine):  # type: ignore[misc]  # vLLM is not typed
    """The trainer's end of a transfer. Like vLLM's NCCL trainer, it joins and sends in a thread of its own."""

    init_info_cls = FileTransferInfo

    @classmethod
    def trainer_init(cls, init_info: FileTransferInfo, *, client: Any, source: Any = None) -> Self:
        """Join the engine, and return the trainer's end."""
        trainer = cls(client=client, source=source)
        trainer.folder = Path(init_info.folder)
        trainer._call(client.init_weight_transfer_engine, {"folder": init_info.folder})
        return trainer

    def send_weights(self) -> None:
        """Write the tensors to the file and have the engine load them."""
        # Tied weights share memory, which safetensors refuses.
        tensors = {name: tensor.detach().clone().contiguous() for name, tensor in self.source}
        save_file(tensors, self.folder / _FILE_NAME)
        metadata = self.source.metadata()
        update = _UpdateInfo(
            [one.name for one in metadata],
            [str(one.dtype).removeprefix("torch.") for one in metadata],
            [list(one.shape) for one in metadata],
            _FILE_NAME,
        )
        self.client.start_weight_update()
        self._call(self.client.update_weights, asdict(update))
        self.client.finish_weight_update()

    def _call(self, call: Any, argument: Any) -> None:
        with ThreadPoolExecutor(max_workers=1) as threads:
            threads.submit(call, argument).result()


WeightTransferTrainerFactory.register_engine(FILE_BACKEND, FileTrainer)
