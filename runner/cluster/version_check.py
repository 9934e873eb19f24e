"""Checks that a worker matches the others, so that an episode is the same on each machine."""

from __future__ import annotations

from runner.cluster.engine_process import versions_here
from runner.cluster.protocol import WorkerInfo
from runner.errors import BadOption

__all__ = ["require_like_the_first", "require_like_this_process"]


def require_like_the_first(info: WorkerInfo, first: WorkerInfo, number: int) -> None:
    """Check that a worker's versions, vocabulary and template are those of the first worker.

    Raises:
        BadOption: something differs; the message names it, the worker, and both machines.
    """
    for what, value in first.same.items():
        if info.same.get(what) != value:
            fix = f' Give one for all: VllmEngine(dtype="{value}").' if what == "dtype" else ""
            raise BadOption(
                f"worker {number} on {info.node} has {what} {info.same.get(what, 'none')}, and the first one, on "
                f"{first.node}, has {value}: they have to be the same on every machine.{fix}"
            )


def require_like_this_process(info: WorkerInfo, number: int) -> None:
    """Check that a worker has the versions of this process.

    Raises:
        BadOption: something differs; the message names it, and the worker.
    """
    for what, here in versions_here().items():
        there = info.same.get(what, here)  # a distribution that only one of them has does not matter
        # "2.9.0+cpu" and "2.9.0" are one release: a machine that only drives may have no GPU.
        if there.partition("+")[0] != here.partition("+")[0]:
            raise BadOption(
                f"worker {number} on {info.node} has {what} {there}, and this process has {here}: they have to be "
                "the same on every machine."
            )
