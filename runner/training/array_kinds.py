"""Conversion between numpy arrays and torch tensors: results have the same kind as the given values."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["as_numpy", "like"]


def as_numpy(given: Any) -> NDArray[Any]:
    """Return an array or a tensor as a numpy array; a tensor of any floating-point type becomes float64.

    The tensor may be on any device, and may need a gradient.
    """
    if not hasattr(given, "detach"):
        return np.asarray(given)
    values = given.detach().cpu()
    return np.asarray((values.double() if values.is_floating_point() else values).numpy())


def like(given: Any, values: NDArray[Any]) -> Any:
    """Return the values as float32: an array, or, if `given` is a tensor, a tensor on its device without a gradient."""
    if not hasattr(given, "detach"):
        return values.astype(np.float32)
    import torch

    return torch.from_numpy(values.astype(np.float32)).to(given.device)
