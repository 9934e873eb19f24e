"""A watchdog for event loops in tests: it names the code that blocks a loop."""

from __future__ import annotations

from typing import Self

from runner.concurrency.loop_lag import TICK_SECONDS, Blocker, LagMonitor
from runner.concurrency.threads import Workers
from runner.errors import BadOption

__all__ = ["LoopWatchdog"]


class LoopWatchdog:
    """An `async with` block in which no code may block the event loop. It may be entered several times.

    Args:
        seconds: total measured time for which one piece of code may block the loop.
        tick: seconds between two checks. Up to four ticks are not measured when code begins to block the loop.
    """

    def __init__(self, seconds: float = 0.2, *, tick: float = TICK_SECONDS) -> None:
        self.seconds = seconds
        """Seconds for which one piece of code may block the loop; may be set before the block is entered."""
        self.blockers: list[Blocker] = []
        """Code that has blocked the loop for `seconds` or more, the worst of each `async with` block first."""
        self._tick = tick
        self._depth = 0
        self._monitor: LagMonitor

    async def __aenter__(self) -> Self:
        """Begin to watch the running event loop.

        Raises:
            BadOption: `seconds` is not above 0.
        """
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
        """A sentence for each blocker: function, file, line, and the fix."""
        return [
            f"the event loop was blocked for {blocker.seconds:.2f} s or more in {blocker.where}: {blocker.advice}"
            for blocker in self.blockers
        ]

    def check(self) -> None:
        """Raise an error if code has blocked the loop.

        Raises:
            AssertionError: code has blocked the loop; the message has the sentences of `complaints()`.
        """
        __tracebackhide__ = True
        if self.blockers:
            raise AssertionError("\n".join(self.complaints()))
