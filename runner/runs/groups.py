"""Groups: the episodes of one task that a trainer compares, put together as they finish."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from runner.episode.key import MAIN, task_rng
from runner.tasks import Task
from runner.trajectory import Group, Trajectory

__all__ = ["PendingGroups", "Result", "WaitingGroups", "by_agent"]


class PendingGroups:
    """The groups that are being played: their committed trajectories, until the last one is in.

    Memory follows the groups in flight.

    Args:
        keep: keep the trajectories; without it, groups are only counted.
    """

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._open: dict[tuple[str, int], _OpenGroup] = {}

    def open(self, task: Task, visit: int, missing: int) -> None:
        """Begin a group of which `missing` episodes are to be played."""
        self._open[task.id, visit] = _OpenGroup(missing)

    def finished(self, trajectories: Sequence[Trajectory]) -> tuple[int, list[Trajectory] | None]:
        """Note an episode.

        Returns:
            How many episodes of the group were to be played; with the last one also the group's trajectories, as far
            as they are kept, else None.
        """
        key = trajectories[0].task.id, trajectories[0].visit
        group = self._open[key]
        group.played += 1
        if self._keep:
            group.trajectories.extend(trajectories)
        if group.played < group.missing:
            return group.missing, None
        return group.missing, self._open.pop(key).trajectories

    def unfinished(self) -> Iterator[tuple[int, list[Trajectory]]]:
        """What is kept of groups whose last episode never came."""
        for group in self._open.values():
            for _, episode in groupby(group.trajectories, key=lambda trajectory: trajectory.index):
                yield group.missing, list(episode)


@dataclass(slots=True)
class _OpenGroup:
    missing: int
    played: int = 0
    trajectories: list[Trajectory] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Result:
    """A trajectory on its way to the reader."""

    trajectory: Trajectory
    """The trajectory is committed, and scored as far as it ever is."""

    last: bool
    """Whether no further agent of the same episode follows."""

    missing: int
    """How many episodes of its group this run plays."""


class WaitingGroups:
    """Results on the reader's side, put together by task."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], _OpenGroup] = {}

    def add(self, result: Result) -> list[Trajectory]:
        """The trajectories of the task if this was the last one of them, else nothing."""
        key = result.trajectory.task.id, result.trajectory.visit
        group = self._open.setdefault(key, _OpenGroup(result.missing))
        group.trajectories.append(result.trajectory)
        group.played += result.last
        return self._open.pop(key).trajectories if group.played == group.missing else []

    def rest(self) -> Iterator[list[Trajectory]]:
        """The trajectories of each group that is not whole."""
        for group in self._open.values():
            yield group.trajectories


def by_agent(trajectories: Iterable[Trajectory], *, seed: int, group_size: int) -> list[Group]:
    """The groups that these trajectories of one task make, one for each trained agent."""
    agents: dict[str, list[Trajectory]] = {}
    episodes: set[int] = set()
    cut_short = False
    for trajectory in trajectories:
        # Every agent's episodes count: of one that never spoke in an episode there is no trajectory.
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
