"""A worker extension with a planted fault: one kind of tensor keeps its values from the engine's start."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from runner.engines.vllm.worker.extension import WeightWorker, _tensors

STALE = "mlp.up_proj"


class PlainWorker:
    """A user's extension that does not inherit from ours, so that the engine accepts no new weights on a CPU."""


class OwnWorker(WeightWorker):
    """A user's extension that inherits from ours."""

    dies_after: int | None = None
    keeps_old = False

    def die_after(self, tensors: int) -> None:
        """Let the next update fail after this number of tensors."""
        self.dies_after = tensors

    def keep_old_weights(self, number: int) -> None:
        """Let the next update change nothing on the worker with this number, in data or tensor parallelism."""
        self.keeps_old = number in (self.parallel_config.data_parallel_index, self.rank)

    def load_weight_files(self, files: Sequence[str], ignored: Collection[str]) -> None:
        """Load all tensors, some of them, or none."""
        if self.keeps_old:
            self.keeps_old = False
            return
        if self.dies_after is None:
            super().load_weight_files(files, ignored)
            return
        dies_after, self.dies_after = self.dies_after, None

        def some() -> Iterator[tuple[str, Any]]:
            yield from islice(_tensors(files, frozenset(ignored)), dies_after)
            raise RuntimeError("planted: the update dies between two tensors")

        self.reload_weights(weights_iterator=some())

    def switch_collector(self, on: bool) -> None:
        """Switch automatic garbage collection on or off."""
        (gc.enable if on else gc.disable)()

    def tensors_in_cycles(self) -> int:
        """Return the number of tensors that only a collection frees, and free them."""
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        found = sum(issubclass(type(each), torch.Tensor) for each in gc.garbage)  # an object may be a dead proxy
        gc.garbage.clear()
        return found

    def apply_no_adapter_to(self, module: str) -> None:
        """Leave a layer as if vLLM had not wrapped it for adapters."""
        self.unwrapped = (module, self.model_runner.lora_manager._adapter_manager.modules.pop(module))

    def apply_adapters_again(self) -> None:
        """Undo `apply_no_adapter_to`."""
        module, layer = self.unwrapped
        self.model_runner.lora_manager._adapter_manager.modules[module] = layer


class UnpatchedReloadWorker(WeightWorker):
    """Worker that updates weights on a CPU by vLLM's own reload."""

    def patch_cpu_worker(self) -> None:
        """Leave out the patch of the reload, and with it the other ones."""


class StepWorker(WeightWorker):
    """Worker that keeps the old products of weights which latent attention uses in steps, but not for a prompt."""

    keeps_products = False

    def keep_products(self) -> None:
        """Let later updates keep the products."""
        self.keeps_products = True

    def load_weight_files(self, files: Sequence[str], ignored: Collection[str]) -> None:
        layers = [layer for layer in self.model_runner.model.modules() if hasattr(layer, "W_UK_T")]
        assert layers, "the model has latent attention"
        before = [layer.W_UK_T.clone() for layer in layers]
        super().load_weight_files(files, ignored)
        if self.keeps_products:
            for layer, product in zip(layers, before, strict=True):  # a copy, since W_UK_T may be a view of kv_b_proj
                layer.W_UK_T = torch.nn.Parameter(product, requires_grad=False)


class StaleWorker(WeightWorker):
    """Worker that loads all tensors except one kind."""

    stale = STALE

    def load_weight_files(self, files: Sequence[str], ignored: Collection[str]) -> None:
        first = load_file(Path(self.model_config.model) / "model.safetensors")
        self.reload_weights(
            weights_iterator=(
                (name, first[name] if self.stale in name else tensor)
                for name, tensor in _tensors(files, frozenset(ignored))
            )
        )


class StaleOutputWorker(StaleWorker):
    """Worker that loads all tensors except the output layer."""

    stale = "lm_head"


GARBLED = "tests.engines.stale_worker.GarblingWorker"


class GarblingWorker(WeightWorker):
    """Worker that loads every tensor and then packs one wrongly, as vLLM does with some of its fused copies."""

    def load_weight_files(self, files: Sequence[str], ignored: Collection[str]) -> None:
        super().load_weight_files(files, ignored)
        for name, parameter in self.model_runner.model.named_parameters():
            if name.endswith("layernorm.weight"):
                parameter.data.copy_(parameter.data.flip(0))
