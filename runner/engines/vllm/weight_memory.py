"""A state dict in memory that the engine's processes can read: a safetensors file that has no name in any folder.

It lives for as long as somebody holds it open, so nothing is left of it however this process ends, and the size of
/dev/shm does not limit it.
"""

from __future__ import annotations

import json
import math
import os
import weakref
from collections.abc import Mapping
from typing import Any

from anyio import from_thread

from runner.engines.weights import SAFETENSORS_NAMES, TensorForm
from runner.errors import BadWeights

__all__ = ["WeightMemory", "form_of"]

_NAME = "deltarunner-weights"
_EXPONENTS = {
    "float64": ("int64", 0x7FF0_0000_0000_0000),
    "float32": ("int32", 0x7F80_0000),
    "float16": ("int16", 0x7C00),
    "bfloat16": ("int16", 0x7F80),
}


class WeightMemory:
    """Tensors, written once."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create(_NAME)
        self._closed = weakref.finalize(self, os.close, self._descriptor)

    @property
    def path(self) -> str:
        """Where other processes of this machine open it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Give the memory back once nobody reads it any more; twice is allowed."""
        self._closed()

    @classmethod
    def of(cls, tensors: Mapping[str, Any], dtypes: Mapping[str, str]) -> WeightMemory:
        """The tensors of a state dict, copied from wherever they are; in a worker thread of anyio.

        Args:
            tensors: torch's, on any device, or numpy's.
            dtypes: the type that each tensor is written as, by name.

        Raises:
            BadWeights: a tensor has no data, or holds a value that is no finite number; names it.
        """
        forms = {name: TensorForm(dtypes[name], tuple(tensor.shape)) for name, tensor in tensors.items()}
        header, order = _layout(forms)
        memory = cls()
        try:
            with open(memory._descriptor, "wb", closefd=False) as file:
                file.write(header)
                for name in order:
                    from_thread.check_cancelled()
                    file.write(_bytes(name, tensors[name], forms[name].dtype))
        except OSError as error:
            memory.close()
            raise BadWeights(f"the state dict cannot be kept in memory a second time: {error}.") from error
        except BaseException:
            memory.close()
            raise
        return memory


def form_of(name: Any, tensor: Any) -> TensorForm:
    """The form of a tensor of torch or numpy.

    Raises:
        BadWeights: it is neither, or has no data of its own in this process.
    """
    import numpy as np
    import torch

    if not isinstance(name, str):
        raise BadWeights(f"the state dict's key {name!r} is {type(name).__name__}, not the name of a tensor.")
    if isinstance(tensor, np.ndarray):
        return TensorForm(tensor.dtype.name, tensor.shape)
    if not isinstance(tensor, torch.Tensor):
        raise BadWeights(f"the state dict's {name!r} is {type(tensor).__name__}, not a tensor of torch or numpy.")
    if hasattr(tensor, "full_tensor"):
        raise BadWeights(f"the state dict's {name!r} is a part of a distributed tensor: give tensor.full_tensor().")
    if tensor.is_meta or tensor.layout is not torch.strided:
        raise BadWeights(f"the state dict's {name!r} has no data here: device {tensor.device}, {tensor.layout}.")
    return TensorForm(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


# By hand, since the library takes all tensors at once: `serialize` held 1,026 MiB beside a file of 512, this holds 50.
# And its `serialize_file` writes another file and renames it, which a file without a name cannot be.
def _layout(forms: Mapping[str, TensorForm]) -> tuple[bytes, list[str]]:
    """The header, and the order in which the tensors follow it: the widest first, so that all are aligned."""
    order = sorted(forms, key=lambda name: -_width(forms[name].dtype))
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


def _bytes(name: str, tensor: Any, dtype: str) -> memoryview:
    """A tensor as it lies in a file; rounded to `dtype`."""
    import torch

    given = tensor.detach() if isinstance(tensor, torch.Tensor) else torch.from_numpy(tensor.copy())
    written = given.to("cpu", getattr(torch, dtype)).contiguous().reshape(-1)
    if dtype in _EXPONENTS and not _finite(written, dtype):
        wide = written.dtype != given.dtype and bool(given.isfinite().all())
        reason = f"too large for {dtype}, the model's dtype" if wide else "NaN or infinite"
        raise BadWeights(f"the state dict's {name!r} holds a value that is {reason}.")
    return memoryview(written.view(torch.uint8).numpy())


def _finite(tensor: Any, dtype: str) -> bool:
    """Whether no value has all bits of its exponent set; numpy, since torch's threads wait for the engine's here."""
    import torch

    kind, exponent = _EXPONENTS[dtype]
    bits = tensor.view(getattr(torch, kind)).numpy()
    return not bits.size or int((bits & exponent).max()) != exponent
