"""Patch of vLLM's CPU workers, with which a reload of weights renews every packed or derived copy of a weight.

A layer on a CPU keeps packed copies of its weights, in the parameters or beside them. vLLM's own reload (0.32)
processes a layer again after its own tensors were loaded. So a tied output layer, whose tensor has the name of the
embedding, keeps its old copy. Packed experts are packed twice (vllm#42821, vllm#48284, vllm#48312). With this patch,
new weights are loaded into a second model, as at the engine's start, and its tensors and packed copies are copied into
the first one. This needs the memory of a second model during the load.
"""

from __future__ import annotations

import enum
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

__all__ = ["patch_reload"]

_SHARED = ("vllm.config", "vllm.distributed", "vllm.platforms", "vllm._custom_ops")
"""Modules of classes whose objects are not part of a layer: settings, process groups, handles of packed weights."""
_RUNNING_STATE = frozenset({"kv_cache"})
"""Attributes of layers that hold the state of requests and no weights."""


def patch_reload() -> None:
    """Replace vLLM's reload in this process."""
    from vllm.model_executor.model_loader import reload
    from vllm.model_executor.model_loader.reload import inplace

    for module in (reload, inplace):
        module.initialize_layerwise_reload = _begin
        module.finalize_layerwise_reload = _finish


def _begin(model: Any) -> None:
    """Create a second model, and redirect `model.load_weights` to it until `_finish`."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    if not gc.get_freeze_count():
        gc.freeze()  # the collection in `_finish` then checks only the second model; vLLM does the same on GPUs
    config = get_current_vllm_config()
    with _own_layer_names(config.compilation_config), set_default_torch_dtype(config.model_config.dtype):
        second = initialize_model(config, model_class=type(model))
    # The attribute is set in `vars`, so that the second model does not become a submodule of the first one.
    vars(model)["load_weights"] = second.load_weights
    vars(model)["_second_model"] = second


def _finish(model: Any, model_config: Any) -> None:
    """Finish the second model as vLLM does at its start, and copy the results into the running model.

    Raises:
        RuntimeError: the two models differ, or a value with weights cannot be renewed; nothing was copied.
    """
    import torch
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    second = vars(model).pop("_second_model")
    del vars(model)["load_weights"]
    with torch.no_grad():
        process_weights_after_loading(second, model_config, torch.device("cpu"))
        copies = _Copies()
        first_modules = {_plain(name): module for name, module in model.named_modules(remove_duplicate=False)}
        for name, module in second.named_modules(remove_duplicate=False):
            if name not in first_modules:
                raise RuntimeError(
                    f"a second model for the new weights has a layer {name!r} that the running model does not have: "
                    "start an engine from a folder of the new weights"
                )
            copies.add(name, first_modules[name], module)
        copies.apply()
    del second, copies, first_modules, module
    # Some layers of the second model are in reference cycles with their weight loaders, so only a collection frees
    # them. Python may collect by itself only after many updates, since it counts new objects and not their memory.
    gc.collect()


def _plain(name: str) -> str:
    """Return a layer's name without the wrappers of adapters."""
    return name.replace(".base_layer", "")


@contextmanager
def _own_layer_names(compilation: Any) -> Iterator[None]:
    """Replace vLLM's registries of layers by empty ones in this block.

    So the second model's layers can register under the names of the first model's layers.
    """
    layers, experts = compilation.static_forward_context, compilation.static_all_moe_layers
    compilation.static_forward_context, compilation.static_all_moe_layers = {}, []
    try:
        yield
    finally:
        compilation.static_forward_context, compilation.static_all_moe_layers = layers, experts


@dataclass(slots=True)
class _Copies:
    """Planned copies from one model into another of the same form; `apply` executes them."""

    _planned: list[Callable[[], None]] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)
    _tensors: list[Any] = field(default_factory=list)
    """Tensors of the second model's layer whose copies are being planned."""

    def add(self, place: str, old: Any, new: Any) -> None:
        """Plan to copy all tensors, numbers and packed copies of `new` into `old`, an object of the same class."""
        if id(new) in self._seen or old is new:
            return
        self._seen.add(id(new))
        import torch

        if isinstance(new, torch.nn.Module):
            self._tensors = [*new._parameters.values(), *new._buffers.values()]
            for held, given in ((old._parameters, new._parameters), (old._buffers, new._buffers)):
                for name, tensor in given.items():
                    self._add_value(f"{place}.{name}", held, name, tensor)
        held = vars(old)
        for name, value in vars(new).items():
            if name not in _RUNNING_STATE and name in held:
                self._add_value(f"{place}.{name}", held, name, value)

    def apply(self) -> None:
        """Execute all planned copies."""
        for copy in self._planned:
            copy()

    def _add_value(self, place: str, held: Any, key: Any, new: Any) -> None:
        import torch

        old = held[key]
        if isinstance(new, torch.Tensor):
            self._add_tensor(place, held, key, new)
        elif isinstance(new, torch.nn.Module) or old is new:
            return  # modules are copied separately
        elif isinstance(new, float) or _is_function(new) or _is_handle(new):
            renewed = _renewed(place, old, new)
            self._planned.append(lambda: held.__setitem__(key, renewed))
            self._keep_tensors(new)
        elif isinstance(new, dict) and isinstance(old, dict):
            for name, value in new.items():
                if name in old:
                    self._add_value(f"{place}[{name!r}]", old, name, value)
                else:
                    _refuse_weights(f"{place}[{name!r}]", None, value)
        elif isinstance(new, list | tuple) and type(old) is type(new) and len(new) == len(old):
            self._add_items(place, held, key, new)
        elif type(new) is type(old) and _is_part(new):
            self.add(place, old, new)
        else:
            _refuse_weights(place, old, new)

    def _add_items(self, place: str, held: Any, key: Any, new: Any) -> None:
        items, count = list(held[key]) if isinstance(new, tuple) else held[key], len(self._planned)
        for index, value in enumerate(new):
            self._add_value(f"{place}[{index}]", items, index, value)
        if isinstance(new, tuple) and len(self._planned) > count:
            as_tuple = getattr(type(new), "_make", type(new))
            self._planned.append(lambda: held.__setitem__(key, as_tuple(items)))

    def _keep_tensors(self, new: Any) -> None:
        """Keep the tensors of a handle's layer until the handle is freed, since the handle has addresses of scales."""
        if _is_handle(new):
            new.tensors = self._tensors

    def _add_tensor(self, place: str, held: Any, key: Any, new: Any) -> None:
        import torch

        old = held[key]
        if not isinstance(old, torch.Tensor) or (old.shape, old.dtype) != (new.shape, new.dtype):
            form = (tuple(old.shape), old.dtype) if isinstance(old, torch.Tensor) else type(old).__name__
            made = (tuple(new.shape), new.dtype)
            raise RuntimeError(
                f"{place} is {form} in the running model and {made} in a second model for the new weights: "
                "start an engine from a folder of the new weights"
            )
        # The values are copied into the old memory, since other objects may hold the same tensor.
        if old.numel() and old.data_ptr() != new.data_ptr():
            self._planned.append(lambda: old.data.copy_(new.data))


def _is_part(value: Any) -> bool:
    """Return whether an object is part of one layer: a kernel, a quantization method, an attention implementation."""
    import torch

    module = type(value).__module__
    return (
        module.startswith("vllm.")
        and not module.startswith(_SHARED)
        and not isinstance(value, enum.Enum | torch.nn.Module | type)
        and hasattr(value, "__dict__")
    )


def _refuse_weights(place: str, old: Any, new: Any) -> None:
    """Check that an object that is not renewed does not contain values of weights.

    Raises:
        RuntimeError: the object may contain such values, so the running model would keep old ones.
    """
    import numpy as np

    same = isinstance(new, np.ndarray) and isinstance(old, np.ndarray) and np.array_equal(old, new)
    if not same and _may_hold_weights(new):
        raise RuntimeError(
            f"{place} is a {type(new).__name__} that may hold old weights and cannot be renewed in a running engine: "
            "start an engine from a folder of the new weights"
        )


def _may_hold_weights(value: Any) -> bool:
    import numpy as np
    import torch

    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_may_hold_weights, value))
    return isinstance(value, torch.Tensor | torch.ScriptObject | np.ndarray)


def _is_function(value: Any) -> bool:
    """Return whether an object is a function of vLLM or a partial.

    Such a function may hold packed copies of weights, as `cpu_linear` of vLLM's linear layers does.
    """
    return isinstance(value, partial) or (isinstance(value, FunctionType) and value.__module__.startswith("vllm."))


def _is_handle(value: Any) -> bool:
    """Return whether an object is a handle of packed weights, such as `dnnl_handler` of int8 layers."""
    return type(value).__module__ == "vllm._custom_ops" and not isinstance(value, enum.Enum)


def _renewed(place: str, old: Any, new: Any) -> Any:
    """Return a number, function or handle for the running model, like `new` of the second model.

    A function that refers to layers of the second model is made again with the layers of the running model.

    Raises:
        RuntimeError: the function refers to layers, and the running model has another function in its place.
    """
    if not _is_function(new) or not any(map(_has_layer, _contents(new))):
        return new
    mine, made = _contents(old) if type(old) is type(new) else [], _contents(new)
    same_code = isinstance(new, partial) or getattr(old, "__code__", None) is new.__code__
    if not same_code or len(mine) != len(made):
        raise RuntimeError(
            f"{place} is another function in the running model, and refers to layers: "
            "start an engine from a folder of the new weights"
        )
    kept = [_kept(place, *pair) for pair in zip(mine, made, strict=True)]
    if isinstance(new, partial):
        count = len(new.args) + 1
        return partial(kept[0], *kept[1:count], **dict(zip(new.keywords, kept[count:], strict=True)))
    cells, defaults = len(new.__closure__ or ()), len(new.__defaults__ or ())
    closure = tuple(map(CellType, kept[:cells])) or None
    function = FunctionType(
        new.__code__, new.__globals__, new.__name__, tuple(kept[cells : cells + defaults]) or None, closure
    )
    function.__kwdefaults__ = dict(zip(new.__kwdefaults__ or (), kept[cells + defaults :], strict=True)) or None
    function.__module__ = new.__module__
    return function


def _contents(function: Any) -> list[Any]:
    if isinstance(function, partial):
        return [function.func, *function.args, *function.keywords.values()]
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _has_layer(value: Any) -> bool:
    import torch

    if isinstance(value, MethodType):
        return _has_layer(value.__self__)
    if isinstance(value, list | tuple):
        return any(map(_has_layer, value))
    if _is_function(value):
        return any(map(_has_layer, _contents(value)))
    return isinstance(value, torch.nn.Module) or _is_part(value)


def _kept(place: str, mine: Any, made: Any) -> Any:
    """Return one value for a renewed function: `mine` is the running model's value, and `made` is the second model's.

    The result is `made` if `made` refers to no layer. Otherwise it is `mine` or, for a function, the renewed function.
    """
    if not _has_layer(made):
        return made
    return _renewed(place, mine, made) if _is_function(made) else mine
