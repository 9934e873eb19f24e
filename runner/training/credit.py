"""Credit for turns: returns, comparison of turns with the same number, GAE over turns, and credit divided among rows.

Functions return one value for each position, shape [sequences, length], float32, for `TrainingBatch.with_advantages`; 0
at untrained positions. Given values are numpy arrays or torch tensors, on any device and in any precision; the result
is of the same kind, without a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.errors import BadBatch, BadOption
from runner.training.advantages import AdvantageRule, dr_grpo
from runner.training.array_kinds import as_numpy, like
from runner.training.batch import TrainingBatch
from runner.training.corrections import trajectory_index
from runner.training.selection import name_of
from runner.trajectory import Turn

__all__ = ["by_turn", "gae", "shared_credit", "turn_returns"]


@dataclass(frozen=True, slots=True, eq=False)
class _TrainedTurn:
    turn: Turn
    trajectory: int
    """Index of the turn's trajectory in the batch."""
    number: int
    """Number of the turn among the trained turns of its trajectory."""
    places: NDArray[np.intp]
    """Positions of the turn's trained ids in the flattened arrays of the batch, in order."""


def turn_returns(batch: TrainingBatch, *, discount: float = 1.0) -> NDArray[np.float32]:
    """The discounted sum of rewards from each turn on. The last turn also receives the trajectory's reward.

    Args:
        batch: the batch.
        discount: the factor per trained turn.

    Raises:
        BadBatch: a trajectory has branches, whose turns have no single order.
        BadOption: the discount is not from 0 to 1.
    """
    _check_share("discount", discount)
    returns = np.zeros(batch.loss_mask.size, np.float32)
    for turns in _turns(batch):
        for each, value in zip(turns, _returns(batch, turns, discount), strict=True):
            returns[each.places] = value
    return returns.reshape(batch.loss_mask.shape)


def by_turn(batch: TrainingBatch, *, discount: float = 1.0, rule: AdvantageRule = dr_grpo) -> NDArray[np.float32]:
    """The return of each turn, compared with the returns of the group's turns that have the same number.

    The result is 0 for a turn if no other trajectory of the group has a turn with its number. See "turn-level
    advantage" in https://arxiv.org/abs/2505.11821.

    Args:
        batch: the batch.
        discount: the factor per trained turn.
        rule: the comparison; `dr_grpo` subtracts the mean.

    Raises:
        BadBatch: as for `turn_returns`; or no turn can be compared with a turn of another trajectory.
        BadOption: the discount is not from 0 to 1.
    """
    _check_share("discount", discount)
    trained = list(_turns(batch))
    returns = np.array([value for turns in trained for value in _returns(batch, turns, discount)], np.float64)
    flat = [each for turns in trained for each in turns]
    most = max((each.number for each in flat), default=0) + 1
    labels = np.array([int(batch.group_of[each.trajectory]) * most + each.number for each in flat], np.int64)
    placed = np.zeros(batch.loss_mask.size, np.float32)
    for each, value in zip(flat, rule(returns, labels), strict=True):  # type: ignore[arg-type]  # rules take any type
        placed[each.places] = value
    return placed.reshape(batch.loss_mask.shape)


def gae(batch: TrainingBatch, values: Any, *, discount: float = 1.0, decay: float = 0.95) -> tuple[Any, Any]:
    """Generalized advantage estimation with one step per turn, https://arxiv.org/abs/1506.02438.

    The value of a turn is the critic's value at its first trained id, which estimates the return after the prompt.
    Rewards are as in `turn_returns`. All ids of a turn have its advantage.

    Args:
        batch: the batch.
        values: a critic's value for each position, shape [sequences, length]. The value at p must not depend on the
            id at p.
        discount: the factor per turn.
        decay: the factor lambda.

    Returns:
        Advantages, and the targets of the critic, which are advantage + value.

    Raises:
        BadBatch: as for `turn_returns`; or the shape does not fit, or the value of a turn is not finite.
        BadOption: a factor is not from 0 to 1.
    """
    _check_share("discount", discount)
    _check_share("decay", decay)
    given = as_numpy(values).astype(np.float64)
    if given.shape != batch.loss_mask.shape:
        raise BadBatch(f"values of shape {given.shape}: give one value per position, shape {batch.loss_mask.shape}.")
    advantages, targets = np.zeros(given.size, np.float32), np.zeros(given.size, np.float32)
    for turns in _turns(batch):
        later, after = 0.0, 0.0  # advantage and value of the following turn
        for each in reversed(turns):
            value = float(given.flat[each.places[0]])
            if not np.isfinite(value):
                name = name_of(batch.trajectories[each.trajectory])
                raise BadBatch(
                    f"the critic's value of turn {each.turn.number} of {name} is {value}: give finite values."
                )
            step = _reward(batch, each, last=each is turns[-1]) + discount * after - value
            later, after = step + discount * decay * later, value
            advantages[each.places], targets[each.places] = later, later + value
    return like(values, advantages.reshape(given.shape)), like(values, targets.reshape(given.shape))


def shared_credit(batch: TrainingBatch, advantages: Any) -> Any:
    """Each advantage divided by the number of rows of its trajectory.

    A trajectory has several rows after its history was rewritten, or where it branches. By default each row has the
    whole advantage, so the trajectory counts several times. With this function every trajectory counts once.

    Args:
        batch: the batch.
        advantages: one for each trajectory, or one for each position.

    Raises:
        BadBatch: the shape does not fit, or the advantage of a trained id is not finite.
    """
    whole = batch.with_advantages(advantages).advantages
    rows = np.bincount(batch.trajectory_of, minlength=len(batch.trajectories))
    return like(advantages, whole / np.maximum(rows, 1)[trajectory_index(batch)] if len(batch) else whole)


def _turns(batch: TrainingBatch) -> Iterator[list[_TrainedTurn]]:
    """The trained turns of each trajectory, in order."""
    found: dict[int, list[tuple[Turn, NDArray[np.intp]]]] = {}
    for row, start, owner in zip(batch.rows, batch.layout.starts, batch.trajectory_of, strict=True):
        for turn in row.turns:
            places = np.flatnonzero(row.loss_mask[turn.start : turn.end]) + turn.start + int(start)
            if len(places):
                found.setdefault(int(owner), []).append((turn, places))
    for owner, turns in found.items():
        trajectory = batch.trajectories[owner]
        if trajectory.branched:
            raise BadBatch(
                f"{name_of(trajectory)} has branches, so its turns have no single order: give one advantage for each "
                "trajectory, with shared_credit(batch, advantages) if it should count once."
            )
        # Rows are in the order of segments. Turns may be in another order if a history was rewound.
        ordered = sorted(turns, key=lambda each: each[0].number)
        yield [_TrainedTurn(turn, owner, number, places) for number, (turn, places) in enumerate(ordered)]


def _returns(batch: TrainingBatch, turns: list[_TrainedTurn], discount: float) -> list[float]:
    returns: list[float] = []
    total = 0.0
    for each in reversed(turns):
        total = _reward(batch, each, last=each is turns[-1]) + discount * total
        returns.append(total)
    return returns[::-1]


def _reward(batch: TrainingBatch, each: _TrainedTurn, *, last: bool) -> float:
    return each.turn.reward + (float(batch.rewards[each.trajectory]) if last else 0.0)


def _check_share(name: str, value: Any) -> None:
    if not 0 <= value <= 1:
        raise BadOption(f"{name}={value!r:.60}: give a number from 0 to 1.")
