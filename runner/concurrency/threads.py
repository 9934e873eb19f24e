"""Worker threads of a run, under its own limit, for synchronous code of authors; and the way back to an event loop."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import anyio.to_thread

# There is no public way to make a thread in which `anyio.from_thread` works.
from anyio._core._eventloop import set_current_async_library, threadlocals

from runner.concurrency.clocks import Waiting

__all__ = ["Job", "WorkerThread", "Workers", "busy_threads", "soon_on_this_loop"]

IDLE_SECONDS = 10.0
"""Seconds after which a thread without work ends, once its `Workers` are closed."""

BUSY = 0.002
"""Seconds of processor time between two looks, 20 ms apart, that tell computing from waiting: a thread that wakes every
millisecond to wait on was measured at a quarter of it."""


class Job:
    """One synchronous call while it is in a thread."""

    __slots__ = ("_clock", "_computed", "_decided", "done", "error", "function", "name", "result", "thread")

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        self.function = function
        self.name = name
        self.thread: int | None = None
        """The identifier of the thread that runs it; None until it is started."""
        self.done = False
        """Whether the call has returned or raised."""
        self.result: Any = None
        """What the call returned."""
        self.error: BaseException | None = None
        """What the call raised; it is raised again where the call is waited for."""
        self._clock = 0
        self._computed = 0.0
        # Taken once, by the thread that begins the call or by the caller that gives it up: the first one decides.
        self._decided = threading.Lock()

    @property
    def abandoned(self) -> bool:
        """Whether it was started and is not done; asked once nobody waits for it any more."""
        return self.thread is not None and not self.done

    def computed(self) -> bool:
        """Whether its thread used the processor since this was last asked; one that waits does not."""
        try:
            now = time.clock_gettime(self._clock)
        except OSError:  # the thread has ended
            return False
        before, self._computed = self._computed, now
        return now - before > BUSY

    def call_off(self) -> None:
        """Give it up: a call that has not been started yet never will be."""
        self._decided.acquire(blocking=False)

    def run(self) -> None:
        """Make the call, in the thread that is to do it."""
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
    """The run's worker threads. They keep no process from ending, also where one never comes back."""

    def __init__(self, threads: int) -> None:
        self._slots = anyio.CapacityLimiter(threads)
        # anyio's own limiter would count an abandoned thread for ever, and starve those that come after.
        self._unlimited = anyio.CapacityLimiter(math.inf)
        self._idle = IdleThreads()
        self.running: dict[int, Job] = {}
        """The jobs that are in a thread now; the lag report reads them."""
        self.abandoned: list[str] = []
        """The names of the calls whose thread was left behind."""

    async def call(self, job: Job) -> Any:
        """Run a job in a worker thread; waiting for a thread stops every clock.

        Cancelled while the job runs, it leaves the thread behind (`job.abandoned`), and another call may begin.
        """
        # The limiter knows its borrowers by identity, and one task may have several calls in threads.
        owner = object()
        try:
            self._slots.acquire_on_behalf_of_nowait(owner)
        except anyio.WouldBlock:
            with Waiting():
                await self._slots.acquire_on_behalf_of(owner)
        try:
            return await self.call_beside(job)
        finally:
            self._slots.release_on_behalf_of(owner)

    async def call_beside(self, job: Job, thread: WorkerThread | None = None) -> Any:
        """The same without the limit: in this thread, or in one beside those that the run may have."""
        self.running[id(job)] = job
        try:
            await self._run(job, thread)
        finally:
            job.call_off()
            del self.running[id(job)]
            if job.abandoned:
                self.abandoned.append(job.name)
        if job.error is not None:
            raise job.error
        return job.result

    def close(self) -> None:
        """End the threads that have no work; one that is at work ends after it."""
        self._idle.closed = True
        while self._idle:
            self._idle.pop().end()

    async def _run(self, job: Job, thread: WorkerThread | None) -> None:
        if thread is None:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:  # trio, whose worker threads keep no process either
                await anyio.to_thread.run_sync(job.run, abandon_on_cancel=True, limiter=self._unlimited)
                return
            # As in anyio's `run_sync`: a caller that is cancelled already starts nothing.
            await anyio.lowlevel.checkpoint()
            # A thread reports to the loop that it was made on, and to no other.
            fits = self._idle and self._idle[-1].loop is loop
            thread = self._idle.pop() if fits else WorkerThread(self._idle)
        await thread.call(job)


class _Work(NamedTuple):
    """What a thread is given."""

    job: Job
    """The call to run."""
    context: Context
    """The context variables of the task that asks for it."""
    scope: anyio.CancelScope
    """The cancel scope that `anyio.from_thread` looks at."""
    done: anyio.Event
    """Set on the loop once the call has been run."""


class IdleThreads(list["WorkerThread"]):
    """The threads of some `Workers` that have no work.

    They live until those are closed: a process that an author's code starts with `bwrap --die-with-parent`, say, is
    killed by the kernel when the thread that started it ends.
    """

    closed = False
    """Whether no further work comes."""


class WorkerThread(threading.Thread):
    """A worker thread of this event loop. anyio's own are no daemons: one that hangs would keep the process for ever.

    Args:
        idle: those that the thread joins while it has no work, until they are closed; without them it lasts until
            `end`.
    """

    def __init__(self, idle: IdleThreads | None = None) -> None:
        super().__init__(name="deltarunner worker", daemon=True)
        self._token = anyio.lowlevel.current_token()
        # Named as in anyio's threads, by which a virtual clock and the search for leaks tell who is at work.
        self.loop = self._token.native_token
        self.idle_workers = IdleThreads() if idle is None else idle
        self._patience = IDLE_SECONDS if idle is not None else None
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._soon = soon_on_this_loop()
        self.start()

    async def call(self, job: Job) -> None:
        """Have the job run, and wait for it."""
        with suppress(ValueError):  # one that is kept for somebody is idle between two jobs
            self.idle_workers.remove(self)
        context = copy_context()
        # Code in the thread is not inside the event loop, and must not be taken to be.
        context.run(set_current_async_library, None)
        with anyio.CancelScope() as scope:
            done = anyio.Event()
            self._work.put(_Work(job, context, scope, done))
            await done.wait()

    def end(self) -> None:
        """End once the work is done."""
        self._work.put(None)

    def run(self) -> None:
        threadlocals.current_token = self._token
        while (work := self._next()) is not None:
            threadlocals.current_cancel_scope = work.scope
            work.context.run(work.job.run)
            try:
                self._soon(partial(self._report, work.done))
            except RuntimeError:  # the loop was closed meanwhile
                return
            # A thread that waits would keep alive what its last job refers to.
            del threadlocals.current_cancel_scope, work

    def _next(self) -> _Work | None:
        while True:
            try:
                return self._work.get(timeout=self._patience)
            except Empty:
                if not self.idle_workers.closed:
                    continue
                # A thread that somebody took from the idle ones in this very moment gets its work at once.
                with suppress(ValueError):
                    self.idle_workers.remove(self)
                    return None

    def _report(self, done: anyio.Event) -> None:
        self.idle_workers.append(self)
        done.set()


def busy_threads() -> list[threading.Thread]:
    """The worker threads of any run that are at work, abandoned ones included."""
    return [t for t in threading.enumerate() if isinstance(t, WorkerThread) and t not in t.idle_workers]


def soon_on_this_loop() -> Callable[[Callable[[], object]], object]:
    """A function that has another one called on the event loop running here; any thread may use it, and none waits."""
    native: Any = anyio.lowlevel.current_token().native_token
    # Trio's token has the one method, asyncio's loop the other.
    door: Callable[[Callable[[], object]], object]
    door = native.run_sync_soon if hasattr(native, "run_sync_soon") else native.call_soon_threadsafe
    return door
