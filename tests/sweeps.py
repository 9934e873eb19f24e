"""The part of a sweep that is played: a fixed sample, or all of it with `--sweeps=whole`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final, TypeVar

__all__ = ["DEFAULT_SEED", "begin", "part", "random_of", "times", "whole"]

# The same for every commit: one that is green stays green, and `git bisect` finds the commit that broke a test.
DEFAULT_SEED: Final = 0

T = TypeVar("T")

_whole = False
_seed = 0


def begin(*, whole: bool, seed: int) -> None:
    """Say how much is played; before test modules are imported, since they ask while they are parametrised."""
    global _whole, _seed
    _whole, _seed = whole, seed


def whole() -> bool:
    return _whole


def part(items: Sequence[T], one_in: int) -> list[T]:
    """All items of a whole sweep, else every n-th of them; the seed says with which to begin."""
    return list(items) if _whole else list(items[_seed % one_in :: one_in])


def times(whole: int, sampled: int) -> int:
    return whole if _whole else sampled


def random_of(name: str) -> random.Random:
    """The source of random cases: the same for the same seed, which the head of every test run prints."""
    return random.Random(f"{name} {_seed}")
