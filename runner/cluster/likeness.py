"""Whether a worker is like the others: else one episode would be another one on another machine."""

from __future__ import annotations

from runner.cluster.engine_process import versions_here
from runner.cluster.words import Joined
from runner.errors import BadOption

__all__ = ["require_like_the_first", "require_like_this_process"]


def require_like_the_first(joined: Joined, first: Joined, number: int) -> None:
    """Return where a worker's versions, vocabulary and template are those of the first one.

    Raises:
        BadOption: something differs; names it, the worker of this number, and both machines.
    """
    for what, value in first.same.items():
        if joined.same.get(what) != value:
            fix = f' Give one for all: VllmEngine(dtype="{value}").' if what == "dtype" else ""
            raise BadOption(
                f"worker {number} on {joined.node} has {what} {joined.same.get(what, 'none')}, and the first one, on "
                f"{first.node}, has {value}: they have to be the same on every machine.{fix}"
            )


def require_like_this_process(joined: Joined, number: int) -> None:
    """Return where a worker has the versions that are here.

    Raises:
        BadOption: something differs; names it, and the worker of this number.
    """
    for what, here in versions_here().items():
        there = joined.same.get(what, here)  # what only one of the two has disturbs neither
        # "2.9.0+cpu" and "2.9.0" are one release: a machine that only drives may have no GPU.
        if there.partition("+")[0] != here.partition("+")[0]:
            raise BadOption(
                f"worker {number} on {joined.node} has {what} {there}, and this process has {here}: they have to be "
                "the same on every machine."
            )
