"""Group rewards: an episode waits for the other episodes of its task, and all are scored together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Any

from runner.concurrency.user_code import AuthorCode, describe_error
from runner.episode.key import MAIN
from runner.episode.shared import RunShared
from runner.logs import logger_for
from runner.runs.groups import OpenGroup, by_agent
from runner.runs.summary import Summary
from runner.scoring import Score, ScorerKind, as_score, weighted_sum
from runner.store.writer import RunWriter
from runner.tasks import Task
from runner.trajectory import Group, Trajectory

__all__ = ["GroupScoring"]

log = logger_for("runs")


class GroupScoring:
    """The scoring of groups: it computes group rewards, and decides when the rewards of an episode are final."""

    def __init__(self, shared: RunShared, writer: RunWriter, summary: Summary, *, group_size: int) -> None:
        self._shared = shared
        self._writer = writer
        self._summary = summary
        self._group_size = group_size
        self._rewards = [scorer.name for scorer in shared.scorers if scorer.kind == ScorerKind.GROUP_REWARD]
        self._open: dict[tuple[str, int], OpenGroup] = {}

    @property
    def has_rewards(self) -> bool:
        """True if the environment has group rewards."""
        return bool(self._rewards)

    def open(self, task: Task, visit: int, missing: int) -> None:
        """Expect `missing` further episodes of a visit of a task."""
        self._open.setdefault((task.id, visit), OpenGroup(0)).missing += missing

    async def finished(self, trajectories: list[Trajectory]) -> tuple[list[list[Trajectory]], int]:
        """Count a committed episode, and score its group if it was the last episode of the group.

        Returns:
            The episodes whose rewards became final, and the number of the group's episodes that this run plays.
        """
        key = trajectories[0].task.id, trajectories[0].visit
        group = self._open[key]
        group.played += 1
        if group.played == group.missing:
            del self._open[key]
        if not self.has_rewards:
            self._summary.add_rewards(trajectories)
            return [trajectories], group.missing
        # Trajectories are kept only if they are compared, so that memory is limited to the groups in flight.
        group.trajectories.extend(trajectories)
        if group.played < group.missing:
            return [], group.missing
        await self._score_played(group.trajectories)
        return list(_by_episode(group.trajectories)), group.missing

    def unfinished(self) -> Iterator[tuple[int, list[Trajectory]]]:
        """The episodes of incomplete groups, each with the number of the group's episodes that this run plays."""
        for group in self._open.values():
            for _, episode in groupby(group.trajectories, key=attrgetter("index")):
                yield group.missing, list(episode)

    async def groups_of(self, trajectories: list[Trajectory]) -> list[Group]:
        """The groups of a task, as `by_agent` makes them, with the episodes that earlier runs of the file stored."""
        members = trajectories
        if self._writer.resumed:
            first = trajectories[0]
            new = {(member.index, member.agent) for member in trajectories}
            stored = await self._writer.stored_group(first.task.id, first.visit)
            members = [*trajectories, *(t for t in stored if (t.index, t.agent) not in new)]
        return self._by_agent(members)

    def _by_agent(self, members: Iterable[Trajectory]) -> list[Group]:
        return by_agent(members, seed=self._shared.seed, group_size=self._group_size)

    async def score_stored(self, task: Task, visit: int) -> None:
        """Score a stored group. It has no group rewards, since the last run ended before they were committed."""
        await self._score(self._by_agent(await self._writer.stored_group(task.id, visit)))

    async def _score_played(self, new: list[Trajectory]) -> None:
        groups = await self.groups_of(new)
        # The next run of the file repeats the episodes that were cut short, and then compares the whole group.
        waits = any(member.outcome.cut_short for group in groups for member in group.trajectories)
        if self._writer.path is None or not waits:
            await self._score(groups, new)

    async def _score(self, groups: list[Group], new: Collection[Trajectory] = ()) -> None:
        """Compute and commit the group rewards, and count the episodes whose rewards became final."""
        members = [trajectory for group in groups for trajectory in group.trajectories]
        # This list is made before the rewards are set, since afterwards all rewards are final. An earlier run may have
        # counted some episodes.
        counted = [each for each in _by_episode(members) if each[0] in new or not self.is_final(each)]
        await _give_rewards(self._shared, groups, self._add_fault)
        await self._writer.commit_group_rewards(members)
        for trajectories in counted:
            self._summary.add_rewards(trajectories)

    def _add_fault(self, fault: str) -> None:
        log.warning("%s", fault)
        self._summary.faults.append(fault)

    def is_final(self, trajectories: Sequence[Trajectory]) -> bool:
        """True if the rewards of this episode no longer wait for its group."""
        first = trajectories[0]
        if (first.task.id, first.visit) in self._writer.reopened and self.has_rewards:
            # Another member is repeated, which invalidates the stored group rewards.
            return not any(t.outcome.scored and t.turns for t in trajectories)
        names = [each.name for each in self._shared.part_of(first.task).scorers if each.name in self._rewards]
        waiting = (t for t in trajectories if t.outcome.scored and t.turns and (t.trained or t.agent == MAIN))
        return not names or all(any(name in each.rewards for name in names) for each in waiting)


async def _give_rewards(shared: RunShared, groups: Sequence[Group], fault: Callable[[str], None]) -> None:
    """Set the group rewards and the new weighted sum of every scored trajectory with turns, in place.

    The author's method gets only these trajectories. If the method raises an error, its reward is None for all of them,
    and `fault` receives a message.
    """
    author = AuthorCode(shared.workers)
    for group in map(_scored, groups):
        if not group.trajectories:
            continue
        part = shared.part_of(group.task)
        scorers = [scorer for scorer in part.scorers if scorer.kind == ScorerKind.GROUP_REWARD]
        for scorer in scorers:
            method = getattr(part.environment, scorer.method)
            name = f"group_reward {scorer.name}()"
            try:
                values = await author.call(method, group, name=name, seconds=part.limits.reward_seconds)
                scores = _one_each(values, group, scorer.name)
            except Exception as error:
                fault(f"{name} of task {group.task.id!r}: {describe_error(error)}")
                scores = [None] * len(group.trajectories)
            for trajectory, score in zip(group.trajectories, scores, strict=True):
                trajectory.rewards[scorer.name] = score
                trajectory.reward = weighted_sum(trajectory.rewards, part.scorers)


def _scored(group: Group) -> Group:
    return replace(group, trajectories=[t for t in group.trajectories if t.outcome.scored and t.turns])


def _one_each(values: Any, group: Group, name: str) -> list[Score]:
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"got {values!r:.80}: return one number per trajectory")
    scores = [as_score(value, name) for value in values]
    if len(scores) != len(group.trajectories):
        raise ValueError(f"{len(scores)} numbers for {len(group.trajectories)} trajectories: return one for each")
    return scores


def _by_episode(trajectories: Iterable[Trajectory]) -> Iterator[list[Trajectory]]:
    """The trajectories of one task, grouped by episode and ordered by index."""
    by_index = attrgetter("index")
    for _, agents in groupby(sorted(trajectories, key=by_index), key=by_index):
        yield list(agents)
