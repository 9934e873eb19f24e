"""Reporters: told how a run goes while it plays, and what of that a person sees."""

from __future__ import annotations

import os
import sys
import time
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import IO, Final

import anyio
import anyio.to_thread

from runner.runs.figures import Figures, Gauge, in_words
from runner.runs.fleet_figures import absent_in_words, worker_in_words
from runner.runs.player import PlayingEngine
from runner.runs.run import Run
from runner.trajectory import Trajectory
from runner.transcript import printable, shown_line

__all__ = ["PlainReporter", "Reporter", "WatchingReporter", "discard"]

REFRESH_SECONDS: Final = 0.25
"""How often the figures are read."""

PLAIN_SECONDS: Final = 5.0
"""How often plain lines are said at first."""


class Reporter:
    """Is told how a run goes. This one passes on what a person must know and nothing else."""

    async def watch(self, run: Run) -> None:
        """Look at the run while it plays, until cancelled; this one does not."""

    def finished(self, trajectory: Trajectory) -> None:
        """Hear of a trajectory that was committed."""

    def say(self, line: str) -> None:
        """Say something that a person must know."""
        try:
            print(printable(line), file=sys.stderr, flush=True)
        except BrokenPipeError:
            discard(sys.stderr)

    def restore(self) -> None:
        """Leave the terminal as it was found: the process is about to end at once."""


def discard(stream: IO[str]) -> None:
    """Send to nowhere what is written to `stream` from here on, what it holds back included."""
    with suppress(OSError, ValueError):  # a stream without a descriptor has no reader who could leave
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class WatchingReporter(Reporter):
    """Shows the figures of a run while it plays."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.total: int | None = None
        """How many episodes there are to be, or None where nobody knows."""
        self.before = 0
        """How many of them earlier runs of the file played."""
        self.last_fault = ""
        """What went wrong in the last episode that failed."""

    async def watch(self, run: Run) -> None:
        """Show the run until cancelled."""
        gauge = Gauge()
        began = time.monotonic()
        # Drawn in a thread: a terminal that is paused (Ctrl-S), or a pipe that nobody reads, must not stop the run.
        thread = anyio.CapacityLimiter(1)
        with self._shown():
            while True:
                if not run.summary.elapsed:
                    draw = partial(self._starting, time.monotonic() - began, _workers_so_far(run))
                else:
                    figures = gauge.read(run, total=self.total, before=self.before, last_fault=self.last_fault)
                    draw = partial(self._draw, figures, over=run.over)
                await anyio.to_thread.run_sync(draw, limiter=thread)
                await anyio.sleep(REFRESH_SECONDS)

    def finished(self, trajectory: Trajectory) -> None:
        """Remember what went wrong last."""
        never_spoke = bool(trajectory.error) and not trajectory.turns  # its prompt was over the context
        if trajectory.outcome.failed or never_spoke:
            self.last_fault = f"{trajectory.id} {trajectory.outcome.value}: {trajectory.error}"

    @contextmanager
    def _shown(self) -> Iterator[None]:
        yield

    def _draw(self, figures: Figures, *, over: bool) -> None:
        for event in figures.news:
            self._happened(event)
        (self._stopping if over else self._playing)(figures)

    def _happened(self, event: str) -> None:
        """Hear what happened to a worker."""
        self.last_fault = event

    @abstractmethod
    def _starting(self, seconds: float, workers: str) -> None: ...

    @abstractmethod
    def _playing(self, figures: Figures) -> None: ...

    @abstractmethod
    def _stopping(self, figures: Figures) -> None: ...


def _workers_so_far(run: Run) -> str:
    engine = run.engine
    if not isinstance(engine, PlayingEngine):
        return ""
    least = engine.least if engine.least == engine.most else f"at least {engine.least}"
    absent = "; ".join(absent_in_words(engine.absent()))
    return f", {len(engine.workers())} of {least} workers" + (f" ({absent})" if absent else "")


class PlainReporter(WatchingReporter):
    """A line for every tenth of the run, or every five seconds where that comes first; less often as time goes by."""

    def __init__(self, title: str) -> None:
        super().__init__(title)
        self._said = False
        self._tenths = 0
        self._next = PLAIN_SECONDS

    def _happened(self, event: str) -> None:
        super()._happened(event)
        self.say(shown_line(event))

    def _starting(self, seconds: float, workers: str) -> None:
        if not self._said:
            self._said = True
            self.say(f"{self.title}: starting the engine")

    def _playing(self, figures: Figures) -> None:
        tenths = 10 * figures.done // figures.total if figures.total else 0
        if figures.elapsed < self._next and tenths <= self._tenths:
            return
        self._tenths = tenths
        # A twentieth of the time so far: a log of a run of hours is no longer than one can read.
        self._next = figures.elapsed + max(PLAIN_SECONDS, figures.elapsed / 20)
        self.say(", ".join(in_words(figures)))
        if figures.blocker is not None:
            self.say(f"{figures.blocker.where} {figures.blocker.advice}")
        for worker in figures.fleet.troubled() if figures.fleet is not None else ():
            self.say(f"  {worker_in_words(worker)}")

    def _stopping(self, figures: Figures) -> None:
        if self._tenths >= 0:  # once, with the last figures
            self._tenths = -1
            self.say(", ".join(in_words(figures)))
