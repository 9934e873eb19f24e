"""Results of a benchmark: rounds of one measurement, their limits, and their display."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["Figure", "main", "on_one_core", "show", "shown"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement."""

    name: str
    """The measured quantity."""
    unit: str
    """The unit of the values."""
    values: tuple[float, ...]
    """The values, one for each round."""
    at_least: float | None = None
    """The median should not be below this."""
    under: float | None = None
    """The median should be below this."""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        """True if the median meets its limit; None without a limit."""
        if self.at_least is not None:
            return self.median >= self.at_least
        return None if self.under is None else self.median < self.under

    @property
    def target(self) -> str:
        if self.at_least is not None:
            return f"at least {_number(self.at_least)}"
        return "" if self.under is None else f"under {_number(self.under)}"

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "median": self.median, "met": self.met}


def main(measure: Callable[[], Iterable[Figure]]) -> None:
    """Print the figures of `measure`: as a table, or with `--json` as one object a line."""
    parser = argparse.ArgumentParser(description=measure.__doc__)
    parser.add_argument("--json", action="store_true", help="one object a line instead of a table")
    as_json = parser.parse_args().json
    figures = list(measure())
    if as_json:
        for figure in figures:
            print(json.dumps(figure.as_dict()), flush=True)
    else:
        show(figures)


def show(figures: Sequence[Figure]) -> None:
    """Print a table. If stdout is a file or a pipe, the table is not cut to the width of a terminal."""
    console = Console()
    (console if console.is_terminal else Console(width=140)).print(shown(figures))


def shown(figures: Sequence[Figure]) -> Table:
    """Medians with the lowest and the highest round, and the target next to each."""
    table = Table("", "median", "rounds", "", "target", "", box=None, pad_edge=False)
    for column in (1, 2):
        table.columns[column].justify = "right"
    for figure in figures:
        verdict = {None: "", True: "[green]met[/]", False: "[red]missed[/]"}[figure.met]
        spread = f"{_number(min(figure.values))} - {_number(max(figure.values))}" if len(figure.values) > 1 else ""
        table.add_row(figure.name, _number(figure.median), spread, figure.unit, figure.target, verdict)
    return table


def on_one_core() -> None:
    """Keep this process, its threads included, on one of the cores that it may use."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def _number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
