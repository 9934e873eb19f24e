"""Loop lag: the delay of the event loop, and the code that causes it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Self

import anyio
from anyio.abc import TaskGroup

from runner.concurrency.exit_stack import ThreadedExitStack
from runner.concurrency.thread_frames import author_frame, frames_by_thread, outwards
from runner.concurrency.threads import Workers

__all__ = ["LATE_SECONDS", "Blocker", "LagMonitor"]

TICK_SECONDS = 0.02
"""Seconds between two marks that a task on the event loop sets."""
LATE_SECONDS = 0.05
"""Delay of a mark in seconds, at the default tick, above which the code that runs is blamed and the lag is reported."""
LOOP_STUCK_SECONDS = 60.0
"""Seconds after which the run is notified that its event loop is stuck. While the loop is stuck, no limit of an episode
fires, since clocks use the loop.
"""
STOPPED_SECONDS = 5.0
"""Seconds between two checks of the watching thread, above which the process itself counts as stopped."""


@dataclass(frozen=True, slots=True)
class Blocker:
    """Code that kept the loop from running."""

    where: str
    """The function, its file and its line."""
    seconds: float
    """Measured seconds for which the code blocked the loop."""
    thread: bool
    """True if the code ran in a worker thread, and computed there instead of waiting."""
    leaving: bool = False
    """True if the code exited a context that an asynchronous `setup()` had entered in `episode.exit_stack`."""

    @property
    def advice(self) -> str:
        """Advice for the author of the code."""
        if self.thread:
            return "it computes; threads are for code that waits: move it to anyio.to_process.run_sync"
        if self.leaving:
            return (
                "it blocks the event loop: enter it in a synchronous setup(), so that a thread exits it, or give "
                "exit_stack.push_async_exit an async function that awaits what it waits for"
            )
        return "it blocks the event loop: make the method synchronous (it gets a thread), or await what it waits for"


class LagMonitor:
    """A block that measures the lag of the event loop, and names the code that causes the lag.

    A task on the loop sets a mark every 20 ms, and a thread checks the mark. If the mark is more than 50 ms late, the
    thread samples the frames of the loop and of the run's worker threads. Both times are proportional to `tick`.
    """

    def __init__(
        self, workers: Workers, *, stuck_seconds: float = LOOP_STUCK_SECONDS, tick: float = TICK_SECONDS
    ) -> None:
        self.on_stuck: Callable[[Blocker], None] | None = None
        """Function that is called in the watching thread, with the blocking code, when the loop has been stuck for
        `stuck_seconds`."""
        self.stuck_seconds = stuck_seconds
        """Seconds for which the loop must be stuck before `on_stuck` is called; 60 by default."""
        self._workers = workers
        self._tick_seconds = tick
        self._late = tick * LATE_SECONDS / TICK_SECONDS
        self._lags: deque[float] = deque(maxlen=3000)  # 3000 ticks of 20 ms last a minute
        self._seconds: dict[tuple[str, bool, bool], float] = {}
        self._mark = 0.0
        self._loop_thread = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._group: TaskGroup

    async def __aenter__(self) -> Self:
        self._loop_thread = threading.get_ident()
        self._mark = time.monotonic()
        self._group = await anyio.create_task_group().__aenter__()
        self._group.start_soon(self._tick, name="deltarunner lag")
        self._thread = threading.Thread(target=self._look, name="deltarunner lag", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        self._group.cancel_scope.cancel()
        # The task can always be cancelled, and a passing exception must not be wrapped by the task group.
        await self._group.__aexit__(None, None, None)
        assert self._thread is not None
        self._thread.join()

    def percentile(self, percent: float) -> float:
        """Return the lag in seconds that this percentage of the last minute's ticks did not exceed; 0 without ticks."""
        lags = sorted(self._lags)
        return lags[min(len(lags) - 1, int(len(lags) * percent / 100))] if lags else 0.0

    def blockers(self, most: int = 5) -> list[Blocker]:
        """Return the code that delayed the loop, the worst first, with at most `most` entries."""
        worst = sorted(self._seconds.items(), key=lambda item: -item[1])[:most]
        return [Blocker(where, seconds, thread, leaving) for (where, thread, leaving), seconds in worst]

    async def _tick(self) -> None:
        # The clock of the loop may be virtual, so marks use the clock of the watching thread.
        while True:
            began = time.monotonic()
            self._mark = began
            await anyio.sleep(self._tick_seconds)
            self._lags.append(max(0.0, time.monotonic() - began - self._tick_seconds))

    def _look(self) -> None:
        reported = False
        mark, stopped = self._mark, 0.0
        looked = time.monotonic()
        while not self._stop.wait(self._tick_seconds):
            before, looked = looked, time.monotonic()
            if self._mark != mark:
                mark, stopped = self._mark, 0.0
            elif looked - before > STOPPED_SECONDS:
                # This thread did not run either: the process was stopped (SIGSTOP, Ctrl-Z, a suspended machine), or a
                # call kept the interpreter lock. This time does not count as time for which the loop is stuck.
                stopped += looked - before
            late = looked - mark - self._tick_seconds
            if late < self._late:
                reported = False
                continue
            self._blame()
            if late - stopped > self.stuck_seconds and not reported and self.on_stuck is not None:
                reported = True
                self.on_stuck(self._who_keeps_the_loop(late))

    def _blame(self) -> None:
        # This is a sample: all seconds between two checks count for the code that runs at the check.
        with frames_by_thread() as frames:
            on_loop = frames.get(self._loop_thread)
            stack = _unwound(on_loop)
            own = author_frame(on_loop)
            if own is not None or stack is not None:
                self._add(_describe(own or on_loop, stack), leaving=stack is not None)
                return
            # No author's code runs on the loop, so a computing thread may have kept the interpreter lock.
            for job in list(self._workers.running.values()):
                frame = author_frame(frames.get(job.thread or 0))
                if frame is not None and job.computed():
                    self._add(_describe(frame), thread=True)

    def _add(self, where: str, *, thread: bool = False, leaving: bool = False) -> None:
        key = where, thread, leaving
        self._seconds[key] = self._seconds.get(key, 0.0) + self._tick_seconds

    def _who_keeps_the_loop(self, seconds: float) -> Blocker:
        with frames_by_thread() as frames:
            frame = frames.get(self._loop_thread)
            stack = _unwound(frame)
            where = _describe(author_frame(frame) or frame, stack)
        return Blocker(where, seconds, thread=False, leaving=stack is not None)


def _unwound(innermost: FrameType | None) -> ThreadedExitStack | None:
    """Return the exit stack that is being unwound in this frame or in one of its callers, or None."""
    for frame in outwards(innermost):
        if frame.f_code is ThreadedExitStack.unwind.__code__:
            stack: ThreadedExitStack = frame.f_locals["self"]
            return stack
    return None


def _describe(frame: FrameType | None, stack: ThreadedExitStack | None = None) -> str:
    code = frame.f_code if frame is not None else None
    where = f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})" if code else "an unknown place"
    return where if stack is None else f"{where}, the exit_stack of {stack.owner}"
