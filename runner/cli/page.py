"""`deltarunner report`: write the page of a run file."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from runner.cli.export import check_target
from runner.cli.report import make_console
from runner.errors import BadOption
from runner.quantities import counted
from runner.report.comparison import compare
from runner.report.page import write_report
from runner.report.prices import read_prices
from runner.store.reader import RunFile

__all__ = ["report_command"]


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
    """Write the page next to the run file, or to `output`; return the exit code."""
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
