"""Tensors as plain arrays and back: Ray's store hands arrays out as views, and pickles tensors by the slow way."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["as_arrays", "as_tensors"]


@dataclass(frozen=True, slots=True)
class _TensorBytes:
    """A tensor's bytes; numpy has no bfloat16 and no float8, so the type goes by its name."""

    bytes_: np.ndarray[Any, np.dtype[np.uint8]]
    dtype: str
    shape: tuple[int, ...]


def as_arrays(value: Any) -> Any:
    """The same value; where it is a mapping, its tensors are arrays of bytes, shape [bytes]."""
    torch = sys.modules.get("torch")  # without torch nobody has a tensor
    if torch is None or not isinstance(value, Mapping):
        return value
    return {name: _as_bytes(item) if isinstance(item, torch.Tensor) else item for name, item in value.items()}


def as_tensors(value: Any) -> Any:
    """The value that `as_arrays` was given; its tensors are views of the arrays and must not be written to."""
    if not isinstance(value, dict):
        return value
    return {name: _as_tensor(item) if isinstance(item, _TensorBytes) else item for name, item in value.items()}


def _as_bytes(tensor: Any) -> _TensorBytes:
    import torch

    plain = tensor.detach().cpu().contiguous().reshape(-1)
    if plain.stride(0) != 1:  # of one number or none counts as contiguous, and cannot be viewed
        plain = plain.clone(memory_format=torch.contiguous_format)
    return _TensorBytes(plain.view(torch.uint8).numpy(), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _as_tensor(item: _TensorBytes) -> Any:
    import torch

    with warnings.catch_warnings():
        # A view of the store is read-only, and so is what the engine does with new weights.
        warnings.simplefilter("ignore", UserWarning)
        tensor = torch.from_numpy(item.bytes_)
    return tensor.view(getattr(torch, item.dtype)).reshape(item.shape)
