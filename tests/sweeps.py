"""How much of a sweep is played: a part that moves on with every commit, or all of it with `--sweeps=whole`."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Sequence
from typing import TypeVar

from tests.repository import ROOT

__all__ = ["begin", "part", "seed_of_commit", "source", "times", "whole"]

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
    """All items of a whole sweep, else every so-manieth, and another commit begins with another one."""
    return list(items) if _whole else list(items[_seed % one_in :: one_in])


def times(whole: int, sampled: int) -> int:
    return whole if _whole else sampled


def source(name: str) -> random.Random:
    """What random cases are drawn from: the same for the same seed, which the head of every test run prints."""
    return random.Random(f"{name} {_seed}")


def seed_of_commit() -> int:
    """A number that every commit has another of; 0 where there is no git, or no repository."""
    try:
        # Their count and not a hash: n commits then look at all n parts.
        count = ["git", "rev-list", "--count", "HEAD"]
        told = subprocess.run(count, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(told.stdout)
