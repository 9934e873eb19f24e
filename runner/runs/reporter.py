"""Reporters: progress and messages of a run for people."""

from __future__ import annotations

import os
import sys
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import IO, Final

import anyio
import anyio.to_thread

from runner.runs.fleet_stats import idle_in_words, worker_in_words
from runner.runs.live_stats import LiveStats, StatsReader, as_time, in_words
from runner.runs.player import PlayingEngine
from runner.runs.run import Run
from runner.trajectory import Trajectory
from runner.transcript import printable, shown_line

__all__ = ["LiveReporter", "PlainReporter", "Reporter", "discard"]

REFRESH_INTERVAL_SECONDS: Final = 0.25
"""The interval between readings of the statistics."""

PLAIN_INTERVAL_SECONDS: Final = 5.0
"""The interval between plain lines at the beginning of a run; it grows later."""

START_INTERVAL_SECONDS: Final = 10.0
"""The interval between plain lines while an engine starts."""


class Reporter:
    """A receiver of the progress of a run. This base class prints only messages that a person must see."""

    async def watch(self, run: Run) -> None:
        """Show the run until cancelled; this class shows nothing."""

    def finished(self, trajectory: Trajectory) -> None:
        """Receive a committed trajectory."""

    def say(self, line: str) -> None:
        try:
            print(printable(line), file=sys.stderr, flush=True)
        except BrokenPipeError:
            discard(sys.stderr)

    def restore(self) -> None:
        """Restore the terminal before the process ends at once."""


def discard(stream: IO[str]) -> None:
    """Redirect `stream` to the null device, including its buffered output."""
    with suppress(OSError, ValueError):  # a stream without a descriptor cannot break
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class LiveReporter(Reporter):
    """A reporter that shows live statistics of a run."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._began = time.monotonic()
        self.total: int | None = None
        """The number of episodes of the run; None if unknown."""
        self.before = 0
        """The number of these episodes that earlier runs of the file played."""
        self.last_fault = ""
        """The cause of the last failed episode, or the last event of a worker."""

    async def watch(self, run: Run) -> None:
        """Show the run until cancelled."""
        reader = StatsReader()
        self._began = began = time.monotonic()
        # The caller entered these engines, and showed their notes.
        noted = {each for each in run.engines if each.running}
        # The display is drawn in a thread, since a paused terminal (Ctrl-S) or a full pipe must not stop the run.
        thread = anyio.CapacityLimiter(1)
        with self._shown():
            while True:
                notes = [note for each in run.engines if each.running and each not in noted for note in each.notes]
                noted.update(each for each in run.engines if each.running)
                if notes:
                    await anyio.to_thread.run_sync(self._note, notes, limiter=thread)
                if not run.summary.elapsed:
                    what = f"waiting for {run.waits_for}" if run.waits_for else "starting the engine"
                    draw = partial(self._starting, time.monotonic() - began, _start_in_words(run), what)
                else:
                    stats = reader.read(run, total=self.total, before=self.before, last_fault=self.last_fault)
                    draw = partial(self._draw, stats, over=run.over)
                await anyio.to_thread.run_sync(draw, limiter=thread)
                await anyio.sleep(REFRESH_INTERVAL_SECONDS)

    def finished(self, trajectory: Trajectory) -> None:
        """Store the cause if the episode failed, or ended with an error before its first turn."""
        no_turn = bool(trajectory.error) and not trajectory.turns  # the prompt exceeded the context
        if trajectory.outcome.failed or no_turn:
            self.last_fault = f"{trajectory.id} {trajectory.outcome.value}: {trajectory.error}"

    @contextmanager
    def _shown(self) -> Iterator[None]:
        yield

    def _draw(self, stats: LiveStats, *, over: bool) -> None:
        for event in stats.worker_events:
            self._happened(event)
        (self._stopping if over else self._playing)(stats)

    def _note(self, notes: Sequence[str]) -> None:
        for note in notes:
            self.say(shown_line(note))

    def _happened(self, event: str) -> None:
        """Show an event of a worker."""
        self.last_fault = event

    @abstractmethod
    def _starting(self, seconds: float, doing: str, what: str) -> None: ...

    @abstractmethod
    def _playing(self, stats: LiveStats) -> None: ...

    @abstractmethod
    def _stopping(self, stats: LiveStats) -> None: ...


def _start_in_words(run: Run) -> str:
    """Describe the workers and the phase of the start, each after a comma; empty if unknown."""
    phase = next((each.start_phase for each in run.engines if each.start_phase), "")
    return _workers_so_far(run) + (f", {phase}" if phase else "")


def _workers_so_far(run: Run) -> str:
    engine = run.engine
    if not isinstance(engine, PlayingEngine):
        return ""
    least = engine.least if engine.least == engine.most else f"at least {engine.least}"
    absent = "; ".join(idle_in_words(engine.absent()))
    return f", {len(engine.workers())} of {least} workers" + (f" ({absent})" if absent else "")


class PlainReporter(LiveReporter):
    """A reporter that prints a line every five seconds, later less often, and at each tenth of the run."""

    def __init__(self, title: str) -> None:
        super().__init__(title)
        self._tenths = 0
        self._next_start = 0.0
        self._next = PLAIN_INTERVAL_SECONDS

    def _say_timed(self, line: str) -> None:
        """Print a line with the time since the run began."""
        self.say(f"{as_time(time.monotonic() - self._began):>5}  {line}")

    def _note(self, notes: Sequence[str]) -> None:
        for note in notes:
            self._say_timed(shown_line(note))

    def _happened(self, event: str) -> None:
        super()._happened(event)
        self._say_timed(shown_line(event))

    def _starting(self, seconds: float, doing: str, what: str) -> None:
        if seconds >= self._next_start:
            title = "" if self._next_start else f"{self.title}: "
            self._next_start = (seconds // START_INTERVAL_SECONDS + 1) * START_INTERVAL_SECONDS
            self._say_timed(f"{title}{what}{doing}")

    def _playing(self, stats: LiveStats) -> None:
        tenths = 10 * stats.done // stats.total if stats.total else 0
        if stats.elapsed < self._next and tenths <= self._tenths:
            return
        self._tenths = tenths
        # An interval of a twentieth of the time so far keeps the output of a long run short.
        self._next = stats.elapsed + max(PLAIN_INTERVAL_SECONDS, stats.elapsed / 20)
        self._say_timed(", ".join(in_words(stats)))
        if stats.blocker is not None:
            self.say(f"{stats.blocker.where} {stats.blocker.advice}")
        for worker in stats.fleet.troubled() if stats.fleet is not None else ():
            self.say(f"  {worker_in_words(worker)}")

    def _stopping(self, stats: LiveStats) -> None:
        if self._tenths >= 0:  # this line is printed once, with the last statistics
            self._tenths = -1
            self._say_timed(", ".join(in_words(stats)))
