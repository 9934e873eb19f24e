"""The part of a sweep that is played: a fixed sample, or all of it with `--sweeps=whole`."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Final, TypeVar

__all__ = ["DEFAULT_SEED", "begin", "part", "random_of", "seed_libraries", "times", "whole"]

# The seed is the same for every commit: a green commit stays green, and `git bisect` finds the commit that broke a
# test.
DEFAULT_SEED: Final = 0

T = TypeVar("T")

_whole = False
_seed = 0


def begin(*, whole: bool, seed: int) -> None:
    """Set how much is played. Must be called before test modules are imported, since their parameters depend on it."""
    global _whole, _seed
    _whole, _seed = whole, seed


def whole() -> bool:
    return _whole


def part(items: Sequence[T], one_in: int) -> list[T]:
    """Return all items in a whole sweep, else every n-th item, beginning at a place that the seed chooses."""
    return list(items) if _whole else list(items[_seed % one_in :: one_in])


def times(whole: int, sampled: int) -> int:
    return whole if _whole else sampled


def random_of(name: str) -> random.Random:
    """Return the source of random cases. It is the same for the same seed, which the head of every test run prints."""
    return random.Random(f"{name} {_seed}")


def seed_libraries() -> None:
    """Seed the global generators, so that a test draws the same numbers after any other test."""
    random.seed(_seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(_seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(_seed)
