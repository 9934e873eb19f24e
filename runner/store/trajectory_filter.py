"""Filters of the trajectories of a run file, for reading and export."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from runner.checked import is_number
from runner.errors import BadOption
from runner.store.columns import encode_text
from runner.trajectory import Outcome

__all__ = ["ALL", "TrajectoryFilter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryFilter:
    """A filter of trained trajectories; all conditions must hold.

    Raises:
        BadOption: an outcome does not exist, or a number is out of range.
    """

    outcomes: Collection[str] = ()
    """The accepted outcomes; empty for any."""
    agents: Collection[str] = ()
    """The accepted agents; empty for all."""
    tasks: Collection[str] = ()
    """The accepted task ids; empty for all."""
    min_reward: float | None = None
    """The smallest accepted reward. It excludes trajectories without a reward; None accepts all trajectories."""
    most: int | None = None
    """Maximum number of trajectories; the first ones in commit order are selected. None for all."""

    def __post_init__(self) -> None:
        known = [outcome.value for outcome in Outcome]
        for outcome in self.outcomes:
            if outcome not in known:
                raise BadOption(f"outcome {str(outcome)!r}: it does not exist; outcomes are {', '.join(known)}.")
        if self.min_reward is not None and not (is_number(self.min_reward) and math.isfinite(self.min_reward)):
            raise BadOption(f"min_reward={self.min_reward!r}: give a finite number.")
        if self.most is not None and self.most < 1:
            raise BadOption(f"most={self.most!r}: give a number of at least 1.")

    def condition(self) -> tuple[str, dict[str, Any]]:
        """The condition in SQL, which begins with " AND" or is "", and the values of its named parameters."""
        parts: list[str] = []
        values: dict[str, Any] = {}
        wanted = {"outcome": self.outcomes, "agent": self.agents, "task_id": self.tasks}
        for column, choices in wanted.items():
            if choices:
                names = [f"{column}_{number}" for number in range(len(choices))]
                values |= dict(zip(names, map(encode_text, map(str, choices)), strict=True))
                parts.append(f" AND {column} IN ({', '.join(f':{name}' for name in names)})")
        if self.min_reward is not None:
            parts.append(" AND reward >= :min_reward")
            values["min_reward"] = float(self.min_reward)
        return "".join(parts), values


ALL: Final = TrajectoryFilter()
"""The filter that accepts every trained trajectory."""
