"""Runs inside vLLM's workers: loads new weights from files that were compared with the model before; mends CPU workers.

vLLM adds `WeightWorker` to its worker class, so its methods can be called in every worker at once. Its own
`reload_weights(weights_path=...)` takes a folder only, and moves the model's path to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from runner.engines.vllm.worker import parent_watch
from runner.engines.vllm.worker.bitmask_patch import patch_bitmasks
from runner.engines.vllm.worker.generator_patch import patch_generators
from runner.engines.vllm.worker.lora_kernel_patch import patch_lora_kernels
from runner.engines.vllm.worker.prompt_score_patch import patch_prompt_scores
from runner.engines.vllm.worker.reload_patch import patch_reload
from runner.engines.vllm.worker.scored_ids_patch import patch_sampler

__all__ = ["FILE_BACKEND", "WeightWorker"]

FILE_BACKEND: Final = "file"
"""The name of our weight transfer backend, for machines without GPUs."""

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker
else:
    Worker = object  # vLLM adds this class to its own, which has the rest


class WeightWorker(Worker):  # type: ignore[misc]  # vLLM is not typed
    """What `VllmEngine.update_weights` and, on a CPU, `add_adapter` and seeds need of a worker.

    A worker extension of your own inherits from it: `class Mine(WeightWorker)`.
    """

    def load_weight_files(self, files: Sequence[str], ignored: Collection[str]) -> None:
        """Exchange the weights for those in `files`, safetensors under the names of the model's checkpoint.

        Args:
            files: read as they are needed, by mapping them into memory.
            ignored: tensors in them that the model has no use for.
        """
        self.reload_weights(weights_iterator=_tensors(files, frozenset(ignored)))

    def device_name(self) -> str:
        """Where this worker's part of the model is: the kind of a device, or the UUID of a GPU."""
        from vllm.platforms import current_platform

        kind: str = self.device.type
        if kind == "cpu":
            return kind
        uuid: str = current_platform.get_device_uuid(self.device.index or 0)
        return uuid

    def patch_adapters(self) -> bool:
        """Keep adapters away from turns that asked for none; gives whether they are."""
        return patch_lora_kernels()

    def patch_scoring(self) -> bool:
        """Let requests name the ids whose log-probabilities they want as sampled, and score prompts with adapters.

        Returns:
            Whether this vLLM allows it.
        """
        try:
            patch_sampler(self.model_runner)
            patch_prompt_scores(self.model_runner)
        except (AttributeError, ImportError):
            return False
        return True

    def patch_cpu_worker(self) -> None:
        """On a CPU, mend what vLLM does wrong there: seeded turns, masks and the reload of weights."""
        if self.device.type == "cpu":
            patch_generators()
            patch_bitmasks()
            patch_reload()


def _tensors(files: Sequence[str], ignored: frozenset[str]) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no mapping
                if name not in ignored:
                    yield name, opened.get_tensor(name)


def _register_file_transfer() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    module = "runner.engines.vllm.worker.file_transfer"
    WeightTransferEngineFactory.register_engine(FILE_BACKEND, module, "FileTransferEngine")


if parent_watch.started_by_engine():  # not where this module is only named
    with suppress(ImportError):  # a vLLM without weight transfer
        _register_file_transfer()
