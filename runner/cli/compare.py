"""`deltarunner compare`: compare run files task by task, and show which one is better."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.cli.report import make_console, plain_table
from runner.errors import BadOption
from runner.quantities import counted
from runner.report.comparison import RunComparison, compare
from runner.report.paired import Decision, MetricDifference
from runner.store.json_values import encode_standard_json
from runner.transcript import printable_line

__all__ = ["compare_command"]

MAX_SHOWN_TASKS = 20
"""Maximum number of lost tasks, of won tasks, and of different settings that are shown; the others are counted."""
MAX_SHOWN_SLICES = 60
"""Maximum number of shown rows about slices (the tasks with one value of the field `by`); the others are counted."""


def compare_command(files: Sequence[Path], *, by: str | None, as_json: bool) -> int:
    """Compare each file with the first one, print the results, and return the exit code.

    Raises:
        BadOption: fewer than two files are given.
    """
    if len(files) < 2:
        raise BadOption("compare: give at least two run files; each is compared with the first.")
    comparisons = [compare(files[0], other, by=by) for other in files[1:]]
    if as_json:
        print(encode_standard_json([each.as_dict() for each in comparisons]).decode())
        return 0
    console = make_console()
    for comparison in comparisons:
        _show(console, comparison)
    return 0


def _show(console: Console, comparison: RunComparison) -> None:
    def line(text: str, style: str = "") -> None:
        console.print(Text(printable_line(text), style=style), soft_wrap=True)

    line(f"A  {comparison.first}", "dim")
    line(f"B  {comparison.second}", "dim")
    line(comparison.verdict, "bold")
    for note in comparison.notes:
        line(note, "yellow")
    console.print()
    console.print(_table(comparison.differences, "metric"))
    console.print()
    if comparison.slices:
        console.print(_table(comparison.slices[:MAX_SHOWN_SLICES], "metric", "slice"))
        _others(console, len(comparison.slices), MAX_SHOWN_SLICES)
        line("The p-values of the slices of a metric are adjusted for their number (Holm).", "dim")
        console.print()
    _show_flipped(console, comparison)
    if comparison.configuration:
        console.print(Text("Different settings", style="bold"))
        for path, old, new in comparison.configuration[:MAX_SHOWN_TASKS]:
            line(f"  {path}: {old} -> {new}")
        _others(console, len(comparison.configuration))
    else:
        line("The headers of both files are the same.")
    console.print()


def _show_flipped(console: Console, comparison: RunComparison) -> None:
    lost = [each for each in comparison.flipped if each.lost]
    won = [each for each in reversed(comparison.flipped) if not each.lost]
    for words, tasks in (("lost", lost), ("won", won)):
        if not tasks:
            continue
        console.print(Text(f"B {words} {counted(len(tasks), 'task')} (solved in A -> in B)", style="bold"))
        for each in tasks[:MAX_SHOWN_TASKS]:
            ids = f"{each.episodes[0]} and {each.episodes[1]}"
            text = f"  {each.task_id}: {_share(each.first)} -> {_share(each.second)}, such as {ids}"
            console.print(Text(printable_line(text)), soft_wrap=True)
        _others(console, len(tasks))


def _share(solved: float | None) -> str:
    return "no score" if solved is None else f"{solved:.0%}"


def _others(console: Console, count: int, shown: int = MAX_SHOWN_TASKS) -> None:
    if count > shown:
        console.print(Text(f"  and {count - shown} more (--json has all)", style="dim"))


def _table(differences: Sequence[MetricDifference], *names: str) -> Table:
    """A table with a row for each difference. The first columns are the attributes `names` of the difference."""
    table = plain_table()
    for name in (*names, "A", "B", "B - A", "95% interval", "p", "tasks", "result"):
        table.add_column(name, justify="left" if name in (*names, "result") else "right")
    for each in differences:
        interval = "-" if each.low is None or each.high is None else f"{each.low:+.3g} to {each.high:+.3g}"
        table.add_row(
            *(Text(printable_line(getattr(each, name))) for name in names),
            f"{each.first:.3g}",
            f"{each.second:.3g}",
            f"{each.difference:+.3g}",
            interval,
            "-" if each.p_value is None else f"{each.p_value:.2g}",
            str(each.tasks),
            Text(each.words, style="" if each.decision is Decision.UNDECIDED else "bold"),
        )
    return table
