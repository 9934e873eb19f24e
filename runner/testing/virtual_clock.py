"""A virtual clock: time advances only when all tasks wait, so limits of minutes end immediately and exactly."""

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

# Pytest leaves out the frames of this module and shows the line of the test, where the fix belongs.
__tracebackhide__ = True

T = TypeVar("T")

_BUSY_SECONDS = 1.0
"""Real time that busy worker threads get before they count as hanging."""
_POLL_SECONDS = 0.005
"""Real time between two checks for busy worker threads."""


class VirtualClock:
    """A clock for event loops in tests.

    While code runs, time is paused. When everything waits, time jumps to the next deadline. A synchronous tool or hook
    gets one second of real time with the clock paused; if it takes longer, it counts as hanging and time continues. A
    thread that waits for a call on the loop (`anyio.from_thread`) is not busy, and has a full second after the call.

    Code that waits for the network or another process looks idle, so its deadlines end immediately. In this case use
    `VirtualClock(autojump=False)` and `jump()`.

    Args:
        autojump: jump to the next deadline when everything waits; otherwise time advances only by `jump()`.
    """

    def __init__(self, *, autojump: bool = True) -> None:
        self.autojump = autojump
        """True if time jumps to the next deadline when everything waits."""
        self._now = 0.0
        self._trio: Any = None

    @property
    def now(self) -> float:
        """Virtual time in seconds."""
        return self._now if self._trio is None else float(self._trio.current_time())

    def jump(self, seconds: float) -> None:
        """Advance the time; may be called from any thread.

        Raises:
            BadOption: `seconds` is negative.
        """
        if not seconds >= 0:
            raise BadOption(f"jump({seconds!r}): give a number of seconds, 0 or more.")
        if self._trio is not None:
            self._trio.jump(seconds)
        self._now += seconds

    @property
    def asyncio_backend(self) -> tuple[str, dict[str, Any]]:
        """Value for the fixture `anyio_backend`, to run async tests with this clock on asyncio."""
        return "asyncio", {"loop_factory": partial(_VirtualLoop, self)}

    @property
    def trio_backend(self) -> tuple[str, dict[str, Any]]:
        """Value for the fixture `anyio_backend`, to run async tests with this clock on trio.

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
        """Run an asynchronous function with this clock on asyncio."""
        name, options = self.asyncio_backend
        return anyio.run(function, backend=name, backend_options=options)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._in_executor = 0
        self._pending_calls: dict[asyncio.Task[Any], threading.Thread] = {}
        """Tasks that worker threads have started on this loop, each with the thread that waits for it."""
        self._calling_thread: threading.Thread | None = None
        self._virtual_selector = _VirtualSelector(clock, self)
        super().__init__(self._virtual_selector)

    def time(self) -> float:
        return self._clock._now

    def run_in_executor(self, *arguments: Any) -> Any:  # type: ignore[override]  # the arguments are passed on unchanged
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
        # Count a call only if its thread waits for the result (`run_coroutine_threadsafe`). A task that another
        # callback starts does not count.
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
        return getattr(thread, "loop", None) is self  # an attribute of anyio's worker threads on asyncio

    def busy_threads(self) -> int:
        """Number of busy worker threads of this loop."""
        waiting = set(self._pending_calls.values())
        return self._in_executor + sum(
            self._is_worker(thread) and thread not in waiting and thread not in getattr(thread, "idle_workers", ())
            for thread in threading.enumerate()
        )


class _VirtualSelector(selectors.DefaultSelector):
    """A selector that advances the virtual time instead of waiting for the next timer."""

    def __init__(self, clock: VirtualClock, loop: _VirtualLoop) -> None:
        super().__init__()
        self._clock = clock
        self._loop = loop
        self._busy_since: float | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:  # no timer is set, or something is ready
            return super().select(timeout)
        if ready := super().select(0):
            self._busy_since = None
            return ready
        if not self._clock.autojump or self._has_to_wait():
            return super().select(_POLL_SECONDS)
        self._clock._now += timeout
        return []

    def reset_busy_time(self) -> None:
        """Restart the time limit of busy worker threads."""
        self._busy_since = None

    def _has_to_wait(self) -> bool:
        if not self._loop.busy_threads():
            self._busy_since = None
            return False
        now = time.monotonic()
        self._busy_since = self._busy_since or now
        return now - self._busy_since < _BUSY_SECONDS
