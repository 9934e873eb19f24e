"""`deltarunner list`: the environments that are installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from rich.table import Table
from rich.text import Text

from runner.cli.report import make_console
from runner.environment.loading import bundled_environments

__all__ = ["EXTRAS", "list_command"]

EXTRAS: Final = {
    "datasets": ("datasets", "data sets of Hugging Face: --tasks hf:NAME[SPLIT]"),
    "math": ("math_verify", "equality of mathematical expressions: --score math"),
    "gymnasium": ("gymnasium", "games of Gymnasium: deltarunner run gymnasium --set game=FrozenLake-v1"),
    "mcp": ("mcp", "tools of MCP servers: deltarunner run mcp"),
    "textarena": ("textarena", "games of TextArena: deltarunner run textarena --set game=TicTacToe-v0"),
    "tau2": ("tau2", "tau2-bench: customer service with a simulated user: deltarunner run tau2"),
    "verifiers": ("verifiers", "task sets of verifiers: deltarunner run verifiers --set taskset=NAME"),
    "bfcl": ("bfcl_eval", "multi-turn function calls of BFCL, after pip install --no-deps bfcl-eval"),
    "openenv": ("websockets", "environments on OpenEnv servers: deltarunner run openenv --set url=URL"),
    "reasoning": ("reasoning_gym", "the puzzles of reasoning-gym: deltarunner run reasoning"),
}
"""The extras that add environments, tasks or scorers: the module of each, and what it adds."""


def list_command() -> int:
    table = Table.grid(padding=(0, 2))
    for bundled in bundled_environments():
        description = Text(bundled.description, style="" if bundled.usable else "red")
        if bundled.settings:
            description.append(f"\n{bundled.settings}", "dim")
        if bundled.missing:
            description.append(f"\nneeds {bundled.missing}", "yellow")
        table.add_row(Text(bundled.name, style="bold"), description)
    console = make_console()
    console.print(table)
    missing = [(extra, what) for extra, (module, what) in EXTRAS.items() if find_spec(module) is None]
    if missing:
        console.print("\nNot installed:")
        extras = Table.grid(padding=(0, 2))
        for extra, what in missing:
            extras.add_row(Text(f"pip install 'deltarunner[{extra}]'", style="bold"), Text(what))
        console.print(extras)
    console.print("\nYour own environment: deltarunner run path.py:Class", style="dim")
    return 0
