"""Time that passes only when nobody has anything to do: limits of minutes fire at once, and exactly."""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import anyio

from runner.errors import BadOption

__all__ = ["VirtualClock"]

# Pytest shows the line of the test, where the fix belongs.
__tracebackhide__ = True

T = TypeVar("T")

_BUSY_SECONDS = 1.0
"""Seconds of real time that worker threads may be at work before they are taken for ones that hang."""
_POLL_SECONDS = 0.005
"""Seconds of real time after which a loop that waits for others looks again."""


class VirtualClock:
    """A clock for event loops in tests.

    While anything runs, time stands still. Once everything waits, it jumps to the next deadline. A synchronous tool or
    hook is given a second of real time, during which the clock stands still; one that takes longer is taken for one
    that hangs, and time goes on. While it waits for something that it had called on the loop (`anyio.from_thread`), it
    is not at work; afterwards it has its second again.

    What waits for the network or for another process looks idle to this clock, so its deadlines come at once: use
    `VirtualClock(autojump=False)` there, and `jump()`.

    Args:
        autojump: jump to the next deadline when everything waits; else time passes by `jump()` alone.
    """

    def __init__(self, *, autojump: bool = True) -> None:
        self.autojump = autojump
        """Whether time jumps to the next deadline when everything waits."""
        self._now = 0.0
        self._trio: Any = None

    @property
    def now(self) -> float:
        """Seconds that have passed, of virtual time."""
        return self._now if self._trio is None else float(self._trio.current_time())

    def jump(self, seconds: float) -> None:
        """Let so many seconds pass at once; may be called from any thread.

        Raises:
            BadOption: time does not run backwards.
        """
        if not seconds >= 0:
            raise BadOption(f"jump({seconds!r}): give a number of seconds, 0 or more.")
        if self._trio is not None:
            self._trio.jump(seconds)
        self._now += seconds

    @property
    def asyncio_backend(self) -> tuple[str, dict[str, Any]]:
        """What the fixture `anyio_backend` returns, so that async tests run by this clock on asyncio."""
        return "asyncio", {"loop_factory": partial(_VirtualLoop, self)}

    @property
    def trio_backend(self) -> tuple[str, dict[str, Any]]:
        """What the fixture `anyio_backend` returns, so that async tests run by this clock on trio.

        Raises:
            BadOption: trio is not installed.
        """
        try:
            from trio.testing import MockClock
        except ImportError:
            raise BadOption("trio_backend: trio is not installed. Install it, or return asyncio_backend.") from None
        self._trio = self._trio or MockClock(autojump_threshold=0.0 if self.autojump else float("inf"))
        return "trio", {"clock": self._trio}

    def run(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run an asynchronous function to its end by this clock, on asyncio."""
        name, options = self.asyncio_backend
        return anyio.run(function, backend=name, backend_options=options)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._in_executor = 0
        self._pending_calls: dict[asyncio.Task[Any], threading.Thread] = {}
        """What worker threads have called on this loop, and wait for."""
        self._calling_thread: threading.Thread | None = None
        self._virtual_selector = _VirtualSelector(clock, self)
        super().__init__(self._virtual_selector)

    def time(self) -> float:
        return self._clock._now

    def run_in_executor(self, *arguments: Any) -> Any:  # type: ignore[override]  # passed on as they are
        future = super().run_in_executor(*arguments)
        self._in_executor += 1
        future.add_done_callback(self._left_executor)
        return future

    def _left_executor(self, future: Any) -> None:
        self._in_executor -= 1

    def call_soon_threadsafe(self, callback: Any, *arguments: Any, context: Any = None) -> Any:  # type: ignore[override]  # passed on
        return super().call_soon_threadsafe(
            partial(self._call_for, threading.current_thread(), callback), *arguments, context=context
        )

    def _call_for(self, thread: threading.Thread, callback: Any, *arguments: Any) -> None:
        # Only what the thread waits for; what it has started there by a function goes on without it.
        awaited = getattr(callback, "__qualname__", "").startswith(f"{asyncio.run_coroutine_threadsafe.__name__}.")
        self._calling_thread = thread if awaited and self._is_worker(thread) else None
        try:
            callback(*arguments)
        finally:
            self._calling_thread = None

    def create_task(self, *arguments: Any, **options: Any) -> Any:
        task = super().create_task(*arguments, **options)
        if self._calling_thread is not None:
            self._pending_calls[task] = self._calling_thread
            task.add_done_callback(self._call_done)
        return task

    def _call_done(self, task: asyncio.Task[Any]) -> None:
        del self._pending_calls[task]
        self._virtual_selector.reset_busy_time()

    def _is_worker(self, thread: threading.Thread) -> bool:
        return getattr(thread, "loop", None) is self  # what anyio's worker threads on asyncio look like

    def busy_threads(self) -> int:
        """Worker threads of this loop that are at work."""
        waiting = set(self._pending_calls.values())
        return self._in_executor + sum(
            self._is_worker(thread) and thread not in waiting and thread not in getattr(thread, "idle_workers", ())
            for thread in threading.enumerate()
        )


class _VirtualSelector(selectors.DefaultSelector):
    """Where the event loop would wait for its next timer, time jumps there instead."""

    def __init__(self, clock: VirtualClock, loop: _VirtualLoop) -> None:
        super().__init__()
        self._clock = clock
        self._loop = loop
        self._busy_since: float | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:  # no timer is set, or something is ready: there is nowhere to jump to
            return super().select(timeout)
        if ready := super().select(0):
            self._busy_since = None
            return ready
        if not self._clock.autojump or self._has_to_wait():
            return super().select(_POLL_SECONDS)
        self._clock._now += timeout
        return []

    def reset_busy_time(self) -> None:
        """Give worker threads the whole of their time again."""
        self._busy_since = None

    def _has_to_wait(self) -> bool:
        if not self._loop.busy_threads():
            self._busy_since = None
            return False
        now = time.monotonic()
        self._busy_since = self._busy_since or now
        return now - self._busy_since < _BUSY_SECONDS
