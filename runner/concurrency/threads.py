"""Worker threads for authors' synchronous code, limited in number for each run; and calls back to an event loop."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, ContextVar, Token, copy_context
from functools import partial
from itertools import compress, repeat
from operator import is_not
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias

import anyio
import anyio.lowlevel
import anyio.to_thread

# No public API creates a thread in which `anyio.from_thread` works.
from anyio._core._eventloop import set_current_async_library, threadlocals

from runner.concurrency.clocks import Waiting

__all__ = ["Job", "ThreadContext", "WorkerThread", "Workers", "busy_threads", "soon_on_this_loop"]

BUSY_SECONDS = 0.002
"""Seconds of processor time between two checks, 20 ms apart, above which a thread computes instead of waiting. A thread
that wakes every millisecond only to wait again was measured at a quarter of this time.
"""


class Job:
    """One synchronous call in a worker thread."""

    __slots__ = ("_clock", "_computed", "_decided", "done", "error", "function", "name", "result", "thread")

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        self.function = function
        self.name = name
        self.thread: int | None = None
        """The identifier of the thread that makes the call; None until the call is started."""
        self.done = False
        """True if the call has returned or raised."""
        self.result: Any = None
        self.error: BaseException | None = None
        """The error of the call. The waiting task raises it again."""
        self._clock = 0
        self._computed = 0.0
        # The lock is acquired once: by the thread that begins the call, or by the caller that abandons it.
        self._decided = threading.Lock()

    @property
    def abandoned(self) -> bool:
        """True if the call was started and is not done. Read this only when no task waits for the call any more."""
        return self.thread is not None and not self.done

    def computed(self) -> bool:
        """Return True if the call's thread used more than `BUSY_SECONDS` of processor time since the last check.

        A thread that only waits uses less. The next check counts from now.
        """
        try:
            now = time.clock_gettime(self._clock)
        except OSError:  # the thread has ended
            return False
        before, self._computed = self._computed, now
        return now - before > BUSY_SECONDS

    def call_off(self) -> None:
        """Abandon the call. If it was not started, it is never started."""
        self._decided.acquire(blocking=False)

    def run(self) -> None:
        """Make the call, in the worker thread."""
        if not self._decided.acquire(blocking=False):
            return
        self.thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self.thread)
        # The thread's processor time for earlier jobs does not count.
        self._computed = time.clock_gettime(self._clock)
        # The error is passed as a value: a SystemExit that left a worker thread or a task would end the event loop.
        try:
            self.result = self.function()
        except BaseException as error:
            self.error = error
        finally:
            self.done = True


_HAD: ContextVar[frozenset[ContextVar[Any]]] = ContextVar("_HAD", default=frozenset())
"""The context variables that a task had after its last call in a thread. A variable that is missing later was reset."""

_Tokens: TypeAlias = dict[ContextVar[Any], Token[Any]]
"""Tokens of the first settings of context variables. A token can make its variable unset again."""


class ThreadContext:
    """Context variables that calls in threads share.

    A change by one call is visible to later calls and to the calling task.

    Changes by the calling task are visible to later calls. Calls run one at a time.
    """

    def __init__(self) -> None:
        self._own = Context()
        self._own_tokens: _Tokens = {}
        self._task_tokens: _Tokens = {}
        self._given: dict[ContextVar[Any], Any] = {}  # variables of the calling task at the last call
        self._changed: dict[ContextVar[Any], Any] = {}  # variables changed by the last call

    def run(self, function: Callable[[], Any]) -> Any:
        """Make the call, in the thread."""
        given = dict.fromkeys(_HAD.get(), Token.MISSING) | dict(copy_context())
        for variable, value in _other_values(given, self._given, Token.MISSING):
            self._given[variable] = value
            self._own.run(_assign, variable, value, self._own_tokens)
        before = dict(self._own)
        try:
            return self._own.run(function)
        finally:
            after = dict.fromkeys(before, Token.MISSING) | dict(self._own)
            self._changed = dict(_other_values(after, before, self))

    def publish(self) -> None:
        """Apply the changes of the last call to the variables of the calling task."""
        for variable, value in self._changed.items():
            self._given[variable] = value
            _assign(variable, value, self._task_tokens)
        self._changed = {}
        _HAD.set(frozenset(copy_context()))


def _other_values(now: dict[Any, Any], before: dict[Any, Any], missing: object) -> list[tuple[Any, Any]]:
    """Return the items of `now` whose values are other objects than in `before`; `missing` stands for an absent value.

    All loops run in C.
    """
    return list(compress(now.items(), map(is_not, now.values(), map(before.get, now, repeat(missing)))))


def _assign(variable: ContextVar[Any], value: Any, tokens: _Tokens) -> None:
    """Set a variable in this context; `Token.MISSING` makes it unset, as it was before its first setting."""
    if value is not Token.MISSING:
        token = variable.set(value)
        if token.old_value is Token.MISSING:
            tokens[variable] = token
    elif variable in tokens:
        with suppress(ValueError):  # another task set the variable, during a tool call
            variable.reset(tokens.pop(variable))


class Workers:
    """The run's worker threads. They do not keep the process alive, even if a call never returns."""

    def __init__(self, threads: int) -> None:
        self._slots = anyio.CapacityLimiter(threads)
        # anyio's own limiter would count an abandoned thread without end, and block later calls.
        self._unlimited = anyio.CapacityLimiter(math.inf)
        self._idle = IdleThreads()
        self.running: dict[int, Job] = {}
        """The jobs that are in a thread now, by object id, for the lag report."""
        self.abandoned: list[str] = []
        """The names of calls whose thread was abandoned."""

    async def call(self, job: Job) -> Any:
        """Run a job in a worker thread; waiting for a thread pauses every clock.

        If this call is cancelled while the job runs, the thread is abandoned (`job.abandoned`), and another job may
        begin.

        Raises:
            BaseException: the error of the job.
        """
        # The limiter identifies borrowers by object, and one task may have several calls in threads.
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
        """Run a job outside the limit on threads: in `thread`, or in an idle or new thread if `thread` is None.

        Raises:
            BaseException: the error of the job.
        """
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
        """End idle threads now, and working threads after their work."""
        self._idle.close()

    async def _run(self, job: Job, thread: WorkerThread | None) -> None:
        if thread is None:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:  # trio, whose worker threads do not keep the process alive either
                await anyio.to_thread.run_sync(job.run, abandon_on_cancel=True, limiter=self._unlimited)
                return
            # A caller that is already cancelled starts nothing, as in anyio's `run_sync`.
            await anyio.lowlevel.checkpoint()
            # A thread reports only to the loop that it was created on.
            fits = self._idle and self._idle[-1].loop is loop
            thread = self._idle.pop() if fits else WorkerThread(self._idle)
        await thread.call(job)


class _Work(NamedTuple):
    job: Job
    context: Context
    """The context variables of the calling task."""
    scope: anyio.CancelScope
    """The cancel scope that `anyio.from_thread` reads."""
    done: anyio.Event
    """Set on the loop once the call has been run."""


class IdleThreads(list["WorkerThread"]):
    """The idle threads of one `Workers` object.

    Idle threads are kept until the workers are closed: the kernel kills some processes when the thread that started
    them ends, such as the processes of `bwrap --die-with-parent`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.members: list[WorkerThread] = []
        """Every thread that joins the list while it is idle, working threads included."""
        self.closed = False
        """True if no further work comes."""

    def close(self) -> None:
        """End the idle threads now, and each working thread after its work."""
        self.closed = True
        self.clear()
        # A busy thread cannot report later that its work is done, since the loop may have ended or be blocked by then.
        for thread in self.members:
            thread.end()


class WorkerThread(threading.Thread):
    """A worker thread of this event loop. It is a daemon: a hanging thread of anyio would keep the process alive.

    Args:
        idle: the list that the thread joins while it is idle, and whose `close` ends the thread; with None the thread
            lasts until `end`.
    """

    def __init__(self, idle: IdleThreads | None = None) -> None:
        super().__init__(name="deltarunner worker", daemon=True)
        self._token = anyio.lowlevel.current_token()
        # `loop` and `idle_workers` are named as in anyio: a virtual clock and the search for leaks recognise working
        # threads by these attributes.
        self.loop = self._token.native_token
        self.idle_workers = IdleThreads() if idle is None else idle
        self.idle_workers.members.append(self)
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._soon = soon_on_this_loop()
        self.start()

    async def call(self, job: Job) -> None:
        """Run the job, and wait for it."""
        if self in self.idle_workers:  # a reserved thread is idle between two jobs
            self.idle_workers.remove(self)
        context = copy_context()
        # Code in the thread is not inside the event loop, and must not appear to be.
        context.run(set_current_async_library, None)
        with anyio.CancelScope() as scope:
            done = anyio.Event()
            self._work.put(_Work(job, context, scope, done))
            if self.idle_workers.closed:
                self.end()
            await done.wait()

    def end(self) -> None:
        """End the thread once its work is done."""
        self._work.put(None)

    def run(self) -> None:
        threadlocals.current_token = self._token
        while (work := self._work.get()) is not None:
            threadlocals.current_cancel_scope = work.scope
            work.context.run(work.job.run)
            try:
                self._soon(partial(self._report, work.done))
            except RuntimeError:  # the loop was closed
                return
            # A waiting thread must not keep the objects of its last job alive.
            del threadlocals.current_cancel_scope, work

    def _report(self, done: anyio.Event) -> None:
        if not self.idle_workers.closed:
            self.idle_workers.append(self)
        done.set()


def busy_threads() -> list[threading.Thread]:
    """Return the working threads of all runs, including abandoned threads."""
    return [t for t in threading.enumerate() if isinstance(t, WorkerThread) and t not in t.idle_workers]


def soon_on_this_loop() -> Callable[[Callable[[], object]], object]:
    """Return a function that schedules a call on the current event loop. Any thread may call it; it does not wait."""
    native: Any = anyio.lowlevel.current_token().native_token
    # Trio's token has the first of these methods, and asyncio's loop has the second.
    schedule: Callable[[Callable[[], object]], object]
    schedule = native.run_sync_soon if hasattr(native, "run_sync_soon") else native.call_soon_threadsafe
    return schedule
