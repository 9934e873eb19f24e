"""Selection of trajectories for training: complete groups, or explicitly partial ones, without failed episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from runner.checked import is_whole
from runner.errors import BadBatch, BadOption
from runner.runs.groups import by_agent
from runner.tasks import Task
from runner.training.advantages import without_spread
from runner.training.rows import TrainingRow, rows_of, version_table
from runner.trajectory import Group, Trajectory

__all__ = [
    "NO_LOGPROBS",
    "NO_REWARD",
    "NO_TURN",
    "UNTRAINED",
    "ComparedGroup",
    "GroupsOrTrajectories",
    "Selection",
    "absence",
    "grouped",
    "lacks_logprobs",
    "name_of",
    "refusal",
]

GroupsOrTrajectories: TypeAlias = Iterable[Group | Trajectory]
"""Source of a batch. A single trajectory is its own group and is not compared."""

NO_TURN: Final = "no_turn"
"""Reason for an absent trajectory: it was scored, but its agent had no turn."""

NO_LOGPROBS: Final = "no_logprobs"
"""Reason for a refused trajectory: an id that would be trained has no finite log-probability."""

NO_REWARD: Final = "no_reward"
"""Reason for an absent trajectory: it was scored, but one of its rewards is missing."""

UNTRAINED: Final = "untrained"
"""Reason for an absent trajectory: its agent is not trained."""


@dataclass(frozen=True, slots=True)
class ComparedGroup:
    """A group of a source, or a single trajectory of it."""

    task: Task
    """Task of the group."""
    agent: str
    """Agent of the group."""
    scored: int
    """Number of the group's trajectories with a reward."""
    complete: bool = True
    """True if all episodes of the group are finished."""
    flat: bool = False
    """True if the group's rewards are all equal, or there is at most one, so that the group has no gradient."""


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Selected training data, before its layout."""

    trajectories: tuple[Trajectory, ...]
    """Trajectories with a reward, in the given order."""
    rewards: NDArray[np.float32]
    """Reward of each trajectory, shape [trajectories], float32."""
    group_of: NDArray[np.int32]
    """Index of each trajectory's group in `groups`, shape [trajectories], int32."""
    groups: tuple[ComparedGroup, ...]
    """All given groups, including groups whose trajectories are all absent or left out."""
    absent: Mapping[str, int]
    """Number of absent trajectories by reason: an outcome, "no_turn", "no_reward" or "untrained"."""
    rows: tuple[TrainingRow, ...]
    """All segments with trained ids, trajectory by trajectory.

    A scored trajectory without trained ids has no rows; its reward is compared like the others.
    """
    trajectory_of: NDArray[np.int32]
    """Index of each row's trajectory in `trajectories`, shape [rows], int32."""
    versions: tuple[str, ...]
    """Weight versions for the indices in the rows' `versions`."""

    @classmethod
    def of(
        cls,
        source: GroupsOrTrajectories,
        *,
        partial: bool = False,
        drop_flat: bool = False,
        vocabulary: int | None = None,
    ) -> Selection:
        """Select the trajectories that can be trained, and their rows.

        Args:
            source: groups, trajectories, or both.
            partial: accept groups with unfinished episodes.
            drop_flat: leave out the trajectories of groups with equal rewards.
            vocabulary: number of ids of the model (`model.config.vocab_size`); every id is checked against it.

        Raises:
            BadBatch: the source is empty, or has an item that is neither a group nor a trajectory; a group is
                incomplete; a trajectory occurs twice, or is single with `drop_flat`; a reward is not finite; an id is
                not in the vocabulary; all turns are of message engines.
            BadOption: `vocabulary` is not a number of at least 1.
        """
        items = _items(source, partial=partial, drop_flat=drop_flat)
        scored, absent = _present(items)
        if not scored:
            _refuse_messages(items)
        rewards = _rewards([trajectory for trajectory, _ in scored])
        group_of = np.array([group for _, group in scored], dtype=np.int32)
        # Computed before groups are left out, since `groups` contains flat ones too.
        flat = without_spread(rewards, group_of)
        groups = tuple(_compared(item, group_of == index, flat) for index, item in enumerate(items))
        if drop_flat:
            scored = [each for each, dropped in zip(scored, flat, strict=True) if not dropped]
            rewards, group_of = rewards[~flat], group_of[~flat]
        trajectories = tuple(trajectory for trajectory, _ in scored)
        rows, trajectory_of, versions = _rows(trajectories)
        if vocabulary is not None:
            _check_vocabulary(rows, vocabulary)
        return cls(trajectories, rewards, group_of, groups, absent, rows, trajectory_of, versions)


def grouped(trajectories: Iterable[Trajectory], *, group_size: int, seed: int = 0) -> list[Group]:
    """Group the trajectories of one run, such as those of a run file, by task, visit and agent.

    Args:
        trajectories: the trajectories of the last attempt of each episode, in any order.
        group_size: episodes per task; a group with fewer is incomplete. A run file has it in `header.group_size`.
        seed: seed of the run, for the random numbers of the groups.
    """
    tasks: dict[tuple[str, int], list[Trajectory]] = {}
    for trajectory in trajectories:
        tasks.setdefault((trajectory.task.id, trajectory.visit), []).append(trajectory)
    return [group for task in tasks.values() for group in by_agent(task, seed=seed, group_size=group_size)]


def name_of(trajectory: Trajectory) -> str:
    return f"episode {trajectory.id!r} of agent {trajectory.agent!r}"


def _items(source: GroupsOrTrajectories, *, partial: bool, drop_flat: bool) -> Sequence[Group | Trajectory]:
    """Return the items of a source as a list, after a check of each."""
    if not isinstance(source, Iterable):
        raise BadBatch(
            f"a batch cannot be made from {type(source).__name__}: give a list of groups, such as "
            "[group async for group in run.groups()], or of trajectories."
        )
    items = list(source)
    if not items:
        raise BadBatch("no groups or trajectories were given. An iterator is empty after it was read: give a list.")
    for item in items:
        if not isinstance(item, Group | Trajectory):
            raise BadBatch(f"{item!r:.60} is neither a group nor a trajectory: give groups or trajectories.")
        if isinstance(item, Group) and not item.complete and not partial:
            scored = sum(not absence(trajectory) for trajectory in item.trajectories)
            raise BadBatch(
                f"the group of task {item.task.id!r}, agent {item.agent!r}, is not complete: it has "
                f"{scored} scored episodes, and others were not played to their end. Leave it out, or "
                "give partial=True to compare only the finished episodes."
            )
        if isinstance(item, Trajectory) and drop_flat:
            raise BadBatch(
                f"drop_flat=True: {name_of(item)} was given without its group. Give "
                "groups: run.groups(), or grouped(trajectories, group_size=8)."
            )
    return items


def _present(items: Sequence[Group | Trajectory]) -> tuple[list[tuple[Trajectory, int]], Mapping[str, int]]:
    """Return (trajectory, index of its item) for each trajectory with a reward, and the number of others by reason."""
    scored: list[tuple[Trajectory, int]] = []
    absent: Counter[str] = Counter()
    seen: set[Trajectory] = set()
    for index, item in enumerate(items):
        for trajectory in (item,) if isinstance(item, Trajectory) else item.trajectories:
            if trajectory in seen:
                raise BadBatch(f"{name_of(trajectory)} was given twice: give each trajectory once.")
            seen.add(trajectory)
            why = absence(trajectory)
            if why:
                absent[why] += 1
            else:
                scored.append((trajectory, index))
    return scored, dict(absent)


def _refuse_messages(items: Sequence[Group | Trajectory]) -> None:
    """Raise BadBatch if all turns of a source are of message engines, since these turns have no ids."""
    given = [each for item in items for each in ((item,) if isinstance(item, Trajectory) else item.trajectories)]
    spoke = [each for each in given if each.turns]
    if spoke and not any(turn.has_ids for each in spoke for turn in each.turns):
        raise BadBatch(
            f"{name_of(spoke[0])} was run on a message engine, like all others: it has no token ids, so "
            "it cannot be trained on. Run on a VllmEngine or a RemoteEngine."
        )


def absence(trajectory: Trajectory) -> str:
    """Return the reason why a trajectory is absent; "" if it is present."""
    if not trajectory.trained:
        return UNTRAINED
    if not trajectory.outcome.scored:
        return trajectory.outcome.value
    if not trajectory.turns:
        return NO_TURN
    return NO_REWARD if trajectory.reward is None else ""


def refusal(trajectory: Trajectory) -> str:
    """Return the reason to withhold a trajectory from other libraries: `absence` or "no_logprobs"; "" without a reason.

    A `TrainingBatch` keeps ids without a log-probability, and names them in its `inexact_reason`. Other libraries
    would compute with the NaN in its place.
    """
    return absence(trajectory) or (NO_LOGPROBS if lacks_logprobs(trajectory) else "")


def lacks_logprobs(trajectory: Trajectory) -> bool:
    """Return True if a sampled id that is trained has no finite log-probability."""
    logs = [segment.log for segment in trajectory.segments]
    masks = (np.frombuffer(log.mask(), np.int8).astype(np.bool_) for log in logs)
    return any(
        bool((trained & ~np.isfinite(np.array(log.logprobs, np.float32))).any())
        for log, trained in zip(logs, masks, strict=True)
    )


def _rewards(trajectories: Sequence[Trajectory]) -> NDArray[np.float32]:
    # A reward that is too large for float32 becomes infinite without a warning, and is refused below.
    with np.errstate(over="ignore"):
        rewards = np.array([trajectory.reward for trajectory in trajectories], dtype=np.float64).astype(np.float32)
    for index in np.flatnonzero(~np.isfinite(rewards)):
        trajectory = trajectories[index]
        raise BadBatch(
            f"{name_of(trajectory)} has the reward {trajectory.reward}, which is not a finite float32: correct the "
            "reward, or leave the trajectory out."
        )
    return rewards


def _compared(item: Group | Trajectory, own: NDArray[np.bool_], flat: NDArray[np.bool_]) -> ComparedGroup:
    compared = ComparedGroup(item.task, item.agent, int(own.sum()), flat=bool(flat[own].all()))
    return replace(compared, complete=item.complete) if isinstance(item, Group) else compared


def _rows(
    trajectories: Sequence[Trajectory],
) -> tuple[tuple[TrainingRow, ...], NDArray[np.int32], tuple[str, ...]]:
    table = version_table(trajectories)
    rows = [(row, index) for index, each in enumerate(trajectories) for row in rows_of(each, table)]
    trajectory_of = np.array([index for _, index in rows], dtype=np.int32)
    return tuple(row for row, _ in rows), trajectory_of, tuple(table)


def _check_vocabulary(rows: Sequence[TrainingRow], vocabulary: int) -> None:
    if not is_whole(vocabulary, least=1):
        raise BadOption(f"vocabulary={vocabulary!r:.60}: give the number of ids, such as model.config.vocab_size.")
    for row in rows:
        if row.ids.min() < 0 or row.ids.max() >= vocabulary:
            position = int(np.flatnonzero((row.ids < 0) | (row.ids >= vocabulary))[0])
            raise BadBatch(
                f"{name_of(row.trajectory)}, segment {row.segment}, position {position}: id {row.ids[position]} is "
                f"not one of the {vocabulary} ids of this vocabulary. Give vocabulary= of the model that sampled it, "
                "or leave this trajectory out."
            )
