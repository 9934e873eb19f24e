"""Conversion of tensors to plain arrays and back: Ray's store reads arrays without a copy, tensors slowly."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.engines.tensor_bytes import Bytes, bytes_of, tensor_of

__all__ = ["as_arrays", "as_tensors"]


@dataclass(frozen=True, slots=True)
class _TensorBytes:
    """The bytes of a tensor, and its type by name: numpy has no bfloat16 and no float8."""

    bytes_: Bytes
    dtype: str
    shape: tuple[int, ...]


def as_arrays(value: Any) -> Any:
    """Replace the tensors of a mapping by arrays of bytes, shape [bytes]. Any other value is returned as it is."""
    torch = sys.modules.get("torch")  # without torch, no value is a tensor
    if torch is None or not isinstance(value, Mapping):
        return value
    return {name: _as_bytes(item) if isinstance(item, torch.Tensor) else item for name, item in value.items()}


def as_tensors(value: Any) -> Any:
    """Undo `as_arrays`. The tensors are views of the arrays and must not be written to."""
    if not isinstance(value, dict):
        return value
    return {name: _as_tensor(item) if isinstance(item, _TensorBytes) else item for name, item in value.items()}


def _as_bytes(tensor: Any) -> _TensorBytes:
    return _TensorBytes(bytes_of(tensor), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _as_tensor(item: _TensorBytes) -> Any:
    with warnings.catch_warnings():
        # A view of the store is read-only, and the engine only reads new weights.
        warnings.simplefilter("ignore", UserWarning)
        return tensor_of(item.bytes_, item.dtype, item.shape)
