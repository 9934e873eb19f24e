"""What a failing test played, as text for its report."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Final

from rich.console import Console

from runner.engines.base import Engine
from runner.trajectory import Trajectory
from runner.transcript import transcript

__all__ = ["episodes"]

_MOST: Final = 3
_WIDTH: Final = 120


def episodes(played: Iterable[tuple[Trajectory, Engine]]) -> str:
    """The transcripts of the last episodes, without what the template wrote."""
    out = io.StringIO()
    console = Console(file=out, width=_WIDTH, color_system=None, highlight=False, markup=False)
    shown = list(played)
    if len(shown) > _MOST:
        console.print(f"the last {_MOST}:")
    for trajectory, engine in shown[-_MOST:]:
        for line in transcript(trajectory, engine.tokenizer.decode, brief=True):
            console.print(line, soft_wrap=True)
    return out.getvalue().rstrip()
