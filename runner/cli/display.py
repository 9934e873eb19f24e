"""Displays of a running run: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import RLock
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from runner.cli.workers_view import joined_line, workers_view
from runner.concurrency.loop_lag import LATE_SECONDS
from runner.runs.live_stats import (
    TEMPLATE_ADVICE,
    LiveStats,
    WaitingEpisode,
    as_time,
    calls_in_words,
    left_in_words,
    pace_in_words,
    ranks_in_words,
    running_in_words,
    suspect_template,
)
from runner.runs.reporter import LiveReporter, PlainReporter
from runner.transcript import printable, shown_line

__all__ = ["LiveDisplay", "PlainDisplay", "display_for", "live_view"]

MIN_FULL_WIDTH: Final = 60
"""Width of the terminal, in characters, below which only the most important numbers are shown."""

MAX_BAR_WIDTH: Final = 100
"""Maximum width of the progress bar, in characters."""


REPEATED_LINES: Final = 20
"""Number of recent lines that are printed again after the window is cleared."""


class _ConsoleReporter(LiveReporter):
    def __init__(self, console: Console, title: str) -> None:
        super().__init__(title)
        self.console = console

    def say(self, line: str) -> None:
        self.console.print(Text(printable(line)), soft_wrap=True)


def display_for(console: Console, title: str) -> LiveReporter:
    """A live display if the console is a terminal that can move its cursor, else plain lines."""
    live = console.is_terminal and not console.is_dumb_terminal
    return LiveDisplay(console, title) if live else PlainDisplay(console, title)


class PlainDisplay(_ConsoleReporter, PlainReporter):
    """Plain lines on a console."""


class LiveDisplay(_ConsoleReporter):
    """A display that is redrawn four times a second, in the size of the terminal."""

    def __init__(self, console: Console, title: str) -> None:
        super().__init__(console, title)
        self._live: Live | None = None
        self._size = console.size
        self._spinner = Spinner("dots")
        self._recent_lines: deque[Text] = deque(maxlen=REPEATED_LINES)
        self._drawing = RLock()  # frames are drawn in a thread, lines are also printed on the event loop

    @contextmanager
    def _shown(self) -> Iterator[None]:
        self._size = self.console.size
        self._begin()
        try:
            yield
        finally:
            self._end()

    def _begin(self) -> None:
        # This object refreshes the display, since Rich's own thread would compete with the event loop for the
        # interpreter. sys.stdout is not redirected, since a logger that keeps the redirected stream would write over
        # the display.
        self._live = Live(
            console=self.console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()

    def _end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, line: str) -> None:
        with self._drawing:
            self._follow_size()
            super().say(line)
            self._recent_lines.append(Text(printable(line)))

    def _follow_size(self) -> None:
        """If the window has a new size, clear it and print the recent lines again.

        The old frame cannot be erased alone, because its number of lines after the change depends on the terminal.
        """
        size = self.console.size
        if self._live is None or size == self._size:
            return
        self._size = size
        self._end()
        self.console.control(Control.home(), Control.clear())
        for line in self._recent_lines:
            self.console.print(line, soft_wrap=True)
        self._begin()

    def restore(self) -> None:
        """Show the cursor again, with a direct write to the terminal, since this may interrupt the code that draws."""
        with suppress(OSError, ValueError):
            os.write(self.console.file.fileno(), b"\x1b[?25h\n")

    def _show(self, renderable: RenderableType) -> None:
        with self._drawing:
            self._follow_size()
            if self._live is not None:
                self._live.update(renderable, refresh=True)

    def _starting(self, seconds: float, doing: str, what: str) -> None:
        text = Text(f"{self.title}: {what}, {seconds:.0f} s{doing}")
        self._spinner.update(text=text)
        self._show(self._spinner)

    def _playing(self, stats: LiveStats) -> None:
        self._show(live_view(stats, self.title, width=self.console.width, height=self.console.height))

    def _stopping(self, stats: LiveStats) -> None:
        self._show(Group(_counts(stats, self.console.width), Text("stopping the engine", style="dim")))


def live_view(stats: LiveStats, title: str, *, width: int, height: int) -> RenderableType:
    """A frame of the live display, for a terminal of `width` columns and `height` lines."""
    above: list[RenderableType] = [Text(title, style="bold", no_wrap=True, overflow="ellipsis")]
    if width >= MIN_FULL_WIDTH and stats.total:
        above.append(_bar(stats.total, stats.done, width))
    above += [_counts(stats, width), _pace(stats)]
    below: list[RenderableType] = []
    if stats.blocker is not None:
        below.append(Text(f"slow loop: {stats.blocker.where} {stats.blocker.advice}", style="yellow"))
    if stats.malformed:
        advice = f": {TEMPLATE_ADVICE}" if suspect_template(stats.calls, stats.malformed) else ""
        below.append(Text(calls_in_words(stats.calls, stats.malformed) + advice, style="yellow" if advice else "dim"))
    if stats.fault:
        below.append(Text(f"last fault: {stats.fault}", style="red", no_wrap=True, overflow="ellipsis"))
    room = height - len(above) - len(below) - 3
    if stats.fleet is not None:
        # The episodes with the longest waits get up to a third of the remaining lines.
        workers = workers_view(stats.fleet, width=width, room=room - min(len(stats.slowest), max(0, room // 3)))
        above += workers
        room -= len(workers)
    if stats.slowest and room > 0:
        below.append(_slowest(stats.slowest[:room], width))
    return Group(*above, *below)


def _bar(total: int, done: int, width: int) -> Table:
    bar = Table.grid()  # Rich prints no line break after a bar outside of a table
    bar.add_row(ProgressBar(total=total, completed=done, width=min(width, MAX_BAR_WIDTH)))
    return bar


def _counts(stats: LiveStats, width: int) -> Text:
    parts = [(f"{stats.done} of {stats.total}" if stats.total else f"{stats.done} done", "bold")]
    if width >= MIN_FULL_WIDTH:
        parts += [(running_in_words(stats), "")]
        parts += [(ranks_in_words(stats.ranks), "")] if stats.ranks else []
    parts.append((f"{stats.failed} failed", "red" if stats.failed else "dim"))
    return joined_line(parts)


def _pace(stats: LiveStats) -> Text:
    parts = [(pace_in_words(stats), "")]
    if stats.reward is not None:
        error = f" ± {stats.reward_error:.3f}" if stats.reward_error is not None else ""
        whose = f"reward of {shown_line(stats.agent)}" if stats.agent else "reward"
        parts.append((f"{whose} {stats.reward:.3f}{error}", "bold"))
    left = f", {left_in_words(stats.left)}" if stats.left is not None else ""
    parts.append((as_time(stats.elapsed) + left, ""))
    parts.append((f"loop lag {1000 * stats.lag:.0f} ms", "yellow" if stats.lag > LATE_SECONDS else "dim"))
    return joined_line(parts)


def _slowest(slowest: Sequence[WaitingEpisode], width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    for stuck in slowest:
        cells = [Text(f"{stuck.seconds:6.1f} s", style="dim"), Text(stuck.id, overflow="ellipsis", no_wrap=True)]
        if width >= MIN_FULL_WIDTH:
            cells.append(Text(f"turn {stuck.turns + 1}", style="dim"))
        table.add_row(*cells, Text(f"waits for {stuck.activity}", no_wrap=True, overflow="ellipsis"))
    return table
