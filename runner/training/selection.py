"""Which trajectories are trained on: of complete groups, or of explicitly partial ones; failed episodes are absent."""

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

__all__ = ["NO_REWARD", "NO_TURN", "UNTRAINED", "ComparedGroup", "GroupsOrTrajectories", "Selection", "grouped"]

GroupsOrTrajectories: TypeAlias = Iterable[Group | Trajectory]
"""What a batch is made of. A trajectory given by itself is compared with no other: it is a group of its own."""

NO_TURN: Final = "no_turn"
"""Why a trajectory is absent: it was scored, and its agent never spoke."""

NO_REWARD: Final = "no_reward"
"""Why a trajectory is absent: it was scored, and one of its rewards is None."""

UNTRAINED: Final = "untrained"
"""Why a trajectory is absent: its agent is not trained."""


@dataclass(frozen=True, slots=True)
class ComparedGroup:
    """A group that was given."""

    task: Task
    """The task that was played."""
    agent: str
    """The agent that played it."""
    scored: int
    """The number of its trajectories that have a reward."""
    complete: bool = True
    """Whether every episode of it has been played."""
    flat: bool = False
    """Whether comparing its rewards teaches nothing, since all are equal or there is only one."""


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """What is trained on, before it is laid out."""

    trajectories: tuple[Trajectory, ...]
    """The trajectories that have a reward, in the order they were given."""
    rewards: NDArray[np.float32]
    """The reward of each trajectory, shape [trajectories], float32."""
    group_of: NDArray[np.int32]
    """The index of each trajectory's group in `groups`, shape [trajectories], int32."""
    groups: tuple[ComparedGroup, ...]
    """Every group that was given, also one whose trajectories are all absent or left out."""
    absent: Mapping[str, int]
    """How many trajectories have no reward, by outcome, or by "no_turn", "no_reward" or "untrained"."""
    rows: tuple[TrainingRow, ...]
    """Every segment in which something is trained, trajectory by trajectory.

    A trajectory that was scored and of which no id is trained has none; it is compared like the others.
    """
    trajectory_of: NDArray[np.int32]
    """The index of each row's trajectory in `trajectories`, shape [rows], int32."""
    versions: tuple[str, ...]
    """The weight versions that the rows' `versions` are indices into."""

    @classmethod
    def of(
        cls,
        source: GroupsOrTrajectories,
        *,
        partial: bool = False,
        drop_flat: bool = False,
        vocabulary: int | None = None,
    ) -> Selection:
        """Choose from groups and trajectories.

        Args:
            source: groups, trajectories, or both.
            partial: take groups of which not every episode has been played.
            drop_flat: leave out the trajectories of groups without spread.
            vocabulary: how many ids the model knows (`model.config.vocab_size`); every id is compared with it.

        Raises:
            BadBatch: nothing was given, or what is no group; a group is not complete; a trajectory was given twice; a
                reward is not finite; an id is not in the vocabulary; all of it was said by engines of messages.
        """
        items = _items(source, partial=partial, drop_flat=drop_flat)
        scored, absent = _present(items)
        if not scored:
            _refuse_messages(items)
        rewards = _rewards([trajectory for trajectory, _ in scored])
        group_of = np.array([group for _, group in scored], dtype=np.int32)
        # Before anything is left out: `groups` tells of the flat ones too.
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
    """Trajectories of one run, such as a run file gives, put together by task, visit and agent.

    Args:
        trajectories: the last attempts, in any order.
        group_size: episodes of each task; a group with fewer is not complete. A file has it in `header.group_size`.
        seed: the seed of the run; the groups' own random numbers follow from it.
    """
    tasks: dict[tuple[str, int], list[Trajectory]] = {}
    for trajectory in trajectories:
        tasks.setdefault((trajectory.task.id, trajectory.visit), []).append(trajectory)
    return [group for task in tasks.values() for group in by_agent(task, seed=seed, group_size=group_size)]


def name_of(trajectory: Trajectory) -> str:
    """The name that messages give a trajectory."""
    return f"episode {trajectory.id!r} of agent {trajectory.agent!r}"


def _items(source: GroupsOrTrajectories, *, partial: bool, drop_flat: bool) -> Sequence[Group | Trajectory]:
    """What was given, each of it fit to be compared."""
    if not isinstance(source, Iterable):
        raise BadBatch(
            f"{type(source).__name__} cannot be made a batch of: give a list of groups, such as "
            "[group async for group in run.groups()], or of trajectories."
        )
    items = list(source)
    if not items:
        raise BadBatch("no groups were given: an iterator that has been read before gives nothing a second time.")
    for item in items:
        if not isinstance(item, Group | Trajectory):
            raise BadBatch(f"{item!r:.60} is neither a group nor a trajectory.")
        if isinstance(item, Group) and not item.complete and not partial:
            scored = sum(not _absence(trajectory) for trajectory in item.trajectories)
            raise BadBatch(
                f"the group of task {item.task.id!r}, agent {item.agent!r}, is not complete: it has "
                f"{scored} scored episodes, and others were not played to their end. Leave it out, or "
                "give partial=True to compare what there is."
            )
        if isinstance(item, Trajectory) and drop_flat:
            raise BadBatch(
                f"drop_flat=True: {name_of(item)} was given by itself, so there is no group to have spread. Give "
                "groups: run.groups(), or grouped(trajectories, group_size=8)."
            )
    return items


def _present(items: Sequence[Group | Trajectory]) -> tuple[list[tuple[Trajectory, int]], Mapping[str, int]]:
    """The trajectories that have a reward, each with its item's index; and how many have none, by why."""
    scored: list[tuple[Trajectory, int]] = []
    absent: Counter[str] = Counter()
    seen: set[Trajectory] = set()
    for index, item in enumerate(items):
        for trajectory in (item,) if isinstance(item, Trajectory) else item.trajectories:
            if trajectory in seen:
                raise BadBatch(f"{name_of(trajectory)} was given twice: it would count twice.")
            seen.add(trajectory)
            why = _absence(trajectory)
            if why:
                absent[why] += 1
            else:
                scored.append((trajectory, index))
    return scored, dict(absent)


def _refuse_messages(items: Sequence[Group | Trajectory]) -> None:
    """Refuse what holds nothing but what servers of messages said: there is no id in it to train on."""
    given = [each for item in items for each in ((item,) if isinstance(item, Trajectory) else item.trajectories)]
    spoke = [each for each in given if each.turns]
    if spoke and not any(turn.has_ids for each in spoke for turn in each.turns):
        raise BadBatch(
            f"{name_of(spoke[0])} was played on an engine of messages, as all that was given: it has no token ids, and "
            "nothing of it can be trained on. Play on a VllmEngine or a RemoteEngine."
        )


def _absence(trajectory: Trajectory) -> str:
    """Why a trajectory is absent; "" if it is not."""
    if not trajectory.trained:
        return UNTRAINED
    if not trajectory.outcome.scored:
        return trajectory.outcome.value
    if not trajectory.turns:
        return NO_TURN
    return NO_REWARD if trajectory.reward is None else ""


def _rewards(trajectories: Sequence[Trajectory]) -> NDArray[np.float32]:
    # A reward too large for float32 becomes infinite without a warning, and is refused by its name below.
    with np.errstate(over="ignore"):
        rewards = np.array([trajectory.reward for trajectory in trajectories], dtype=np.float64).astype(np.float32)
    for index in np.flatnonzero(~np.isfinite(rewards)):
        trajectory = trajectories[index]
        raise BadBatch(f"{name_of(trajectory)} has the reward {trajectory.reward}: a batch holds finite float32s.")
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
                f"none of the {vocabulary} ids of this vocabulary: it was played with another tokenizer."
            )
