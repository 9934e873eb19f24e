"""Clocks: time limits that stop while nobody works, as cancel scopes whose deadline moves."""

from __future__ import annotations

import math
from contextvars import ContextVar
from types import TracebackType
from typing import Self

import anyio

__all__ = ["Clock", "Waiting"]

_running: ContextVar[tuple[Clock, ...]] = ContextVar("running_clocks", default=())


class Clock:
    """A time limit over a block, `None` for no limit.

    Every clock that runs over a task stops while the task waits for a place (`Waiting`), so that an outcome does not
    depend on how wide the run is. `start` gives an entered clock a new limit, `lift` takes it off: the block may be
    left open while its limit changes, which a scope around a single hook could not.
    """

    __slots__ = ("_outer", "_remaining", "_stops", "scope", "seconds")

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self.scope = anyio.CancelScope()
        self._remaining = math.inf
        self._stops = 0
        self._outer: tuple[Clock, ...] = ()

    @property
    def fired(self) -> bool:
        """The limit was reached, or somebody cancelled the block."""
        return self.scope.cancel_called

    def start(self, seconds: float | None) -> None:
        """Begin a new limit, from now."""
        self.seconds = seconds
        self._remaining = math.inf if seconds is None else seconds
        if not self._stops:
            self.scope.deadline = anyio.current_time() + self._remaining

    def lift(self) -> None:
        """Take the limit off; the block goes on."""
        self.start(None)

    def stop(self) -> None:
        """Stand still, once for each of several waits at the same time."""
        self._stops += 1
        if self._stops == 1 and self.scope.deadline != math.inf:
            self._remaining = max(0.0, self.scope.deadline - anyio.current_time())
            self.scope.deadline = math.inf

    def go_on(self) -> None:
        """Undo one `stop`."""
        self._stops -= 1
        if not self._stops and self._remaining != math.inf:
            self.scope.deadline = anyio.current_time() + self._remaining

    def __enter__(self) -> Self:
        self.start(self.seconds)
        self.scope.__enter__()
        self._outer = _running.get()
        _running.set((*self._outer, self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        _running.set(self._outer)
        return bool(self.scope.__exit__(kind, error, traceback))


class Waiting:
    """Stops every clock over the current task from entering until `over()` or leaving."""

    __slots__ = ("_clocks", "_waits", "began", "seconds")

    def __init__(self) -> None:
        self._clocks: tuple[Clock, ...] = ()
        self._waits = False
        self.began = 0.0
        self.seconds = 0.0

    def __enter__(self) -> Self:
        self._clocks = _running.get()
        self._waits = True
        self.began = anyio.current_time()
        for clock in self._clocks:
            clock.stop()
        return self

    def over(self) -> None:
        """The wait is over; the clocks go on. Twice is allowed."""
        if self._waits:
            self._waits = False
            self.seconds = anyio.current_time() - self.began
            for clock in self._clocks:
                clock.go_on()

    def __exit__(self, *_: object) -> None:
        self.over()
