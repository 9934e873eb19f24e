"""State dict in memory that the engine's processes can read. The memory is a safetensors file that is in no folder.

The memory is freed with its last open descriptor, so nothing remains after this process ends, and the size of
/dev/shm does not limit it.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from anyio import from_thread

from runner.engines.tensor_bytes import bytes_of
from runner.engines.weights import SAFETENSORS_NAMES, TensorForm
from runner.errors import BadWeights

__all__ = ["SharedWeights", "form_of"]

_NAME = "deltarunner-weights"
_MAX_PARTS = 512  # buffers per call; Linux allows 1,024
_BATCH_BYTES = 32 * 1024**2  # bytes per write call, and per step of the check for NaN
_EXPONENTS = {
    "float64": ("int64", 0x7FF0_0000_0000_0000),
    "float32": ("int32", 0x7F80_0000),
    "float16": ("int16", 0x7C00),
    "bfloat16": ("int16", 0x7F80),
}


class SharedWeights:
    """Memory with tensors, which this process writes once and other processes read."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create(_NAME)
        self._closed = weakref.finalize(self, os.close, self._descriptor)

    @property
    def path(self) -> str:
        """Path under which other processes of this machine open the memory."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Close the memory, which is freed when all its readers have closed it too; idempotent."""
        self._closed()

    @classmethod
    def of(cls, tensors: Mapping[str, Any], dtypes: Mapping[str, str]) -> SharedWeights:
        """Copy the tensors of a state dict to new shared memory. Call this in a worker thread of anyio.

        Args:
            tensors: torch tensors on any device, or numpy arrays.
            dtypes: dtype in which each tensor is written, by the tensor's name.

        Raises:
            BadWeights: a tensor has a value that is not finite in its dtype, or the memory is too small.
        """
        forms = {name: TensorForm(dtypes[name], tuple(tensor.shape)) for name, tensor in tensors.items()}
        header, order = _layout(forms)
        memory = cls()
        try:
            _write(memory._descriptor, [memoryview(header)])
            for batch in _batches((tensors[name], forms[name].dtype) for name in order):
                from_thread.check_cancelled()
                _write(memory._descriptor, batch)
            bad = _first_not_finite(memory._descriptor, len(header), {name: forms[name] for name in order})
            if bad is not None:
                wide = _is_finite(tensors[bad])
                too_large = f"too large for {dtypes[bad]}, the model's dtype: start the engine with a wider dtype"
                reason = too_large if wide else "NaN or infinite: give weights of an earlier step"
                raise BadWeights(f"the state dict's {bad!r} holds a value that is {reason}.")
        except OSError as error:
            memory.close()
            raise BadWeights(
                f"the state dict cannot be copied to shared memory ({error}): save it to a folder, and give the folder."
            ) from error
        except BaseException:
            memory.close()
            raise
        return memory


def form_of(name: Any, tensor: Any) -> TensorForm:
    """Return the form of a torch tensor or a numpy array.

    Raises:
        BadWeights: the name is not a string, the value has another type, or the tensor is not dense, on the meta
            device, or a part of a distributed tensor.
    """
    import torch

    if not isinstance(name, str):
        raise BadWeights(f"the state dict's key {name!r} is {type(name).__name__}: give the name of a tensor.")
    if isinstance(tensor, np.ndarray):
        return TensorForm(tensor.dtype.name, tensor.shape)
    if not isinstance(tensor, torch.Tensor):
        raise BadWeights(f"the state dict's {name!r} is {type(tensor).__name__}: give a tensor of torch or numpy.")
    if hasattr(tensor, "full_tensor"):
        raise BadWeights(f"the state dict's {name!r} is a part of a distributed tensor: give tensor.full_tensor().")
    if tensor.is_meta or tensor.layout is not torch.strided:
        raise BadWeights(
            f"the state dict's {name!r} has no data here: device {tensor.device}, {tensor.layout}; give a dense tensor "
            "with values."
        )
    return TensorForm(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


# The file is written without the library safetensors. The library's `serialize` needs memory for all tensors at once:
# 1,026 MiB for a file of 512 MiB, against 64 MiB in this module. Its `serialize_file` renames a temporary file, which
# does not work for a file without a name.
def _layout(forms: Mapping[str, TensorForm]) -> tuple[bytes, list[str]]:
    """Return the header, and the names of the tensors in the order of the file.

    Tensors are ordered by dtype, the widest dtype first, so that all tensors are aligned.
    """
    order = sorted(forms, key=lambda name: (-_width(forms[name].dtype), forms[name].dtype))
    entries, end = {}, 0
    for name in order:
        form, begin = forms[name], end
        end += _width(form.dtype) * math.prod(form.shape)
        code = SAFETENSORS_NAMES[form.dtype]
        entries[name] = {"dtype": code, "shape": list(form.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def _width(dtype: str) -> int:
    import torch

    size: int = getattr(torch, dtype).itemsize
    return size


# A few large write calls replace one call per tensor, since each call releases the GIL and then waits to get it back.


def _batches(tensors: Iterable[tuple[Any, str]]) -> Iterator[list[memoryview]]:
    """Yield the bytes of the tensors in batches, so that only one batch of copies is in memory at a time."""
    batch: list[memoryview] = []
    size = 0
    for tensor, dtype in tensors:
        batch.append(bytes_of(tensor, dtype).data)
        size += batch[-1].nbytes
        if len(batch) == _MAX_PARTS or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    yield batch


def _write(descriptor: int, parts: list[memoryview]) -> None:
    while parts:
        written = os.writev(descriptor, parts)  # one call writes at most two gigabytes
        while parts and written >= parts[0].nbytes:
            written -= parts.pop(0).nbytes
        if parts:
            parts[0] = parts[0][written:]


def _first_not_finite(descriptor: int, begin: int, forms: Mapping[str, TensorForm]) -> str | None:
    """Return the name of the first tensor with a NaN or an infinity; None if there is none.

    The tensors are in the file in the order of `forms`, from byte `begin` on. In a NaN or an infinity, all bits of
    the exponent are set. Only dtypes in `_EXPONENTS` are checked. The check uses numpy, since torch's threads would
    wait for the engine's threads.
    """
    memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    for dtype, group in itertools.groupby(forms.items(), key=lambda item: item[1].dtype):
        names, sizes = zip(*((name, math.prod(form.shape)) for name, form in group), strict=True)
        ends = list(itertools.accumulate(sizes))
        if dtype in _EXPONENTS:
            kind, exponent = _EXPONENTS[dtype]
            bits = np.frombuffer(memory, kind, ends[-1], begin)
            at_once = _BATCH_BYTES // bits.itemsize
            exponents = np.empty(min(ends[-1], at_once), kind)
            for start in range(0, ends[-1], at_once):
                from_thread.check_cancelled()
                part = bits[start : start + at_once]
                found = np.bitwise_and(part, exponent, out=exponents[: part.size])
                if int(found.max()) == exponent:
                    first: str = names[bisect_right(ends, start + int(found.argmax()))]
                    return first
        begin += ends[-1] * _width(dtype)
    return None


def _is_finite(tensor: Any) -> bool:
    import torch

    return bool((np if isinstance(tensor, np.ndarray) else torch).isfinite(tensor).all())
