"""`deltarunner list`: the environments that are installed."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from runner.cli.report import make_console
from runner.environment.loading import bundled_environments

__all__ = ["list_command"]


def list_command() -> int:
    table = Table.grid(padding=(0, 2))
    for bundled in bundled_environments():
        description = Text(bundled.description, style="" if bundled.usable else "red")
        if bundled.settings:
            description.append(f"\n{bundled.settings}", "dim")
        table.add_row(Text(bundled.name, style="bold"), description)
    console = make_console()
    console.print(table)
    console.print("\nYour own environment: deltarunner run path.py:Class", style="dim")
    return 0
