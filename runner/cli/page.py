"""`deltarunner report` and `deltarunner view`: write or serve the pages of run files."""

from __future__ import annotations

import os
from pathlib import Path

from rich.text import Text

from runner.cli.export import check_target
from runner.cli.report import make_console
from runner.errors import BadOption
from runner.quantities import counted
from runner.report.comparison import compare
from runner.report.page import write_report
from runner.report.prices import read_prices
from runner.report.viewer import Viewer
from runner.store.reader import RunFile

__all__ = ["report_command", "view_command"]

NICE_COUNT = 10
"""Increase of the process's niceness, so that a run on the same machine has priority."""


def report_command(
    file: Path,
    *,
    output: Path | None,
    episodes: int,
    tokens: bool,
    against: Path | None,
    by: str | None,
    prices: Path | None,
) -> int:
    """Write the page next to the run file, or to `output`; return the exit code.

    Raises:
        BadOption: `by` is given without `against`, or the page would replace a file that must be kept.
    """
    if by is not None and against is None:
        raise BadOption(f"--by {by}: give --against A.db as well, the file to compare with.")
    table = None if prices is None else read_prices(prices)
    with RunFile(file) as run_file:
        target = output or file.with_suffix(".html")
        check_target(file, target, named=output is not None)
        comparison = None if against is None else compare(against, run_file, by=by)
        written = write_report(run_file, target, most=episodes, tokens=tokens, comparison=comparison, prices=table)
    left_out = written.total - written.transcripts
    words = f"{target}: {counted(written.transcripts, 'episode')}, {written.size / 1e6:.1f} MB"
    if left_out:
        words += f"; {left_out} of {written.total} episodes are left out (--episodes N)"
    make_console().print(Text(words), soft_wrap=True)
    return 0


def view_command(path: Path, *, port: int, prices: Path | None) -> int:
    """Print the address, and serve the pages until Ctrl-C; return the exit code."""
    viewer = Viewer(path, port=port, prices=None if prices is None else read_prices(prices))
    os.nice(NICE_COUNT)
    console = make_console()
    console.print(Text(viewer.address), soft_wrap=True)
    console.print(
        Text("The address, with its key, opens the pages on this machine. Ctrl-C ends the viewer."), style="dim"
    )
    console.file.flush()
    try:
        viewer.serve()
    except KeyboardInterrupt:
        return 0
    return 0
