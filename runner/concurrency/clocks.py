"""Clocks: time limits that stop while nobody works, as cancel scopes whose deadline moves."""

from __future__ import annotations

import asyncio
import math
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import TracebackType
from typing import Self

import anyio

from runner.concurrency.task_scope import TaskScope

__all__ = [
    "Asking",
    "Clock",
    "Progress",
    "Standstill",
    "Waiting",
    "WhileSampling",
    "a_clock_has_fired",
    "loop_time",
    "on_asyncio",
]

_running: ContextVar[tuple[Clock, ...]] = ContextVar("running_clocks", default=())


def loop_time() -> float:
    """What `anyio.current_time` says, at a fifth of what that costs: a turn asks for it some twenty times."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:  # another event loop than asyncio's
        return anyio.current_time()


def on_asyncio() -> bool:
    """Whether the event loop is asyncio's."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def a_clock_has_fired() -> bool:
    """Whether one of the clocks that run over the current task has."""
    return any(clock.fired for clock in _running.get())


class Clock:
    """A time limit over a block, `None` for no limit.

    Every clock that runs over a task stops while the task waits for a place (`Waiting`), so that an outcome does not
    depend on how wide the run is. While an agent is sampled inside the block it stops too, unless it is told to count
    that: an engine's speed is no fault of the author's code. `start` gives an entered clock a new limit, `lift` takes
    it off: the block may be left open while its limit changes, which a scope around a single hook could not.

    Args:
        seconds: the limit.
        counts_sampling: the clock goes on while an agent is sampled inside the block.
        over_hooks: the block holds code of an author's that may leave scopes open after the block, or leave those
            that were opened before it. On another event loop than asyncio's that is an error.
    """

    __slots__ = ("_asking", "_outer", "_remaining", "_still", "_stops", "counts_sampling", "scope", "seconds")

    def __init__(
        self, seconds: float | None = None, *, counts_sampling: bool = False, over_hooks: bool = False
    ) -> None:
        self.seconds = seconds
        """The limit that was last set; None for no limit."""
        self.counts_sampling = counts_sampling
        """Whether the clock goes on while an agent is sampled inside the block."""
        self.scope = TaskScope() if over_hooks and on_asyncio() else anyio.CancelScope()
        """The cancel scope of the block, whose deadline the clock moves."""
        self._remaining = math.inf
        # Several tasks under one clock may wait at once: it goes on when the last of them does.
        self._stops = 0
        self._asking = 0
        self._still = False
        self._outer: tuple[Clock, ...] = ()

    @property
    def fired(self) -> bool:
        """Whether the limit was reached, or somebody cancelled the block."""
        return self.scope.cancel_called

    def start(self, seconds: float | None) -> None:
        """Set a new limit that counts from now."""
        self.seconds = seconds
        self._remaining = math.inf if seconds is None else seconds
        if not self._still:
            self._run()

    def lift(self) -> None:
        """Take the limit off; the block goes on."""
        self.start(None)

    def stop(self) -> None:
        """Stand still, once for each of several waits at the same time."""
        self._stops += 1
        self._settle()

    def go_on(self) -> None:
        """Undo one `stop`."""
        self._stops -= 1
        self._settle()

    def begin_asking(self) -> None:
        """One more asks for a turn at the same time: it stands still while as many wait as ask."""
        self._asking += 1
        self._settle()

    def end_asking(self) -> None:
        """Undo one `begin_asking`."""
        self._asking -= 1
        self._settle()

    def _settle(self) -> None:
        still = self._stops >= (self._asking or 1)
        if still is self._still:
            return
        self._still = still
        if not still:
            self._run()
        elif self.scope.deadline != math.inf:
            # A deadline that has passed in this very moment fires when the clock goes on.
            self._remaining = max(0.0, self.scope.deadline - loop_time())
            self.scope.deadline = math.inf

    def _run(self) -> None:
        if self._remaining != math.inf:
            self.scope.deadline = loop_time() + self._remaining
        elif self.scope.deadline != math.inf:  # moving it costs a timer, and most blocks never had one
            self.scope.deadline = math.inf

    def is_over_this_task(self) -> bool:
        """Whether it runs over the current task."""
        return self in _running.get()

    def __enter__(self) -> Self:
        self.start(self.seconds)
        self.scope.__enter__()
        self._outer = _running.get()
        # A tuple, never changed: a task that is started in the block keeps the clocks that it was started under.
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
        """When the wait began, on the event loop's clock."""
        self.seconds = 0.0
        """How long the wait took, once it is over."""

    @classmethod
    def of_this_task(cls) -> Self:
        """A wait that has not begun, over the clocks that run over this task now."""
        waiting = cls()
        waiting._clocks = _running.get()
        return waiting

    def __enter__(self) -> Self:
        self._clocks = _running.get()
        self.begin()
        return self

    def begin(self) -> None:
        """Stop the clocks; another task may do it for the one that waits."""
        self._waits = True
        self.began = loop_time()
        for clock in self._clocks:
            clock.stop()

    def over(self) -> None:
        """End the wait, and the clocks go on; a second call does nothing."""
        if self._waits:
            self._waits = False
            self.seconds = loop_time() - self.began
            for clock in self._clocks:
                clock.go_on()

    def __exit__(self, *_: object) -> None:
        self.over()


class Asking:
    """One of several that ask for turns at the same time, under clocks that stand still only while all of them wait.

    A clock that stood still while any of them waits would never fire for a program with many threads; one that stood
    still for none would make an outcome depend on how wide the run is.
    """

    __slots__ = ("_clocks",)

    def __enter__(self) -> None:
        self._clocks = _running.get()
        for clock in self._clocks:
            clock.begin_asking()

    def __exit__(self, *_: object) -> None:
        for clock in self._clocks:
            clock.end_asking()


class WhileSampling:
    """Stops the clocks over the current task that do not count what an agent samples."""

    __slots__ = ("_clocks",)

    def __enter__(self) -> None:
        self._clocks = [clock for clock in _running.get() if not clock.counts_sampling]
        for clock in self._clocks:
            clock.stop()

    def __exit__(self, *_: object) -> None:
        for clock in self._clocks:
            clock.go_on()


class Standstill:
    """Stops the clocks of every task that waits for something which stands still: an engine that is paused."""

    __slots__ = ("_watched", "on")

    def __init__(self) -> None:
        self.on = False
        """Whether it stands still now."""
        self._watched: dict[Waiting, None] = {}

    def begin(self) -> None:
        """Stop the clocks of those who wait; a second call does nothing."""
        if not self.on:
            self.on = True
            for waiting in self._watched:
                waiting.begin()

    def end(self) -> None:
        """Let the clocks go on; a second call does nothing."""
        if self.on:
            self.on = False
            for waiting in self._watched:
                waiting.over()

    def watched(self) -> AbstractContextManager[None]:
        """A block in which the clocks over the current task stop for as long as it stands still."""
        return _Watched(self)


class _Watched:
    """The block of `Standstill.watched`; no generator, which would cost each turn three times as much."""

    __slots__ = ("_standstill", "_waiting")

    def __init__(self, standstill: Standstill) -> None:
        self._standstill = standstill

    def __enter__(self) -> None:
        self._waiting = Waiting.of_this_task()
        self._standstill._watched[self._waiting] = None
        if self._standstill.on:
            self._waiting.begin()

    def __exit__(self, *_: object) -> None:
        del self._standstill._watched[self._waiting]
        self._waiting.over()


class Progress:
    """Restarts the clocks of all tasks that wait for one thing whenever that thing makes progress.

    An engine that reads the prompts of some turns lets others wait for their first id, and is not silent. Clocks are
    restarted at an eighth of their limit and not at every step: moving a deadline costs a timer.
    """

    __slots__ = ("_clocks", "_next")

    def __init__(self) -> None:
        self._clocks: dict[Clock, None] = {}
        self._next = 0.0  # before this time nothing is to be done

    def note(self, now: float | None = None) -> None:
        """Progress was made; `now` is the event loop's time where that is known already."""
        now = loop_time() if now is None else now
        if now < self._next or not self._clocks:
            return
        for clock in self._clocks:
            clock.start(clock.seconds)
        self._next = now + min(_patience(clock) for clock in self._clocks) / 8

    def watched(self, clock: Clock) -> AbstractContextManager[None]:
        """A block in which each progress restarts the clock."""
        return _Noted(self, clock)


def _patience(clock: Clock) -> float:
    return math.inf if clock.seconds is None else clock.seconds


class _Noted:
    """The block of `Progress.watched`."""

    __slots__ = ("_clock", "_progress")

    def __init__(self, progress: Progress, clock: Clock) -> None:
        self._progress, self._clock = progress, clock

    def __enter__(self) -> None:
        progress = self._progress
        progress._clocks[self._clock] = None
        # Due no later than an eighth of the shortest limit: this one may be shorter than those before.
        progress._next = min(progress._next, loop_time() + _patience(self._clock) / 8)

    def __exit__(self, *_: object) -> None:
        del self._progress._clocks[self._clock]
