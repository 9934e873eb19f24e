"""The edge of the library: where a run meets a process, its event loop, its garbage collector and its signals."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypedDict, TypeVar, TypeVarTuple

import anyio
from typing_extensions import Unpack

from runner.concurrency.loop_lag import Blocker
from runner.concurrency.threads import busy_threads
from runner.engines.base import Engine
from runner.environment.environment import Environment
from runner.environment.task_feed import Tasks
from runner.errors import DeltarunnerError, RunStuck
from runner.options import Concurrency, History, Limits, Sampling
from runner.runs.run import Run
from runner.runs.summary import Summary
from runner.store.header import Header
from runner.trajectory import Trajectory

__all__ = ["Reporter", "RunOptions", "end_process", "exit_now", "on_event_loop", "run", "supervise"]

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

FAULTS = 3
FLUSH_SECONDS = 10.0
THREAD_SECONDS = 0.2


class RunOptions(TypedDict, total=False):
    """What `Run` takes by name; see there."""

    tasks: Tasks | None
    group_size: int
    engines: Mapping[str, Engine] | None
    sampling: Sampling | None
    limits: Limits | None
    concurrency: Concurrency | None
    seed: int
    template_options: Mapping[str, Any] | None
    file: str | Path | Callable[[Header], Path] | None
    weights: Mapping[str, float] | None
    retries: int
    breaker: float
    history: History | str | None
    max_version_lag: int | None
    retry_failed: bool


class Reporter:
    """Is told how a run goes. This one passes on what a person must know and nothing else."""

    def finished(self, trajectory: Trajectory) -> None:
        """A trajectory was committed."""

    def say(self, line: str) -> None:
        """Something that a person must know."""
        try:
            print(line, file=sys.stderr, flush=True)
        except BrokenPipeError:
            from runner.runs.console import discard

            discard(sys.stderr)

    def restore(self) -> None:
        """Leave the terminal as it was found: the process is about to end at once."""


def run(
    environment: Environment[Any] | type[Environment[Any]],
    engine: Engine,
    *,
    quiet: bool = False,
    **options: Unpack[RunOptions],
) -> Summary:
    """Play a run to its end, on an event loop of its own: the one synchronous door.

    Ctrl-C lets the episodes in flight finish; a second one stops them, and they are kept as partial; a third one ends
    the process. SIGTERM does what the second one does.

    Args:
        environment: the environment, or its class.
        engine: what speaks.
        quiet: do not say on stderr how far the run is.
        options: those of `Run`.

    Returns:
        The summary; trajectories are in the run file (`file=`).

    Raises:
        DeltarunnerError: as `Run` does.
        KeyboardInterrupt: after Ctrl-C, when everything is recorded.
        SystemExit: after SIGTERM, when everything is recorded; its code is 143, as of a process that the signal ended.
    """

    async def play() -> tuple[Summary, signal.Signals | None]:
        made = Run(environment, engine, **options)
        received = await (supervise(made, Reporter()) if quiet else _watched(made))
        return made.summary, received

    summary, received = on_event_loop(play)
    if received is signal.SIGTERM:
        raise SystemExit(128 + received)
    if received is not None:
        raise KeyboardInterrupt
    return summary


async def _watched(made: Run) -> signal.Signals | None:
    from runner.cli.display import PlainDisplay
    from runner.runs.console import LastingConsole

    # Plain lines, also on a terminal: what else is printed there is not ours to hold back.
    display = PlainDisplay(LastingConsole(stderr=True, highlight=False), type(made.environment).__name__)
    received = await display.supervise(made)
    for fault in list(made.summary.faults)[-FAULTS:]:
        display.say(f"fault: {fault}")
    return received


def on_event_loop(function: Callable[[*Arguments], Awaitable[T]], *arguments: *Arguments) -> T:
    """Run an asynchronous function on an event loop of its own: asyncio, as vLLM wants it, by uvloop if it is there."""
    settings = {"use_uvloop": importlib.util.find_spec("uvloop") is not None}
    return anyio.run(function, *arguments, backend="asyncio", backend_options=settings)


async def supervise(run: Run, reporter: Reporter) -> signal.Signals | None:
    """Play a run that is not entered yet to its end; returns the signal that ended it early, if one did.

    The first Ctrl-C drains, the second cancels, the third ends the process; SIGTERM cancels. An event loop that stands
    still for a minute ends the process with `RunStuck.exit_code`, once what was finished is committed.

    Raises:
        DeltarunnerError: why the run could not begin or ended before its work did.
    """
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
    """What signals do to a run.

    Attributes:
        started: the run is playing; before, a signal gives the start up.
        received: the first signal.
    """

    def __init__(self, run: Run, reporter: Reporter, *, give_up: Callable[[], None]) -> None:
        self.started = False
        self.received: signal.Signals | None = None
        self._run = run
        self._reporter = reporter
        self._give_up = give_up
        self._step = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM; nothing where this is not the main thread, which alone gets signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # Not the loop's own signal handlers: they are deaf while the loop is blocked, and the third must get through.
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
        last = 2 if self.started else 1
        if self._step > last and number is signal.SIGINT:
            self._reporter.restore()
            exit_now(128 + self.received)
        loop.call_soon_threadsafe(self._act, self._step)

    def _act(self, step: int) -> None:
        run, count = self._run, len(self._run.plays)
        episodes = "1 episode" if count == 1 else f"{count} episodes"
        if not self.started:
            self._reporter.say("giving up the start; Ctrl-C again exits at once")
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
    """Settings of the garbage collector under which thousands of streams do not wait for it.

    With a thousand streams: 18 us a token and pauses of 4 ms, instead of 52 us and 260 ms.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _end_stuck(run: Run, reporter: Reporter, blocker: Blocker) -> None:
    """End the process, from the thread that watches: the event loop cannot."""
    reporter.restore()
    reporter.say(
        f"the event loop stands still in {blocker.where}, for {run.lag.stuck_seconds:g} s now, and cannot be freed "
        f"from outside: {blocker.advice}."
    )
    # With a time limit: a disk that does not answer must not keep the process.
    flushing = threading.Thread(target=run.flush, daemon=True)
    flushing.start()
    flushing.join(FLUSH_SECONDS)
    if run.file is not None:
        reporter.say(f"what was finished is in {run.file}; the same command again goes on from there")
    exit_now(RunStuck.exit_code)


def exit_now(code: int) -> NoReturn:
    """End this process and its child processes at once, without cleaning up."""
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def end_process(code: int) -> NoReturn:
    """End this process; threads that synchronous code of an author still occupies do not keep it."""
    if busy_threads():  # the interpreter's own end could trip over what they do meanwhile
        exit_now(code)
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join(THREAD_SECONDS)
            if thread.is_alive():
                exit_now(code)
    sys.exit(code)
