"""How much of a sweep is played: a part that moves on with every commit, or all of it with `--sweeps=whole`."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Sequence
from typing import TypeVar

from tests.repository import ROOT

__all__ = ["begin", "part", "random_of", "seed_of_commit", "times", "whole"]

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
    """All items of a whole sweep, else every n-th of them, and the next commit begins with the next one."""
    return list(items) if _whole else list(items[_seed % one_in :: one_in])


def times(whole: int, sampled: int) -> int:
    return whole if _whole else sampled


def random_of(name: str) -> random.Random:
    """What random cases are drawn from: the same for the same seed, which the head of every test run prints."""
    return random.Random(f"{name} {_seed}")


def seed_of_commit() -> int:
    """A number that the next commit has the next of; a random one where git does not know how many there are."""
    try:
        shallow = _told_by_git("rev-parse", "--is-shallow-repository") == "true"
        # Their count and not a hash: n commits, one after the other, then look at all n parts.
        return random.getrandbits(32) if shallow else int(_told_by_git("rev-list", "--count", "HEAD"))
    except (OSError, subprocess.CalledProcessError):
        return random.getrandbits(32)


def _told_by_git(*command: str) -> str:
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
