"""`deltarunner check-weights`: update each kind of tensor of an engine separately, and check the result."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import anyio
from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.cli.name_values import parse_values
from runner.cli.quiet_output import quiet_output
from runner.cli.report import make_console
from runner.errors import BadOption
from runner.logs import log_to_file
from runner.training.weight_check import CheckedTensor, TensorVerdict, Way, WeightReport, check_weights_async

__all__ = ["WRONG_WEIGHTS_CODE", "check_weights_command"]

WRONG_WEIGHTS_CODE = 7
"""Exit code if a row of the report is wrong, no row is right, or the check ended early."""
LOG = Path("runs/check-weights.log")
_STYLES = {
    TensorVerdict.RIGHT: "green",
    TensorVerdict.WRONG: "bold red",
    TensorVerdict.UNSEEN: "yellow",
    TensorVerdict.REFUSED: "yellow",
}


def check_weights_command(
    model: str, *, tiny: bool, ways: Sequence[str], options: Sequence[str], as_json: bool, log_level: str | None = None
) -> int:
    """Check the weights of a model, and print a row for each kind of tensor and way of updating.

    Returns:
        `WRONG_WEIGHTS_CODE` if a row is wrong, no row is right, or the check ended early; else 0.

    Raises:
        BadOption: one of `ways` or `options`, or `log_level`, is invalid.
    """
    wrong = [way for way in ways if way not in list(Way)]
    if wrong:
        raise BadOption(f"--way {wrong[0]}: give one of {', '.join(Way)}.")
    arguments = parse_values(options, "--engine-option")
    with log_to_file(LOG, log_level), quiet_output(LOG) as terminal:
        terminal.stderr.write(f"log   {LOG} (what vLLM and transformers print)\nstarting the engine\n")

        def show_progress(row: CheckedTensor) -> None:
            terminal.stderr.write(f"{row.way:12}  {row.verdict:8}  {row.tensor}\n")

        chosen = tuple(Way(way) for way in ways) or tuple(Way)
        check = partial(check_weights_async, model, tiny=tiny, ways=chosen, on_row=show_progress, **arguments)
        report = anyio.run(check)
        if as_json:
            terminal.stdout.write(json.dumps(report.as_dict()) + "\n")
        else:
            show(report, make_console(terminal.stdout))
        if not report.right and not report.wrong:
            terminal.stderr.write("No row is right, so nothing is proven about new weights of this engine.\n")
    return 0 if report.right and not report.wrong and not report.failure else WRONG_WEIGHTS_CODE


def show(report: WeightReport, console: Console) -> None:
    """Print a report: a row for each kind of tensor and way, and the number of rows with each verdict in one line."""
    table = Table("way", "tensor", "verdict", "median", "largest", "why", box=None, pad_edge=False)
    for row in report.rows:
        figures = ["" if value is None else f"{value:.2g}" for value in (row.median, row.largest)]
        table.add_row(row.way, row.tensor, Text(row.verdict, style=_STYLES[row.verdict]), *figures, row.reason)
    console.print(table)
    counts = Counter(row.verdict for row in report.rows)
    counted = ", ".join(f"{counts[verdict]} {verdict}" for verdict in TensorVerdict if counts[verdict])
    console.print(f"\n{report.model} in {report.dtype}: {counted}; with its first weights {report.baseline}")
    if report.note:
        console.print(Text(f"note: {report.note}", style="yellow"))
    if report.failure:
        console.print(Text(f"ended early: {report.failure}", style="bold red"))
