"""The event loop of a run, signals such as Ctrl-C, the garbage collector, and the end of the process."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, TypeVarTuple

import anyio
from typing_extensions import Unpack

from runner.concurrency.loop_lag import Blocker
from runner.concurrency.threads import busy_threads
from runner.engines.base import BaseEngine
from runner.environment.environment import Environment
from runner.environment.task_feed import Tasks
from runner.errors import BadOption, DeltarunnerError, RunStuck
from runner.logs import logger_for
from runner.quantities import counted
from runner.runs.options import RunKeywords
from runner.runs.run import Run
from runner.runs.summary import Summary

if TYPE_CHECKING:
    from runner.runs.reporter import Reporter

__all__ = ["end_process", "exit_now", "on_event_loop", "run", "supervise"]

log = logger_for("runs")

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

MAX_REPORTED_FAULTS: Final = 3
"""Maximum number of faults that are printed after a run. The last faults are printed."""

FLUSH_SECONDS: Final = 10.0
"""Longest wait for the run file before the process ends at once."""

THREAD_SECONDS: Final = 0.2
"""Longest wait for each thread at the end of the process."""


def run(
    environment: Environment[Any] | type[Environment[Any]],
    engine: BaseEngine,
    *,
    tasks: Tasks | None = None,
    quiet: bool = False,
    **options: Unpack[RunKeywords],
) -> Summary:
    """Play a run to its end on a new event loop: the synchronous entry point.

    The first Ctrl-C lets the episodes in flight finish. The second one stops them and keeps them as partial. The third
    one ends the process. SIGTERM acts like the second Ctrl-C.

    Args:
        environment: the environment, or its class.
        engine: the engine that the agents sample from.
        tasks: tasks in place of the environment's own, as for `Run`.
        quiet: do not print progress on stderr.
        options: the other fields of `RunOptions`, by name.

    Returns:
        The summary; trajectories are in the run file (`file=`).

    Raises:
        DeltarunnerError: the run cannot begin, or ends early; see `Run`.
        BadOption: an event loop already runs in this thread, as in a notebook.
        KeyboardInterrupt: after Ctrl-C, when everything is recorded.
        SystemExit: after SIGTERM, when everything is recorded; its code is 143, the exit code of a process that this
            signal ended.
    """
    # These are imported here, since they import Rich, and the testing kit needs only the event loop.
    from runner.runs.reporter import PlainReporter, Reporter

    with suppress(RuntimeError):  # no event loop runs
        asyncio.get_running_loop()
        raise BadOption(
            "run(): an event loop already runs in this thread, as in a notebook. Use `async with Run(environment, "
            "engine) as run:` and `async for trajectory in run:` there; `run.summary` has the results."
        )

    async def play() -> tuple[Summary, signal.Signals | None]:
        played = Run(environment, engine, tasks=tasks, **options)
        # The reporter prints plain lines, even on a terminal, since other output would break a live display.
        reporter = Reporter() if quiet else PlainReporter(type(played.environment).__name__)
        received = await supervise(played, reporter)
        for fault in [] if quiet else list(played.summary.faults)[-MAX_REPORTED_FAULTS:]:
            reporter.say(f"fault: {fault}")
        return played.summary, received

    summary, received = on_event_loop(play)
    if received is signal.SIGTERM:
        raise SystemExit(128 + received)
    if received is not None:
        raise KeyboardInterrupt
    return summary


def on_event_loop(function: Callable[[*Arguments], Awaitable[T]], *arguments: *Arguments) -> T:
    """Run an asynchronous function on a new asyncio event loop, which vLLM requires; uvloop if it is installed."""
    settings = {"use_uvloop": importlib.util.find_spec("uvloop") is not None}
    return anyio.run(function, *arguments, backend="asyncio", backend_options=settings)


async def supervise(run: Run, reporter: Reporter) -> signal.Signals | None:
    """Enter a run and play it to its end, with a reporter.

    The first Ctrl-C drains the run, the second cancels it, the third ends the process; SIGTERM cancels the run. An
    event loop that is blocked for a minute ends the process with `RunStuck.exit_code`, after the finished episodes are
    committed.

    Returns:
        The signal that ended the run early; None if no signal did.

    Raises:
        DeltarunnerError: the run could not begin, or ended early.
    """
    failure: Exception | None = None
    received: signal.Signals | None = None
    async with anyio.create_task_group() as watching:
        watching.start_soon(reporter.watch, run, name="display")
        try:
            received = await _play_until_signal(run, reporter)
        except Exception as error:  # the error is kept and raised below, since the task group would wrap it
            failure = error
        watching.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return received


async def _play_until_signal(run: Run, reporter: Reporter) -> signal.Signals | None:
    run.lag.on_stuck = partial(_end_stuck, run, reporter)
    with anyio.CancelScope() as scope:
        stopper = Stopper(run, reporter, give_up=scope.cancel)
        with stopper.listening():
            try:
                async with run:
                    stopper.started = True
                    with collector_settings():
                        async for trajectory in run:
                            reporter.finished(trajectory)
            except DeltarunnerError as error:
                if stopper.received is None:
                    raise
                reporter.say(str(error))
    return stopper.received


class Stopper:
    """A handler of the signals of a run."""

    def __init__(self, run: Run, reporter: Reporter, *, give_up: Callable[[], None]) -> None:
        self.started = False
        """True once the run plays; before that, a signal cancels the start."""
        self.received: signal.Signals | None = None
        """The first signal; None before it."""
        self._run = run
        self._reporter = reporter
        self._give_up = give_up
        self._step = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM. Outside the main thread, which alone receives signals, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # The loop's own signal handlers do not run while the loop is blocked, but the third Ctrl-C must work then.
        loop = asyncio.get_running_loop()

        def handle(number: int, frame: FrameType | None) -> None:
            self._take(signal.Signals(number), loop)

        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _take(self, number: signal.Signals, loop: asyncio.AbstractEventLoop) -> None:
        self.received = self.received or number
        self._step = max(self._step + 1, 2 if number is signal.SIGTERM else 0)
        # Before the run plays, no episode can finish. Cancelling the start is one step, not two.
        last = 2 if self.started else 1
        if self._step > last and number is signal.SIGINT:
            self._reporter.restore()
            exit_now(128 + self.received)
        # A handler may interrupt any code, so the run is changed only on the event loop.
        loop.call_soon_threadsafe(self._act, self._step)

    def _act(self, step: int) -> None:
        assert self.received is not None, "_act runs only after a signal"
        log.warning("signal %s, step %d", self.received.name, step)
        run, count = self._run, len(self._run.in_flight)
        episodes = counted(count, "episode")
        waiting = f", which waits for {run.waits_for}" if run.waits_for else ""
        if not self.started:
            self._reporter.say(f"cancelling the start{waiting}; press Ctrl-C again to exit at once")
            self._give_up()
        elif run.over:
            self._reporter.say("the run is over and the engine is stopping; a third Ctrl-C exits at once")
        elif step == 1:
            run.drain()
            self._reporter.say(f"finishing {episodes}; press Ctrl-C again to stop them now")
        else:
            run.cancel()
            self._reporter.say(f"stopping {episodes}, kept as partial; press Ctrl-C again to exit at once")


@contextmanager
def collector_settings() -> Iterator[None]:
    """Settings of the garbage collector that avoid long pauses with thousands of streams.

    With a thousand streams, they reduce the time per token from 52 us to 18 us, and the pauses from 260 ms to 4 ms.
    """
    before = gc.get_threshold()
    frozen = gc.get_freeze_count() > 0  # unfreezing would also unfreeze the program's own objects
    gc.collect()
    if not frozen:
        gc.freeze()  # existing objects live until the process ends, so collecting them again wastes time
    gc.set_threshold(50_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen:
            gc.unfreeze()


def _end_stuck(run: Run, reporter: Reporter, blocker: Blocker) -> None:
    """End the process from the watchdog thread, since the event loop is blocked."""
    log.critical("the event loop has been blocked for %g s in %s", run.lag.stuck_seconds, blocker.where)
    reporter.restore()
    reporter.say(
        f"the event loop has been blocked in {blocker.where} for {run.lag.stuck_seconds:g} s, and cannot be "
        f"interrupted: {blocker.advice}."
    )
    # The wait has a time limit, since a disk that does not answer must not block the end.
    flushing = threading.Thread(target=run.flush, daemon=True)
    flushing.start()
    flushing.join(FLUSH_SECONDS)
    if run.file is not None:
        reporter.say(f"finished episodes are in {run.file}; the same command resumes from there")
    exit_now(RunStuck.exit_code)


def exit_now(code: int) -> NoReturn:
    """End this process and its child processes at once, without clean-up."""
    # `os._exit` skips the clean-up of multiprocessing, whose children would outlive this process.
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a closed stream must not block the end
            stream.flush()
    os._exit(code)


def end_process(code: int) -> NoReturn:
    """End this process, even if threads still run synchronous code of an author."""
    if busy_threads():  # a normal exit could crash while these threads run
        exit_now(code)
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join(THREAD_SECONDS)
            if thread.is_alive():
                exit_now(code)
    sys.exit(code)
