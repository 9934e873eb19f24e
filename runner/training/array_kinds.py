"""Conversion between numpy arrays and torch tensors: results have the same kind as the given values."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["as_numpy", "like"]


def as_numpy(given: Any) -> NDArray[Any]:
    """Return the values of an array, or of a tensor on any device, in half precision or with a gradient."""
    if not hasattr(given, "detach"):
        return np.asarray(given)
    values = given.detach().cpu()
    return np.asarray((values.double() if values.is_floating_point() else values).numpy())


def like(given: Any, values: NDArray[Any]) -> Any:
    """Return the values as float32, as a tensor on the same device without a gradient if a tensor was given."""
    if not hasattr(given, "detach"):
        return values.astype(np.float32)
    import torch

    return torch.from_numpy(values.astype(np.float32)).to(given.device)
