"""Groups: the episodes of one task that a trainer compares, collected as they finish."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from runner.episode.key import MAIN, task_rng
from runner.trajectory import Group, Trajectory

__all__ = ["OpenGroup", "by_agent"]


@dataclass(slots=True)
class OpenGroup:
    """The finished episodes of a group."""

    missing: int
    """The number of the group's episodes that this run plays."""

    played: int = 0
    """The number of these episodes that are finished."""

    trajectories: list[Trajectory] = field(default_factory=list)
    """The trajectories of these episodes; empty if they are not kept."""


def by_agent(trajectories: Iterable[Trajectory], *, seed: int, group_size: int) -> list[Group]:
    """Return the groups of one task's trajectories: one for each trained agent, and one for `main`, trained or not."""
    agents: dict[str, list[Trajectory]] = {}
    episodes: set[int] = set()
    cut_short = False
    for trajectory in trajectories:
        # Count the episodes of all agents, since an agent without a turn has no trajectory.
        episodes.add(trajectory.index)
        cut_short = cut_short or trajectory.outcome.cut_short
        if trajectory.trained or trajectory.agent == MAIN:
            agents.setdefault(trajectory.agent, []).append(trajectory)
    return [
        Group(
            task=members[0].task,
            agent=agent,
            trajectories=sorted(members, key=lambda t: t.index),
            rng=task_rng(seed, members[0].task.id, members[0].visit),
            complete=len(episodes) == group_size and not cut_short,
        )
        for agent, members in agents.items()
    ]
