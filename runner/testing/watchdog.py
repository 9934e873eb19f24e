"""Watches event loops during a test, and names whose code kept one from running."""

from __future__ import annotations

from typing import Self

from runner.concurrency.loop_lag import TICK, Blocker, LagMonitor
from runner.concurrency.threads import Workers
from runner.errors import BadOption

__all__ = ["LoopWatchdog"]


class LoopWatchdog:
    """An `async with` block in which nobody may hold up the event loop; may be entered again and again.

    Args:
        seconds: how long the loop may stand still in all, in one piece of code; under 0.1 nothing is noticed.
        tick: seconds between two looks; what is over within four of them is not noticed at all.
    """

    def __init__(self, seconds: float = 0.2, *, tick: float = TICK) -> None:
        self.seconds = seconds
        """How long the loop may stand still in one piece of code; may be set before the block is entered."""
        self.blockers: list[Blocker] = []
        """The pieces of code that held it up for longer so far, the worst of each block first."""
        self._tick = tick
        self._depth = 0
        self._monitor: LagMonitor

    async def __aenter__(self) -> Self:
        if not self.seconds > 0:
            raise BadOption(f"loop_watchdog.seconds = {self.seconds!r}: give a number of seconds above 0.")
        self._depth += 1
        if self._depth == 1:
            self._monitor = await LagMonitor(Workers(1), tick=self._tick).__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        await self._monitor.__aexit__(None, None, None)
        self.blockers += [blocker for blocker in self._monitor.blockers() if blocker.seconds >= self.seconds]

    def complaints(self) -> list[str]:
        """What is wrong, one sentence for each who held it up: the function, its file and line, and what to do."""
        return [
            f"the event loop stood still for {blocker.seconds:.2f} s or more in {blocker.where}: {blocker.advice}"
            for blocker in self.blockers
        ]

    def check(self) -> None:
        """Raise if somebody held the loop up so far.

        Raises:
            AssertionError: the complaints.
        """
        __tracebackhide__ = True
        if self.blockers:
            raise AssertionError("\n".join(self.complaints()))
