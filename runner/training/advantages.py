"""Advantages: each trajectory's reward against those of its group, by the rules of GRPO, RLOO and Dr. GRPO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from runner.errors import BadBatch, BadOption

__all__ = ["AdvantageRule", "checked_rule", "dr_grpo", "grpo", "rloo", "without_spread"]

AdvantageRule: TypeAlias = Callable[[NDArray[np.float32], NDArray[np.int32]], NDArray[np.floating[Any]]]
"""From rewards and groups, one of each for a trajectory, to one advantage for each."""

# Every function takes one number for a *trajectory*, however many segments it has: where each row counts by itself, a
# history that was rewritten often weighs more in its group's mean than one that was not.


def grpo(rewards: ArrayLike, groups: ArrayLike, *, epsilon: float = 1e-3) -> NDArray[np.float32]:
    """Reward less the group's mean, over the group's deviation: GRPO, https://arxiv.org/abs/2402.03300.

    A group without spread gets 0, and so does one with a single member: there is nothing to compare it with.

    Args:
        rewards: one for each trajectory, shape [trajectories].
        groups: which group each belongs to, any labels, shape [trajectories].
        epsilon: the number added to the deviation, which is that of a sample (divided by n - 1, as `torch.std`).

    Returns:
        Advantages, shape [trajectories], float32.

    Raises:
        BadBatch: the arrays do not fit each other, a reward is not finite, or no group has two members.
    """
    compared = _Compared.of(rewards, groups)
    squares = np.bincount(compared.index, compared.centred**2, minlength=len(compared.count))
    deviation = np.sqrt(squares / np.maximum(compared.count - 1, 1))
    return _float32(compared.centred / (deviation + epsilon)[compared.index])


def rloo(rewards: ArrayLike, groups: ArrayLike) -> NDArray[np.float32]:
    """Reward less the mean of the *others* in the group: RLOO, https://arxiv.org/abs/2402.14740.

    Arguments, what is returned and raised, and groups that get 0: as for `grpo`.
    """
    compared = _Compared.of(rewards, groups)
    # reward - (sum - reward) / (n - 1), written with the mean.
    factor = compared.count / np.maximum(compared.count - 1, 1)
    return _float32(compared.centred * factor[compared.index])


def dr_grpo(rewards: ArrayLike, groups: ArrayLike) -> NDArray[np.float32]:
    """Reward less the group's mean and nothing else: Dr. GRPO, https://arxiv.org/abs/2503.20783.

    Arguments, what is returned and raised, and groups that get 0: as for `grpo`.
    """
    return _float32(_Compared.of(rewards, groups).centred)


def checked_rule(rule: AdvantageRule) -> AdvantageRule:
    """The rule itself.

    Raises:
        BadOption: the rule is no function, such as the name of one.
    """
    if not callable(rule):
        raise BadOption(
            f"advantages={rule!r:.60}: give a function: grpo, rloo or dr_grpo (from runner.training import grpo), or "
            "one of yours from rewards and groups. Values that you have go to batch.with_advantages(values)."
        )
    return rule


def without_spread(rewards: ArrayLike, groups: ArrayLike) -> NDArray[np.bool_]:
    """Which trajectories are in a group whose rewards are all equal, so that comparing them teaches nothing.

    Args:
        rewards: one for each trajectory, shape [trajectories].
        groups: which group each belongs to, any labels, shape [trajectories].

    Returns:
        True in groups without spread, those with a single member among them; shape [trajectories], bool.

    Raises:
        BadBatch: the arrays do not fit each other, or a reward is not finite.
    """
    values, index, count = _checked(rewards, groups)
    return _flat(values, index, len(count))


@dataclass(frozen=True, slots=True)
class _Compared:
    """Rewards against their group's mean; exactly 0 where a group has no spread."""

    centred: NDArray[np.float64]
    index: NDArray[np.intp]
    count: NDArray[np.intp]

    @classmethod
    def of(cls, rewards: ArrayLike, groups: ArrayLike) -> _Compared:
        values, index, count = _checked(rewards, groups)
        if len(values) and count.max() < 2:
            raise BadBatch(
                "no group has two scored trajectories, so there is nothing to compare: give whole groups "
                "(`run.groups()`, or `grouped(trajectories, group_size=8)`) and play with group_size=2 or more."
            )
        mean = np.bincount(index, values, minlength=len(count)) / np.maximum(count, 1)
        # A mean of equal numbers may differ from them in the last bit, which a small epsilon would blow up.
        centred = np.where(_flat(values, index, len(count)), 0.0, values - mean[index])
        return cls(centred, index, count)


def _checked(rewards: ArrayLike, groups: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.intp], NDArray[np.intp]]:
    values, labels = np.asarray(rewards, dtype=np.float64), np.asarray(groups)
    if values.ndim != 1 or values.shape != labels.shape:
        raise BadBatch(
            f"rewards of shape {values.shape} and groups of shape {labels.shape}: give one reward and one group for "
            "each trajectory."
        )
    if not np.isfinite(values).all():
        first = int(np.flatnonzero(~np.isfinite(values))[0])
        raise BadBatch(f"reward {first} is {values[first]}: leave out what has no reward; it is no 0.")
    _, index, count = np.unique(labels, return_inverse=True, return_counts=True)
    return values, index, count


def _flat(values: NDArray[np.float64], index: NDArray[np.intp], groups: int) -> NDArray[np.bool_]:
    low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(low, index, values)
    np.maximum.at(high, index, values)
    flat: NDArray[np.bool_] = (low == high)[index]
    return flat


def _float32(values: NDArray[Any]) -> NDArray[np.float32]:
    return values.astype(np.float32)
