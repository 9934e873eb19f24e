"""The episodes of a failed test as text for its report."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable
from typing import Final

from rich.console import Console

from runner.engines.base import BaseEngine, Engine
from runner.trajectory import Trajectory
from runner.transcript import transcript

__all__ = ["endings", "transcripts"]

_MAX_LISTED: Final = 3
"""Maximum number of transcripts in a report, and of different ways in which episodes ended."""
_WIDTH: Final = 120
"""Characters per line of the report."""


def transcripts(played: Iterable[tuple[Trajectory, BaseEngine]]) -> str:
    """The transcripts of the last episodes, without the text of the template."""
    out = io.StringIO()
    console = Console(file=out, width=_WIDTH, color_system=None, highlight=False, markup=False)
    shown = list(played)
    if len(shown) > _MAX_LISTED:
        console.print(f"the last {_MAX_LISTED}:")
    for trajectory, engine in shown[-_MAX_LISTED:]:
        decode = engine.tokenizer.decode if isinstance(engine, Engine) else None
        for line in transcript(trajectory, decode, brief=True):
            console.print(line, soft_wrap=True)
    return out.getvalue().rstrip()


def endings(trajectories: Iterable[Trajectory]) -> str:
    """The most frequent ways in which episodes ended, one line each, with the number of episodes."""
    by_episode = {trajectory.id: _ending(trajectory) for trajectory in trajectories}
    lines = []
    for ending, count in Counter(by_episode.values()).most_common(_MAX_LISTED):
        who = next(name for name, other in by_episode.items() if other == ending) if count == 1 else f"{count} episodes"
        lines.append(f"{who} ended {ending}")
    return "\n".join(lines)


def _ending(trajectory: Trajectory) -> str:
    limit = f" ({trajectory.limit})" if trajectory.limit else ""
    return f"{trajectory.outcome.value}{limit}" + (f": {trajectory.error}" if trajectory.error else "")
