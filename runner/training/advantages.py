"""Advantages: each trajectory's reward relative to others, by the rules of GRPO, RLOO, Dr. GRPO and REINFORCE++."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from runner.errors import BadBatch
from runner.training.array_kinds import as_numpy

__all__ = [
    "AdvantageRule",
    "dr_grpo",
    "grpo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
    "without_spread",
]

AdvantageRule: TypeAlias = Callable[[NDArray[np.float32], NDArray[np.int32]], NDArray[np.floating[Any]]]
"""Function from one reward and one group label per trajectory to one advantage per trajectory."""

_ByGroup: TypeAlias = tuple[NDArray[np.float64], NDArray[np.intp], NDArray[np.intp]]

# Every function takes one number per *trajectory*, for any number of segments. If each row counted, a trajectory whose
# history was rewritten often would have more weight in its group's mean.


def grpo(rewards: ArrayLike, groups: ArrayLike, *, epsilon: float = 1e-3) -> NDArray[np.float32]:
    """Reward minus the group's mean, divided by the group's standard deviation: GRPO, https://arxiv.org/abs/2402.03300.

    A group with equal rewards or a single member gets 0.

    Args:
        rewards: one for each trajectory, shape [trajectories].
        groups: label of each trajectory's group, of any type, shape [trajectories].
        epsilon: added to the sample standard deviation (with the divisor n - 1, as in `torch.std`).

    Returns:
        Advantages, shape [trajectories], float32.

    Raises:
        BadBatch: the arrays do not fit each other, a reward is not finite, or no group has two members.
    """
    centred, index, count = _compared(rewards, groups)
    squares = np.bincount(index, centred**2, minlength=len(count))
    deviation = np.sqrt(squares / np.maximum(count - 1, 1))
    return np.asarray(centred / (deviation + epsilon)[index], dtype=np.float32)


def rloo(rewards: ArrayLike, groups: ArrayLike) -> NDArray[np.float32]:
    """Reward minus the mean of the *others* in the group: RLOO, https://arxiv.org/abs/2402.14740.

    Arguments, result, errors, and groups that get 0 are as for `grpo`.
    """
    centred, index, count = _compared(rewards, groups)
    # This is reward - (sum - reward) / (n - 1), computed from the mean.
    factor = count / np.maximum(count - 1, 1)
    return np.asarray(centred * factor[index], dtype=np.float32)


def dr_grpo(rewards: ArrayLike, groups: ArrayLike) -> NDArray[np.float32]:
    """Reward minus the group's mean: Dr. GRPO, https://arxiv.org/abs/2503.20783.

    Arguments, result, errors, and groups that get 0 are as for `grpo`.
    """
    centred, _, _ = _compared(rewards, groups)
    return centred.astype(np.float32)


def reinforce_plus_plus(rewards: ArrayLike, groups: ArrayLike, *, epsilon: float = 1e-8) -> NDArray[np.float32]:
    """Reward minus the batch's mean, divided by the batch's standard deviation (with the divisor n).

    This is REINFORCE++, https://arxiv.org/abs/2501.03262. Groups are not compared, so a group with equal rewards has
    advantages too. A batch of equal rewards gets 0.

    Arguments, result and errors are as for `grpo`, except that one trajectory is enough, and that `epsilon` is added to
    this standard deviation.
    """
    values, _, _ = _checked(rewards, groups)
    if not len(values) or values.min() == values.max():
        return np.zeros(len(values), np.float32)
    return np.asarray((values - values.mean()) / (values.std() + epsilon), dtype=np.float32)


def reinforce_plus_plus_baseline(
    rewards: ArrayLike, groups: ArrayLike, *, epsilon: float = 1e-8
) -> NDArray[np.float32]:
    """Reward minus the group's mean, divided by the standard deviation of these differences in the batch.

    This is REINFORCE++ with group baseline, https://arxiv.org/abs/2501.03262. Arguments, result, errors, and groups
    that get 0 are as for `grpo`, except that `epsilon` is added to this standard deviation.
    """
    centred, _, _ = _compared(rewards, groups)
    return np.asarray(centred / (centred.std() + epsilon) if len(centred) else centred, dtype=np.float32)


def without_spread(rewards: ArrayLike, groups: ArrayLike) -> NDArray[np.bool_]:
    """Return True for trajectories whose group has equal rewards or one member; shape [trajectories]."""
    values, index, count = _checked(rewards, groups)
    return _flat(values, index, len(count))


def _compared(rewards: ArrayLike, groups: ArrayLike) -> _ByGroup:
    """Return the result of `_checked`, with the group's mean subtracted from each reward."""
    values, index, count = _checked(rewards, groups)
    if len(values) and count.max() < 2:
        raise BadBatch(
            "no group has two scored trajectories, so there is nothing to compare: give whole groups "
            "(`run.groups()`, or `grouped(trajectories, group_size=8)`) and play with group_size=2 or more."
        )
    mean = np.bincount(index, values, minlength=len(count)) / np.maximum(count, 1)
    # The mean of equal numbers may differ from them in the last bit. A small epsilon would amplify this.
    return np.where(_flat(values, index, len(count)), 0.0, values - mean[index]), index, count


def _checked(rewards: ArrayLike, groups: ArrayLike) -> _ByGroup:
    """Return the rewards, the index of each reward's group, and the number of members of each group.

    Raises:
        BadBatch: the arrays do not fit each other, or a reward is not finite.
    """
    values, labels = as_numpy(rewards).astype(np.float64), as_numpy(groups)
    if values.ndim != 1 or values.shape != labels.shape:
        raise BadBatch(
            f"rewards of shape {values.shape} and groups of shape {labels.shape}: give one reward and one group for "
            "each trajectory."
        )
    if not np.isfinite(values).all():
        first = int(np.flatnonzero(~np.isfinite(values))[0])
        raise BadBatch(
            f"reward {first} is {values[first]}: leave out trajectories without a reward; a missing reward is not 0."
        )
    _, index, count = np.unique(labels, return_inverse=True, return_counts=True)
    return values, index, count


def _flat(values: NDArray[np.float64], index: NDArray[np.intp], groups: int) -> NDArray[np.bool_]:
    low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(low, index, values)
    np.maximum.at(high, index, values)
    flat: NDArray[np.bool_] = (low == high)[index]
    return flat
