"""How the command line shows a run while it plays: a live display on a terminal, plain lines anywhere else."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from runner.cli.workers_shown import joined, workers_shown
from runner.concurrency.loop_lag import LATE_SECONDS
from runner.runs.figures import (
    WRITES_OTHERWISE,
    Figures,
    Stuck,
    as_time,
    calls_in_words,
    ranks_in_words,
    writes_otherwise,
)
from runner.runs.reporter import PlainReporter, WatchingReporter
from runner.transcript import printable, shown_line

__all__ = ["LiveDisplay", "PlainDisplay", "display_for", "live_view"]

NARROW: Final = 60
"""In fewer columns only the most important figures are shown."""

BAR: Final = 100
"""The widest bar of progress."""


class _OnConsole(WatchingReporter):
    """Says its lines on a console."""

    def __init__(self, console: Console, title: str) -> None:
        super().__init__(title)
        self.console = console

    def say(self, line: str) -> None:
        self.console.print(Text(printable(line)), soft_wrap=True)


def display_for(console: Console, title: str) -> WatchingReporter:
    """A live display where the console is a terminal that can move its cursor, else plain lines."""
    live = console.is_terminal and not console.is_dumb_terminal
    return LiveDisplay(console, title) if live else PlainDisplay(console, title)


class PlainDisplay(_OnConsole, PlainReporter):
    """Plain lines on a console."""


class LiveDisplay(_OnConsole):
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

    def _starting(self, seconds: float, workers: str) -> None:
        text = Text(f"{self.title}: starting the engine, {seconds:.0f} s{workers}")
        self._show(Spinner("dots", text, speed=1.0))

    def _playing(self, figures: Figures) -> None:
        self._show(live_view(figures, self.title, width=self.console.width, height=self.console.height))

    def _stopping(self, figures: Figures) -> None:
        self._show(Group(_counts(figures, self.console.width), Text("stopping the engine", style="dim")))


def live_view(figures: Figures, title: str, *, width: int, height: int) -> RenderableType:
    """What the live display shows."""
    above: list[RenderableType] = [Text(title, style="bold", no_wrap=True, overflow="ellipsis")]
    if width >= NARROW and figures.total:
        above.append(_bar(figures.total, figures.done, width))
    above += [_counts(figures, width), _pace(figures)]
    below: list[RenderableType] = []
    if figures.blocker is not None:
        below.append(Text(f"slow loop: {figures.blocker.where} {figures.blocker.advice}", style="yellow"))
    if figures.malformed:
        advice = f": {WRITES_OTHERWISE}" if writes_otherwise(figures.calls, figures.malformed) else ""
        below.append(
            Text(calls_in_words(figures.calls, figures.malformed) + advice, style="yellow" if advice else "dim")
        )
    if figures.fault:
        below.append(Text(f"last fault: {figures.fault}", style="red", no_wrap=True, overflow="ellipsis"))
    room = height - len(above) - len(below) - 3
    if figures.fleet is not None:
        # The episodes that have waited longest keep a third of what is left, as far as they need it.
        workers = workers_shown(figures.fleet, width=width, room=room - min(len(figures.slowest), max(0, room // 3)))
        above += workers
        room -= len(workers)
    if figures.slowest and room > 0:
        below.append(_slowest(figures.slowest[:room], width))
    return Group(*above, *below)


def _bar(total: int, done: int, width: int) -> Table:
    bar = Table.grid()  # alone it would not end its line
    bar.add_row(ProgressBar(total=total, completed=done, width=min(width, BAR)))
    return bar


def _counts(figures: Figures, width: int) -> Text:
    parts = [(f"{figures.done} of {figures.total}" if figures.total else f"{figures.done} done", "bold")]
    if width >= NARROW:
        parts += [(f"{figures.running} running", ""), (f"{figures.waiting} waiting for the engine", "")]
        parts += [(ranks_in_words(figures.ranks), "")] if figures.ranks else []
    parts.append((f"{figures.failed} failed", "red" if figures.failed else "dim"))
    return joined(parts)


def _pace(figures: Figures) -> Text:
    parts = [(f"{figures.rate:.0f} tokens/s", "")]
    if figures.reward is not None:
        error = f" ± {figures.reward_error:.3f}" if figures.reward_error is not None else ""
        whose = f"reward of {shown_line(figures.agent)}" if figures.agent else "reward"
        parts.append((f"{whose} {figures.reward:.3f}{error}", "bold"))
    left = figures.remaining
    parts.append((as_time(figures.elapsed) + (f", {as_time(left)} left" if left is not None else ""), ""))
    parts.append((f"loop lag {1000 * figures.lag:.0f} ms", "yellow" if figures.lag > LATE_SECONDS else "dim"))
    return joined(parts)


def _slowest(slowest: Sequence[Stuck], width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    for stuck in slowest:
        cells = [Text(f"{stuck.seconds:6.1f} s", style="dim"), Text(stuck.id, overflow="ellipsis", no_wrap=True)]
        if width >= NARROW:
            cells.append(Text(f"turn {stuck.turns + 1}", style="dim"))
        table.add_row(*cells, Text(f"waits for {stuck.activity}", no_wrap=True, overflow="ellipsis"))
    return table
