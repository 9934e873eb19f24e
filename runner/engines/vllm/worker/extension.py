"""Extension of vLLM's workers, which loads new weights from checked files and applies this package's patches.

vLLM adds `WeightWorker` to its worker class, so the methods of `WeightWorker` can be called in every worker at once.
vLLM's own `reload_weights(weights_path=...)` takes only a folder, and changes the model's path to this folder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from runner.engines.vllm.worker import parent_watch
from runner.engines.vllm.worker.cpu_patches import (
    patch_bitmasks,
    patch_generators,
    patch_lora_kernels,
    patch_rotary_embeddings,
    patch_routers,
)
from runner.engines.vllm.worker.reload_patch import patch_reload
from runner.engines.vllm.worker.scoring_patches import patch_prompt_scores, patch_sampler

__all__ = ["FILE_BACKEND", "WeightWorker"]

FILE_BACKEND: Final = "file"
"""Name of this package's weight transfer backend, for machines without GPUs."""

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker
else:
    Worker = object  # vLLM adds this class to its own worker class


class WeightWorker(Worker):  # type: ignore[misc]  # vLLM is not typed
    """Methods of a worker for `VllmEngine.update_weights`, scoring and, on a CPU, adapters and seeds.

    A worker extension of your own has to inherit from this class: `class Mine(WeightWorker)`.
    """

    def load_weight_files(self, files: Sequence[str], ignored: Collection[str]) -> None:
        """Load the weights in `files`, which are safetensors files with the tensor names of the model's checkpoint.

        Args:
            files: paths of the files; tensors are read on demand by memory mapping.
            ignored: names of tensors in the files that the model does not use.
        """
        self.reload_weights(weights_iterator=_tensors(files, frozenset(ignored)))

    def changed_tensors(self) -> dict[str, bool] | None:
        """Return for each tensor, by name, whether it changed since the last call; None at the first call."""
        model = self.model_runner.model
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        sums = {name: _checksum(tensor) for name, tensor in tensors.items() if tensor.numel()}
        before, self._sums = getattr(self, "_sums", None), sums
        return None if before is None else {name: before.get(name) != value for name, value in sums.items()}

    def device_name(self) -> str:
        """Return the device of this worker: "cpu", or the UUID of its GPU."""
        from vllm.platforms import current_platform

        kind: str = self.device.type
        if kind == "cpu":
            return kind
        uuid: str = current_platform.get_device_uuid(self.device.index or 0)
        return uuid

    def patch_adapters(self) -> bool:
        """Patch the LoRA kernels not to change turns without an adapter; return whether the kernels are correct now."""
        return patch_lora_kernels()

    def unused_adapter_modules(self, key: int) -> list[str]:
        """Return the modules of the loaded adapter with vLLM's id `key` that no layer of this worker applies.

        vLLM accepts tensors of layers that it does not wrap, such as some gates of shared experts, and ignores them.
        """
        adapters = self.model_runner.lora_manager._adapter_manager
        adapter = adapters.get_adapter(key)
        used = {id(adapters._get_lora_layer_weights(adapter, module)) for module in adapters.modules}
        # Fused experts are stacked from entries whose names begin with the name of the fused module. These entries stay
        # in the adapter.
        parts = tuple(f"{module}." for module in adapters.modules)
        return [
            module
            for module, tensors in adapter.loras.items()
            if id(tensors) not in used and not module.startswith(parts)
        ]

    def patch_scoring(self) -> bool:
        """Patch the worker to score given ids as if they were sampled, and prompts with their adapters.

        Returns:
            True, or False if this vLLM cannot be patched.
        """
        try:
            patch_sampler(self.model_runner)
            patch_prompt_scores(self.model_runner)
        except (AttributeError, ImportError):
            return False
        return True

    def patch_cpu_worker(self) -> None:
        """Apply the patches for turns with a seed, masks and reloads, if this worker runs on a CPU."""
        if self.device.type == "cpu":
            patch_generators()
            patch_bitmasks()
            patch_reload()


def _checksum(tensor: Any) -> tuple[int, int]:
    """Return two sums of a tensor's bits, read as integers: one weighted by row, the other weighted by column.

    An unweighted sum would not change if parts of the tensor are swapped.
    """
    import torch

    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().view(kinds[tensor.element_size()])
    rows = bits.reshape(-1, bits.shape[-1]) if bits.ndim else bits.reshape(1, 1)
    by_row, by_column = rows.sum(1, dtype=torch.int64), rows.sum(0, dtype=torch.int64)

    def weighted(sums: Any) -> int:
        return int((sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum())

    return weighted(by_row), weighted(by_column)


def _tensors(files: Sequence[str], ignored: frozenset[str]) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # `opened` is not a mapping
                if name not in ignored:
                    yield name, opened.get_tensor(name)


def _register_file_transfer() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    module = "runner.engines.vllm.worker.file_transfer"
    WeightTransferEngineFactory.register_engine(FILE_BACKEND, module, "FileTransferEngine")


if parent_watch.started_by_engine():  # a process that only imports this module is not patched
    with suppress(ImportError):  # this vLLM has no weight transfer
        _register_file_transfer()
    with suppress(ImportError):
        patch_routers()
    with suppress(ImportError):
        patch_rotary_embeddings()  # before the model is created, since each layer keeps the method that it finds then
