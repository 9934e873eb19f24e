"""Worker threads of a run, under its own limit, for synchronous code of authors; and the way back to an event loop."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread

from runner.clocks import Waiting

__all__ = ["Job", "Workers", "soon_on_this_loop"]


BUSY = 0.002
"""Seconds of processor time between two looks that tell computing from waiting."""


class Job:
    """One synchronous call while it is in a thread."""

    __slots__ = ("_clock", "_computed", "_decided", "done", "error", "function", "name", "result", "thread")

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        self.function = function
        self.name = name
        self.thread: int | None = None
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._clock = 0
        self._computed = 0.0
        self._decided = threading.Lock()

    @property
    def abandoned(self) -> bool:
        """It was started and is not done, though nobody waits for it any more."""
        return self.thread is not None and not self.done

    def computed(self) -> bool:
        """Its thread used the processor since this was last asked; one that waits does not."""
        try:
            now = time.clock_gettime(self._clock)
        except OSError:  # the thread has ended
            return False
        before, self._computed = self._computed, now
        return now - before > BUSY

    def call_off(self) -> None:
        """Nobody waits for it any more: unless it has been started already it never will be."""
        self._decided.acquire(blocking=False)

    def run(self) -> None:
        if not self._decided.acquire(blocking=False):
            return
        self.thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self.thread)
        # What its thread computed for others before is not this job's.
        self._computed = time.clock_gettime(self._clock)
        # The error travels as a value: a SystemExit that left a worker thread or a task would end the event loop.
        try:
            self.result = self.function()
        except BaseException as error:
            self.error = error
        finally:
            self.done = True


class Workers:
    """The run's worker threads.

    Attributes:
        running: the jobs that are in a thread now; read by the lag report.
        abandoned: names of the calls whose thread was left behind.
    """

    def __init__(self, threads: int) -> None:
        self._places = anyio.CapacityLimiter(threads)
        # anyio's own limiter would count an abandoned thread for ever, and starve those that come after.
        self._unlimited = anyio.CapacityLimiter(math.inf)
        self.running: dict[int, Job] = {}
        self.abandoned: list[str] = []

    async def call(self, job: Job) -> Any:
        """Run a job in a worker thread; waiting for a thread stops every clock.

        Cancelled while the job runs, it leaves the thread behind (`job.abandoned`) and gives its place to the next.
        """
        owner = object()
        try:
            self._places.acquire_on_behalf_of_nowait(owner)
        except anyio.WouldBlock:
            with Waiting():
                await self._places.acquire_on_behalf_of(owner)
        self.running[id(job)] = job
        try:
            await anyio.to_thread.run_sync(job.run, abandon_on_cancel=True, limiter=self._unlimited)
        finally:
            job.call_off()
            del self.running[id(job)]
            self._places.release_on_behalf_of(owner)
            if job.abandoned:
                self.abandoned.append(job.name)
        if job.error is not None:
            raise job.error
        return job.result


def soon_on_this_loop() -> Callable[[Callable[[], object]], object]:
    """What calls a function soon on the event loop that runs here, from any thread, without waiting for it."""
    native: Any = anyio.lowlevel.current_token().native_token
    door: Callable[[Callable[[], object]], object]
    door = native.run_sync_soon if hasattr(native, "run_sync_soon") else native.call_soon_threadsafe
    return door
