"""Arrays as a trainer holds them, torch or numpy: read as numpy, and given back as what they were."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.errors import BadBatch

__all__ = ["as_integers", "as_kind_of"]


def as_integers(value: Any, name: str) -> NDArray[np.integer[Any]]:
    """The same numbers as a numpy array; not copied where they are on the CPU.

    Args:
        value: a torch tensor on any device, or a numpy array.
        name: what it is called in an error.

    Raises:
        BadBatch: it is neither, or holds no integers.
    """
    if not isinstance(value, np.ndarray) and not _is_torch(value):
        raise BadBatch(f"{name} is a {type(value).__name__}: give a torch tensor or a numpy array.")
    kind = str(value.dtype).removeprefix("torch.")
    if not kind.startswith(("int", "uint")):
        raise BadBatch(f"{name} holds {kind}: give integers, such as int64.")
    return value if isinstance(value, np.ndarray) else value.detach().cpu().numpy()


def as_kind_of(like: Any, array: NDArray[Any]) -> Any:
    """`array` as what `like` is: a torch tensor on the same device, or a numpy array."""
    return sys.modules["torch"].from_numpy(array).to(like.device) if _is_torch(like) else array


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")  # nobody can hold a tensor of a library that was never loaded
    return torch is not None and isinstance(value, torch.Tensor)
