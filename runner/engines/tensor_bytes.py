"""Bytes of tensors, read without releasing the GIL.

Most torch operations release the GIL; a thread beside a busy event loop then waits up to 5 ms
(`sys.getswitchinterval()`) to get the GIL back. With torch, 270 MB in 272 tensors took 10 s because of this; with this
module they take 0.4 s.
"""

from __future__ import annotations

import ctypes
from typing import Any, TypeAlias

import numpy as np

__all__ = ["Bytes", "bytes_of", "tensor_of"]

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
"""Array of bytes, shape [n]."""

_BY_WIDTH = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}  # types of both numpy and torch


def bytes_of(tensor: Any, dtype: str | None = None) -> Bytes:
    """Return the bytes of a tensor or a numpy array, contiguous and in row-major order.

    Args:
        tensor: the tensor or array; on any device, with any strides.
        dtype: name of a torch type to convert to; None keeps the type.

    Returns:
        A view of the tensor's memory if its layout matches, otherwise of a copy.
    """
    import torch

    if isinstance(tensor, np.ndarray):
        if tensor.dtype.name == (dtype or tensor.dtype.name) and tensor.dtype.isnative:
            return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
        # The array is copied, since torch warns about read-only arrays. The copy has the native byte order.
        tensor = torch.from_numpy(tensor.astype(tensor.dtype.newbyteorder("=")))
    wanted = tensor.dtype if dtype is None else getattr(torch, dtype)
    if not _lies_so(tensor, wanted):
        tensor = tensor.detach().to("cpu", wanted).resolve_conj().resolve_neg().contiguous()
        if not _lies_so(tensor, wanted):  # a tensor subclass with its own memory layout
            return _by_torch(tensor)
    if not tensor.nbytes:
        return np.empty(0, np.uint8)
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    # The reference keeps the memory alive while a view exists. A reference to the tensor would not suffice, since the
    # tensor could get other memory.
    memory.owner = tensor.untyped_storage()
    return np.frombuffer(memory, np.uint8)


def _lies_so(tensor: Any, dtype: Any) -> bool:
    import torch

    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.dtype == dtype
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _by_torch(tensor: Any) -> Bytes:
    import torch

    plain = tensor.reshape(-1)
    if plain.stride(0) != 1:  # a tensor of at most one number counts as contiguous, and cannot be viewed
        plain = plain.clone(memory_format=torch.contiguous_format)
    found: Bytes = plain.view(torch.uint8).numpy()
    return found


def tensor_of(bytes_: Bytes, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return a torch tensor that is a view of these bytes."""
    import torch

    wanted = getattr(torch, dtype)
    tensor = torch.from_numpy(bytes_.view(_BY_WIDTH[wanted.itemsize]).reshape(shape))
    return tensor if tensor.dtype == wanted else tensor.view(wanted)
