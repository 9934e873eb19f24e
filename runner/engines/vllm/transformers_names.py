"""Tensors of a transformers model under the names and shapes of its checkpoint.

Transformers 5 fuses experts and renames tensors as it loads a checkpoint, and undoes that as it saves one. A trainer's
`state_dict()` has the fused form, and vLLM loads the checkpoint's. The tables for the way back are transformers' own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

__all__ = ["CheckpointSource", "to_checkpoint_names"]


def to_checkpoint_names(config: Any, tensors: Mapping[str, Any]) -> dict[str, Any] | None:
    """The same tensors as transformers would save them, mostly views; None where it changes nothing.

    Args:
        config: the model's configuration, of transformers.
        tensors: the state dict of its model, in any dtype.
    """
    import torch

    model = _skeleton(_Once(config))
    if model is None:
        return None
    from transformers.core_model_loading import revert_weight_conversion

    given = {name: torch.as_tensor(tensor) for name, tensor in tensors.items()}
    converted: dict[str, Any] = revert_weight_conversion(model, dict(given))
    return None if converted.keys() == given.keys() else converted


class CheckpointSource:
    """A `WeightSource` of vLLM's that sends the tensors of another one under the names of the checkpoint.

    Args:
        config: the model's configuration, of transformers.
        source: the trainer's source.
    """

    def __init__(self, config: Any, source: Any) -> None:
        self._config, self._source = config, source

    def metadata(self) -> list[Any]:
        """The name, dtype and shape of each tensor that is sent."""
        import torch

        kinds = list(self._source.metadata())
        empty = {one.name: torch.empty(tuple(one.shape), dtype=one.dtype, device="meta") for one in kinds}
        converted = to_checkpoint_names(self._config, empty) or empty
        return [type(kinds[0])(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in converted.items()]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        tensors = dict(iter(self._source))
        yield from (to_checkpoint_names(self._config, tensors) or tensors).items()


class _Once:
    """A configuration as the key of a cache: by itself and not by its values."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __hash__(self) -> int:
        return id(self.config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Once) and other.config is self.config


@lru_cache(4)
def _skeleton(key: _Once) -> Any:
    """The model without memory for its tensors, which the tables are found by; None where transformers has none."""
    import torch
    import transformers

    config = key.config
    name = next(iter(getattr(config, "architectures", None) or ()), "")
    kind = getattr(transformers, name, None)
    try:
        with torch.device("meta"):
            return kind(config) if kind is not None else transformers.AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError, AttributeError, ImportError, KeyError, RuntimeError):  # a model of its own code
        return None
