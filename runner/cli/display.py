"""How a run is shown while it plays: a live display on a terminal, plain lines anywhere else."""

from __future__ import annotations

import heapq
import os
import signal
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import anyio
import anyio.to_thread
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from runner.concurrency.loop_lag import Blocker
from runner.episode.lifecycle import Play
from runner.errors import DeltarunnerError
from runner.runs.process import Reporter, supervise
from runner.runs.run import Run
from runner.trajectory import Trajectory
from runner.transcript import printable

__all__ = ["Display", "Figures", "Gauge", "LiveDisplay", "PlainDisplay", "Stuck", "as_time", "display_for"]

REFRESH_SECONDS = 0.25
RATE_SECONDS = 5.0
PLAIN_SECONDS = 5.0
NARROW = 60
BAR = 100
LATE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Stuck:
    """An episode and what it waits for.

    Attributes:
        id: of the episode.
        turns: that it has had.
        doing: what it waits for.
        seconds: how long it has been.
    """

    id: str
    turns: int
    doing: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What is to be seen of a run at one moment.

    Attributes:
        total: episodes that the run is to have, or None where nobody knows.
        before: played by earlier runs of the same file.
        done: played so far, failed ones included.
        failed: of those, failed.
        running: episodes in flight, those that wait for the engine included.
        waiting: turns that wait for a place in the engine.
        rate: sampled ids a second, of late.
        reward: mean so far, or None.
        agent: whose, where several are trained, else "".
        reward_error: its standard error, or None.
        elapsed: seconds of playing.
        lag: of the event loop in seconds, 99th percentile.
        blocker: who makes the loop late, where it is.
        slowest: episodes that have waited longest for one thing.
        fault: the last thing that went wrong.
    """

    total: int | None = None
    before: int = 0
    done: int = 0
    failed: int = 0
    running: int = 0
    waiting: int = 0
    rate: float = 0.0
    reward: float | None = None
    agent: str = ""
    reward_error: float | None = None
    elapsed: float = 0.0
    lag: float = 0.0
    blocker: Blocker | None = None
    slowest: tuple[Stuck, ...] = ()
    fault: str = ""

    @property
    def remaining(self) -> float | None:
        """Seconds left at the pace so far; None where that cannot be told."""
        played = self.done - self.before
        if self.total is None or played <= 0:
            return None
        return max(0, self.total - self.done) * self.elapsed / played


@dataclass(slots=True)
class Gauge:
    """Reads the figures of a run; cheap enough for four times a second with ten thousand episodes in flight.

    Attributes:
        run: the run.
        total: episodes it is to have, or None.
        before: of those, played by earlier runs.
        last_fault: of the last episode that failed.
    """

    run: Run
    total: int | None = None
    before: int = 0
    last_fault: str = ""
    _samples: deque[tuple[float, int]] = field(default_factory=deque)

    def read(self, *, slowest: int = 5) -> Figures:
        run, summary = self.run, self.run.summary
        stats = [engine.stats() for engine in dict.fromkeys((run.engine, *run.engines.values()))]
        lag = run.lag.percentile(99)
        blockers = run.lag.blockers(1) if lag > LATE_SECONDS else []
        reward = summary.reward
        return Figures(
            total=self.total,
            before=self.before,
            done=summary.episodes,
            failed=summary.failed,
            running=len(run.plays),
            waiting=sum(engine.waiting for engine in stats),
            rate=self._rate(sum(engine.sampled_tokens for engine in stats)),
            reward=reward.mean if reward.count else None,
            agent=next(iter(summary.agents)) if len(summary.agents) > 1 else "",
            reward_error=reward.standard_error if reward.count > 1 else None,
            elapsed=summary.elapsed,
            lag=lag,
            blocker=blockers[0] if blockers else None,
            slowest=tuple(_stuck(play) for play in heapq.nsmallest(slowest, run.plays, key=_since)),
            fault=_one_line(self.last_fault or (summary.faults[-1] if summary.faults else "")),
        )

    def _rate(self, sampled: int) -> float:
        now = time.monotonic()
        self._samples.append((now, sampled))
        while self._samples[0][0] < now - RATE_SECONDS:
            self._samples.popleft()
        since, before = self._samples[0]
        return (sampled - before) / (now - since) if now > since else 0.0


def _since(play: Play) -> float:
    return play.since


def _stuck(play: Play) -> Stuck:
    waited = anyio.current_time() - play.since
    return Stuck(_one_line(play.key.id), len(play.episode.turns), _one_line(play.activity), waited)


def _one_line(text: str) -> str:
    return printable(text.partition("\n")[0])


class Display(Reporter):
    """Shows a run while it plays.

    Args:
        console: where.
        title: what is played on what.

    Attributes:
        total: episodes that there are to be, or None.
        before: of those, played by earlier runs of the file.
        last_fault: of the last episode that failed.
    """

    def __init__(self, console: Console, title: str) -> None:
        self.console = console
        self.title = title
        self.total: int | None = None
        self.before = 0
        self.last_fault = ""

    async def supervise(self, run: Run, reporter: Reporter | None = None) -> signal.Signals | None:
        """`runner.runs.process.supervise`, shown.

        Args:
            run: the run, not entered yet.
            reporter: is told how it goes; by default only this display is.
        """
        failure: DeltarunnerError | None = None
        received: signal.Signals | None = None
        async with anyio.create_task_group() as showing:
            showing.start_soon(self.watch, run, name="display")
            try:
                received = await supervise(run, reporter or self)
            # As a value: a task group would wrap it.
            except DeltarunnerError as error:
                failure = error
            showing.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return received

    async def watch(self, run: Run) -> None:
        """Show the run until cancelled."""
        gauge = Gauge(run)
        began = time.monotonic()
        # Drawn in a thread: a terminal that is paused (Ctrl-S), or a pipe that nobody reads, must not stop the run.
        thread = anyio.CapacityLimiter(1)
        with self._shown():
            while True:
                gauge.total, gauge.before, gauge.last_fault = self.total, self.before, self.last_fault
                if not run.summary.elapsed:
                    draw = partial(self._starting, time.monotonic() - began)
                else:
                    draw = partial(self._stopping if run.over else self._playing, gauge.read())
                await anyio.to_thread.run_sync(draw, limiter=thread)
                await anyio.sleep(REFRESH_SECONDS)

    def finished(self, trajectory: Trajectory) -> None:
        """Remember what went wrong last."""
        never_spoke = bool(trajectory.error) and not trajectory.turns  # its prompt was over the context
        if trajectory.outcome.failed or never_spoke:
            self.last_fault = f"{trajectory.id} {trajectory.outcome.value}: {trajectory.error}"

    def say(self, line: str) -> None:
        """Show a line that stays."""
        self.console.print(Text(printable(line)), soft_wrap=True)

    @contextmanager
    def _shown(self) -> Iterator[None]:
        yield

    @abstractmethod
    def _starting(self, seconds: float) -> None: ...

    @abstractmethod
    def _playing(self, figures: Figures) -> None: ...

    @abstractmethod
    def _stopping(self, figures: Figures) -> None: ...


def display_for(console: Console, title: str) -> Display:
    """A live display where the console is a terminal that can move its cursor, else plain lines."""
    return (
        LiveDisplay(console, title)
        if console.is_terminal and not console.is_dumb_terminal
        else PlainDisplay(console, title)
    )


class PlainDisplay(Display):
    """A line for every tenth of the run, or every five seconds where that comes first; less often as time goes by."""

    def __init__(self, console: Console, title: str) -> None:
        super().__init__(console, title)
        self._said = False
        self._tenths = 0
        self._next = PLAIN_SECONDS

    def _starting(self, seconds: float) -> None:
        if not self._said:
            self._said = True
            self.say(f"{self.title}: starting the engine")

    def _playing(self, figures: Figures) -> None:
        tenths = 10 * figures.done // figures.total if figures.total else 0
        if figures.elapsed < self._next and tenths <= self._tenths:
            return
        self._tenths = tenths
        self._next = figures.elapsed + max(PLAIN_SECONDS, figures.elapsed / 20)
        self.say(", ".join(plain_parts(figures)))
        if figures.blocker is not None:
            self.say(f"{figures.blocker.where} {figures.blocker.advice}")

    def _stopping(self, figures: Figures) -> None:
        if self._tenths >= 0:
            self._tenths = -1
            self.say(", ".join(plain_parts(figures)))


def plain_parts(figures: Figures) -> Iterator[str]:
    """The figures in words."""
    yield f"{figures.done} of {figures.total} episodes" if figures.total else f"{figures.done} episodes"
    yield f"{figures.running} running"
    if figures.waiting:
        yield f"{figures.waiting} waiting for the engine"
    yield f"{figures.failed} failed"
    yield f"{figures.rate:.0f} tokens/s"
    if figures.reward is not None:
        yield f"mean {_whose(figures)} {figures.reward:.3f}"
    if figures.remaining:
        yield f"{as_time(figures.remaining)} left"


class LiveDisplay(Display):
    """Redrawn four times a second, in as many lines and columns as there are."""

    _live: Live | None = None

    @contextmanager
    def _shown(self) -> Iterator[None]:
        # Refreshed by us: a thread of its own would compete with the event loop for the interpreter.
        # And sys.stdout is let be: who meets it now and keeps it, as a logger does, would write over the display.
        with Live(
            console=self.console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        ) as self._live:
            yield

    def restore(self) -> None:
        """Show the cursor again; written straight to the terminal, since this may interrupt a redraw."""
        with suppress(OSError, ValueError):
            os.write(self.console.file.fileno(), b"\x1b[?25h\n")

    def _show(self, renderable: RenderableType) -> None:
        if self._live is not None:
            self._live.update(renderable, refresh=True)

    def _starting(self, seconds: float) -> None:
        self._show(Spinner("dots", Text(f"{self.title}: starting the engine, {seconds:.0f} s"), speed=1.0))

    def _playing(self, figures: Figures) -> None:
        self._show(live_view(figures, self.title, width=self.console.width, height=self.console.height))

    def _stopping(self, figures: Figures) -> None:
        self._show(Group(_counts(figures, self.console.width), Text("stopping the engine", style="dim")))


def live_view(figures: Figures, title: str, *, width: int, height: int) -> RenderableType:
    """What the live display shows."""
    lines: list[RenderableType] = [Text(title, style="bold", no_wrap=True, overflow="ellipsis")]
    if width >= NARROW and figures.total:
        lines.append(_bar(figures.total, figures.done, width))
    lines += [_counts(figures, width), _pace(figures)]
    if figures.blocker is not None:
        lines.append(Text(f"slow loop: {figures.blocker.where} {figures.blocker.advice}", style="yellow"))
    if figures.fault:
        lines.append(Text(f"last fault: {figures.fault}", style="red", no_wrap=True, overflow="ellipsis"))
    room = height - len(lines) - 3
    if figures.slowest and room > 0:
        lines.append(_slowest(figures.slowest[:room], width))
    return Group(*lines)


def _bar(total: int, done: int, width: int) -> Table:
    bar = Table.grid()  # alone it would not end its line
    bar.add_row(ProgressBar(total=total, completed=done, width=min(width, BAR)))
    return bar


def _counts(figures: Figures, width: int) -> Text:
    parts = [(f"{figures.done} of {figures.total}" if figures.total else f"{figures.done} done", "bold")]
    if width >= NARROW:
        parts += [(f"{figures.running} running", ""), (f"{figures.waiting} waiting for the engine", "")]
    parts.append((f"{figures.failed} failed", "red" if figures.failed else "dim"))
    return _joined(parts)


def _pace(figures: Figures) -> Text:
    parts = [(f"{figures.rate:.0f} tokens/s", "")]
    if figures.reward is not None:
        error = f" ± {figures.reward_error:.3f}" if figures.reward_error is not None else ""
        parts.append((f"{_whose(figures)} {figures.reward:.3f}{error}", "bold"))
    left = figures.remaining
    parts.append((as_time(figures.elapsed) + (f", {as_time(left)} left" if left is not None else ""), ""))
    parts.append((f"loop lag {1000 * figures.lag:.0f} ms", "yellow" if figures.lag > LATE_SECONDS else "dim"))
    return _joined(parts)


def _whose(figures: Figures) -> str:
    return f"reward of {_one_line(figures.agent)}" if figures.agent else "reward"


def _joined(parts: Sequence[tuple[str, str]]) -> Text:
    line = Text()
    for text, style in parts:
        line.append(" · " if line else "", "dim").append(text, style)
    return line


def _slowest(slowest: Sequence[Stuck], width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    for stuck in slowest:
        cells = [Text(f"{stuck.seconds:6.1f} s", style="dim"), Text(stuck.id, overflow="ellipsis", no_wrap=True)]
        if width >= NARROW:
            cells.append(Text(f"turn {stuck.turns + 1}", style="dim"))
        table.add_row(*cells, Text(f"waits for {stuck.doing}", no_wrap=True, overflow="ellipsis"))
    return table


def as_time(seconds: float) -> str:
    """Minutes and seconds, with hours where there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
