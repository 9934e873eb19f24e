"""Clocks: time limits that pause while a task waits in a queue. A clock moves the deadline of a cancel scope."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import TracebackType
from typing import Final, Self

import anyio

from runner.concurrency.task_scope import TaskScope
from runner.errors import BadOption

__all__ = [
    "FIRST_STEP_FACTOR",
    "Clock",
    "ParallelRequest",
    "PauseState",
    "Progress",
    "Waiting",
    "WhileSampling",
    "a_clock_has_fired",
    "loop_clock",
    "loop_time",
    "on_asyncio",
    "require_asyncio",
    "task_scope",
]

FIRST_STEP_FACTOR: Final = 10.0
"""Factor by which stall limits are longer until an engine has made its first step, which may compile kernels."""

_running: ContextVar[tuple[Clock, ...]] = ContextVar("running_clocks", default=())


def loop_time() -> float:
    """Return `anyio.current_time()` at a fifth of its cost. A turn calls this about twenty times."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:  # the event loop is not asyncio's
        return anyio.current_time()


def loop_clock() -> Callable[[], float]:
    """Return a function that returns the time of the current event loop, as `loop_time()` does, at a lower cost."""
    try:
        return asyncio.get_running_loop().time
    except RuntimeError:
        return anyio.current_time


def on_asyncio() -> bool:
    """True if the event loop is asyncio's."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def require_asyncio(user: str, *, in_tests: str = "a fixture anyio_backend that returns 'asyncio'") -> None:
    """Check that the event loop is asyncio's.

    Args:
        user: name of the part that needs asyncio, for the error.
        in_tests: the fix in async tests, for the error.

    Raises:
        BadOption: the event loop is trio's.
    """
    if not on_asyncio():
        raise BadOption(
            f"{user} works on asyncio alone, and this is trio: run on asyncio (anyio.run(main, backend='asyncio'); in "
            f"tests {in_tests})."
        )


def task_scope() -> TaskScope | anyio.CancelScope:
    """Return a cancel scope for a block of the current task. On asyncio, it takes half as long as a scope of anyio."""
    return TaskScope() if on_asyncio() else anyio.CancelScope()


def a_clock_has_fired() -> bool:
    """True if one of the clocks over the current task has fired."""
    return any(clock.fired for clock in _running.get())


class Clock:
    """An optional time limit over a block of code.

    Every clock over a task pauses while the task waits in a queue (`Waiting`), such as for the engine or a worker
    thread. So an outcome does not depend on the number of concurrent episodes. A clock also pauses while an agent is
    sampled inside the block, unless `counts_sampling` is set: a slow engine is not the fault of the author's code.
    `start` sets a new limit and `lift` removes it, so that a block can stay open while its limit changes.

    On asyncio and without `over_tasks`, an author's code in the block may leave scopes open, or close scopes that were
    opened before the block. Otherwise, both are errors.

    Args:
        seconds: the limit; None for no limit.
        counts_sampling: True if the clock runs while an agent is sampled inside the block.
        over_tasks: True to use anyio's own scope. Its cancellation and its shield also apply to tasks that are started
            in the block.
    """

    __slots__ = ("_holds", "_outer", "_remaining", "_requests", "_still", "counts_sampling", "scope", "seconds")

    def __init__(
        self, seconds: float | None = None, *, counts_sampling: bool = False, over_tasks: bool = False
    ) -> None:
        self.seconds = seconds
        """The limit in seconds that was set last; None for no limit."""
        self.counts_sampling = counts_sampling
        """True if the clock runs while an agent is sampled inside the block."""
        self.scope = anyio.CancelScope() if over_tasks else task_scope()
        """The cancel scope of the block, whose deadline the clock moves."""
        self._remaining = math.inf
        # Several tasks under one clock may wait at the same time. The clock continues when the last of them continues.
        self._holds = 0
        self._requests = 0
        self._still = False
        self._outer: tuple[Clock, ...] = ()

    @property
    def fired(self) -> bool:
        """True if the limit was reached, or the block was cancelled."""
        return self.scope.cancel_called

    def start(self, seconds: float | None) -> None:
        """Set a new limit that counts from now."""
        self.seconds = seconds
        self._remaining = math.inf if seconds is None else seconds
        if not self._still:
            self._run()

    def lift(self) -> None:
        """Remove the limit; the block continues."""
        self.start(None)

    def hold(self) -> None:
        """Count one more wait. The clock pauses; with parallel requests (`begin_request`), once all of them wait."""
        self._holds += 1
        self._settle()

    def release(self) -> None:
        """Undo one `hold`."""
        self._holds -= 1
        self._settle()

    def begin_request(self) -> None:
        """Count one more parallel request for a turn: the clock pauses only while all these requests wait."""
        self._requests += 1
        self._settle()

    def end_request(self) -> None:
        """Undo one `begin_request`."""
        self._requests -= 1
        self._settle()

    def _settle(self) -> None:
        still = self._holds >= (self._requests or 1)
        if still is self._still:
            return
        self._still = still
        if not still:
            self._run()
        elif self.scope.deadline != math.inf:
            # A deadline that passes at this moment fires when the clock continues.
            self._remaining = max(0.0, self.scope.deadline - loop_time())
            self.scope.deadline = math.inf

    def _run(self) -> None:
        if self._remaining != math.inf:
            self.scope.deadline = loop_time() + self._remaining
        elif self.scope.deadline != math.inf:  # moving a deadline creates a timer, and most blocks have no limit
            self.scope.deadline = math.inf

    def is_over_this_task(self) -> bool:
        """True if the current task runs under this clock."""
        return self in _running.get()

    def __enter__(self) -> Self:
        self.start(self.seconds)
        self.scope.__enter__()
        self._outer = _running.get()
        # The value is a tuple that never changes, so that a task keeps the clocks under which it was started.
        _running.set((*self._outer, self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        _running.set(self._outer)
        return bool(self.scope.__exit__(kind, error, traceback))


class Waiting:
    """A block in which every clock over the current task is paused, until `over()` or the end of the block."""

    __slots__ = ("_clocks", "_waits", "began", "seconds")

    def __init__(self) -> None:
        self._clocks: tuple[Clock, ...] = ()
        self._waits = False
        self.began = 0.0
        """Time at which the wait began, on the event loop's clock."""
        self.seconds = 0.0
        """Duration of the wait; 0 until it is over."""

    def __enter__(self) -> Self:
        self._clocks = _running.get()
        self.begin()
        return self

    def begin(self) -> None:
        """Pause the clocks; another task may call this for the task that waits."""
        self._waits = True
        self.began = loop_time()
        for clock in self._clocks:
            clock.hold()

    def over(self) -> None:
        """End the wait and continue the clocks; a second call has no effect."""
        if self._waits:
            self._waits = False
            self.seconds = loop_time() - self.began
            for clock in self._clocks:
                clock.release()

    def __exit__(self, *_: object) -> None:
        self.over()


class ParallelRequest:
    """One of several parallel requests for turns, under clocks that pause only while all these requests wait.

    If a clock paused while any request waits, it would never fire for a program with many threads. If it never paused,
    outcomes would depend on the number of concurrent episodes.
    """

    __slots__ = ("_clocks",)

    def __enter__(self) -> None:
        self._clocks = _running.get()
        for clock in self._clocks:
            clock.begin_request()

    def __exit__(self, *_: object) -> None:
        for clock in self._clocks:
            clock.end_request()


class WhileSampling:
    """A block in which every clock over the current task is paused, except clocks with `counts_sampling`."""

    __slots__ = ("_clocks",)

    def __enter__(self) -> None:
        self._clocks = [clock for clock in _running.get() if not clock.counts_sampling]
        for clock in self._clocks:
            clock.hold()

    def __exit__(self, *_: object) -> None:
        for clock in self._clocks:
            clock.release()


class PauseState:
    """The state of an object that can be paused, such as an engine.

    While the object is paused, the clocks of every task that waits for it are paused too.
    """

    __slots__ = ("_watched", "on")

    def __init__(self) -> None:
        self.on = False
        """True if the object is paused now."""
        self._watched: dict[Waiting, None] = {}

    def begin(self) -> None:
        """Pause the clocks of the waiting tasks; a second call has no effect."""
        if not self.on:
            self.on = True
            for waiting in self._watched:
                waiting.begin()

    def end(self) -> None:
        """Continue the clocks; a second call has no effect."""
        if self.on:
            self.on = False
            for waiting in self._watched:
                waiting.over()

    def watched(self) -> Waiting:
        """Return a block in which the clocks over the current task are paused while this object is paused."""
        return _Watched(self)


class _Watched(Waiting):
    """The block of `PauseState.watched`. A generator would take three times as long as this class."""

    __slots__ = ("_pause_state",)

    def __init__(self, pause_state: PauseState) -> None:
        super().__init__()
        self._pause_state = pause_state

    def __enter__(self) -> Self:
        self._clocks = _running.get()
        self._pause_state._watched[self] = None
        if self._pause_state.on:
            self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        del self._pause_state._watched[self]
        self.over()


class Progress:
    """The progress of an object, such as an engine, which restarts the clocks of all tasks that wait for the object.

    While an engine reads the prompts of some turns, other turns wait for their first id, although the engine works.
    Clocks restart at most once per eighth of the shortest limit, not at every step, since moving a deadline creates a
    timer.

    Args:
        first: factor by which the limits are longer until the first progress.
    """

    __slots__ = ("_clocks", "_factor", "_next")

    def __init__(self, *, first: float = 1.0) -> None:
        self._clocks: dict[Clock, float | None] = {}  # the watched clocks, with their limits
        self._factor = first
        self._next = 0.0  # no clock is restarted before this time

    def note(self, now: float | None = None) -> None:
        """Report progress. `now` is the current time of the event loop; None to read it."""
        now = loop_time() if now is None else now
        if now < self._next:
            return
        self._factor = 1.0
        if not self._clocks:
            return
        for clock, seconds in self._clocks.items():
            clock.start(seconds)
        self._next = now + min(map(_patience, self._clocks.values())) / 8

    def watched(self, clock: Clock) -> AbstractContextManager[None]:
        """Return a block in which progress restarts the clock."""
        return _Noted(self, clock)


def _patience(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds


class _Noted:
    """The block of `Progress.watched`."""

    __slots__ = ("_clock", "_progress")

    def __init__(self, progress: Progress, clock: Clock) -> None:
        self._progress, self._clock = progress, clock

    def __enter__(self) -> None:
        progress, seconds = self._progress, self._clock.seconds
        progress._clocks[self._clock] = seconds
        if progress._factor != 1.0 and seconds is not None:
            self._clock.start(seconds * progress._factor)
        # The interval is at most an eighth of the shortest limit, and this limit may be shorter than the earlier ones.
        progress._next = min(progress._next, loop_time() + _patience(seconds) / 8)

    def __exit__(self, *_: object) -> None:
        del self._progress._clocks[self._clock]
