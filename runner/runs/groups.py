"""Groups: the episodes of one task that a trainer compares, and the rewards that need all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from runner.concurrency.user_code import AuthorCode, describe_error
from runner.episode.context import RunContext
from runner.episode.key import task_rng
from runner.scoring import Score, ScorerKind, as_score, weighted_sum
from runner.tasks import Task
from runner.trajectory import Group, Trajectory

__all__ = ["GroupBook", "Result", "WaitingGroups", "by_agent", "score_group"]


class GroupBook:
    """The groups that are being played: their committed trajectories, until the last one is in.

    Memory follows the groups in flight.
    """

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._open: dict[tuple[str, int], _OpenGroup] = {}

    def open(self, task: Task, visit: int, missing: int) -> None:
        """A group of which `missing` episodes are to be played."""
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
    """A trajectory on its way to the reader.

    Attributes:
        trajectory: committed, and scored as far as it ever is.
        last: it is the last of its episode's agents.
        missing: how many episodes of its group this run plays.
    """

    trajectory: Trajectory
    last: bool
    missing: int


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
        """What there is of the others."""
        for group in self._open.values():
            yield group.trajectories


def by_agent(trajectories: Iterable[Trajectory], *, seed: int, group_size: int) -> list[Group]:
    """The groups that these trajectories of one task make, one for each trained agent."""
    agents: dict[str, list[Trajectory]] = {}
    episodes: set[int] = set()
    cut_short = False
    for trajectory in trajectories:
        # Of an agent that never spoke in an episode there is no trajectory.
        episodes.add(trajectory.index)
        cut_short = cut_short or trajectory.outcome.cut_short
        if trajectory.trained or trajectory.agent == "main":
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


async def score_group(context: RunContext, groups: Sequence[Group], fault: Callable[[str], None]) -> None:
    """Give every scored trajectory its group rewards and its new sum, in place.

    The author's method gets these only: a failed one has nothing to compare. A group reward that raises leaves the
    reward None; that is a fault of the environment, told to `fault`.
    """
    scorers = [scorer for scorer in context.scorers if scorer.kind == ScorerKind.GROUP_REWARD]
    author = AuthorCode(context.workers)
    for group in filter(_any, map(_scored, groups)):
        for scorer in scorers:
            method = getattr(context.environment, scorer.name)
            name = f"group_reward {scorer.name}()"
            try:
                values = await author.call(method, group, name=name, seconds=context.limits.reward_seconds)
                scores = _one_each(values, group, scorer.name)
            except Exception as error:
                fault(f"{name} of task {group.task.id!r}: {describe_error(error)}")
                scores = [None] * len(group.trajectories)
            for trajectory, score in zip(group.trajectories, scores, strict=True):
                trajectory.rewards[scorer.name] = score
                trajectory.reward = weighted_sum(trajectory.rewards, context.scorers)


def _scored(group: Group) -> Group:
    return replace(group, trajectories=[t for t in group.trajectories if t.outcome.scored and t.turns])


def _any(group: Group) -> bool:
    return len(group.trajectories) > 0


def _one_each(values: Any, group: Group, name: str) -> list[Score]:
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"return one number per trajectory, got {values!r:.80}")
    scores = [as_score(value, name) for value in values]
    if len(scores) != len(group.trajectories):
        raise ValueError(f"{len(scores)} numbers for {len(group.trajectories)} trajectories")
    return scores
