"""What tests on a real Ray have in common: one cluster for all of them, and the proof that nothing of it stays."""

from __future__ import annotations

import importlib.util

import pytest

__all__ = ["require_ray"]


def require_ray() -> None:
    """Skip a test where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
