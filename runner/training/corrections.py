"""Corrections for ids whose sampling probability differs from the trainer's: ratios, truncation, masks and figures.

Functions take numpy arrays or torch tensors of shape [sequences, length], and return the same kind without a gradient,
since importance weights are constants of a loss. All values are 0 at untrained positions. The trainer computes its
log-probabilities at `batch.temperatures`, with `batch.masks` if ids are constrained.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from runner.errors import BadBatch, BadOption
from runner.training.array_kinds import as_numpy, like
from runner.training.batch import TrainingBatch
from runner.training.selection import name_of

__all__ = ["Mismatch", "SequenceMean", "icepop", "mismatch", "ratios", "sequence_mask", "tis"]


class SequenceMean(enum.StrEnum):
    """The way in which the ratio of a whole trajectory is computed."""

    GEOMETRIC = "geometric"
    """The geometric mean of the ratios of its ids, as in GSPO."""
    PRODUCT = "product"
    """The product of the ratios of its ids, which is the ratio of the trajectory's two probabilities."""


def ratios(logprobs: Any, batch: TrainingBatch) -> Any:
    """The trainer's probability of each trained id, divided by its sampling probability.

    Args:
        logprobs: the trainer's log-probabilities in nats.
        batch: the batch.

    Raises:
        BadBatch: the batch is not exact, so that the quotient is not a ratio of two policies; the shape does not fit;
            or a log-probability of a trained id is not finite.
    """
    if not batch.exact:
        raise BadBatch(
            f"the batch is not exact: {batch.inexact_reason}. Its log-probabilities cannot be compared with "
            "the trainer's. For ids under a grammar, use the batch that batch.with_masks(grammar) returns."
        )
    values = _checked("logprobs", logprobs, batch)
    bad = np.argwhere(batch.loss_mask & ~np.isfinite(values))
    if len(bad):
        place = tuple(bad[0])
        row = batch.rows[batch.segment_ids[place] - 1]
        raise BadBatch(
            f"logprobs: the value of a trained id of {name_of(row.trajectory)} is {values[place]}: give finite numbers."
        )
    gap = np.where(batch.loss_mask, values - batch.logprobs, 0.0)
    return like(logprobs, np.where(batch.loss_mask, np.exp(gap), 0.0))


def tis(ratio: Any, *, most: float = 2.0) -> Any:
    """Ratios clipped at `most`: truncated importance sampling, https://fengyao.notion.site/off-policy-rl.

    Raises:
        BadOption: `most` is not a finite number above 0.
    """
    _check_bounds(0.0, most)
    return like(ratio, np.minimum(_float64(ratio), most))


def icepop(ratio: Any, *, least: float = 0.5, most: float = 5.0) -> Any:
    """Ratios within the bounds, and 0 outside of them: IcePop, https://arxiv.org/abs/2510.18855.

    Raises:
        BadOption: a bound is invalid.
    """
    _check_bounds(least, most)
    values = _float64(ratio)
    return like(ratio, np.where((values >= least) & (values <= most), values, 0.0))


def sequence_mask(
    ratio: Any,
    batch: TrainingBatch,
    *,
    least: float = 0.5,
    most: float = 2.0,
    mean: SequenceMean | Literal["geometric", "product"] = SequenceMean.GEOMETRIC,
) -> Any:
    """1 for trained ids of trajectories whose ratio is within the bounds, and 0 for all other positions.

    A trajectory with several segments is one sequence. The geometric mean is as in GSPO,
    https://arxiv.org/abs/2507.18071; masked importance sampling of sequences: https://richardli.xyz/rl-collapse.

    Args:
        ratio: the result of `ratios`.
        batch: the batch.
        least: the lowest ratio of a trajectory that is trained.
        most: the highest ratio of a trajectory that is trained.
        mean: how the ratio of a trajectory is computed from the ratios of its ids.

    Raises:
        BadBatch: the shape does not fit.
        BadOption: a bound or `mean` is invalid.
    """
    _check_bounds(least, most)
    try:
        mean = SequenceMean(mean)
    except ValueError:
        raise BadOption(f"mean={mean!r:.60}: give one of {', '.join(SequenceMean)}.") from None
    trained, owner = batch.loss_mask, trajectory_index(batch)
    logs = _logs(_checked("ratio", ratio, batch)[trained])
    count = np.bincount(owner[trained], minlength=len(batch.trajectories))
    total = np.bincount(owner[trained], logs, minlength=len(batch.trajectories))
    if mean is SequenceMean.GEOMETRIC:
        total = total / np.maximum(count, 1)
    # Logarithms are compared, since the product over a long trajectory overflows.
    kept = (total >= _logs(np.asarray(least))) & (total <= np.log(most))
    return like(ratio, np.where(trained, kept[owner], False).astype(np.float32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Figures of the difference between the trainer's probabilities of trained ids and their sampling probabilities."""

    ids: int
    """Number of trained ids."""
    effective: float
    """Effective sample size in ids, by the ratios: (sum of ratios)^2 / (sum of squares),
    https://artowen.su.domains/mc/Ch-var-is.pdf."""
    mean_gap: float
    """Mean absolute difference of the log-probabilities in nats."""
    kl: float
    """Mean of ratio - 1 - log(ratio) in nats. It estimates the KL divergence of the sampling policy from the trainer's
    policy: "k3" of http://joschu.net/blog/kl-approx.html."""
    largest: float
    """Largest ratio."""
    clipped: float
    """Share of ids whose ratio is outside of the bounds."""
    by_version: Mapping[str, Mismatch]
    """The figures for the ids of each weight version. In these figures, this field is empty."""


def mismatch(ratio: Any, batch: TrainingBatch, *, least: float = 0.5, most: float = 2.0) -> Mismatch:
    """Return figures of the ratios, for all trained ids and for the ids of each weight version.

    Args:
        ratio: the result of `ratios`.
        batch: the batch.
        least: the lower bound for `clipped`.
        most: the upper bound for `clipped`.

    Raises:
        BadBatch: the shape does not fit.
        BadOption: a bound is invalid.
    """
    _check_bounds(least, most)
    values = _checked("ratio", ratio, batch)
    by_version = {
        name: _figures(values[batch.weight_versions == index], least, most)
        for index, name in enumerate(batch.versions)
        if (batch.weight_versions == index).any()
    }
    return _figures(values[batch.loss_mask], least, most, by_version)


def trajectory_index(batch: TrainingBatch) -> NDArray[np.int64]:
    """The index of each position's trajectory, shape [sequences, length]; 0 in padding."""
    by_segment_id = np.concatenate([np.zeros(1, np.int64), batch.trajectory_of.astype(np.int64)])
    return np.asarray(by_segment_id[batch.segment_ids])


def _figures(
    values: NDArray[np.float64], least: float, most: float, by_version: Mapping[str, Mismatch] | None = None
) -> Mismatch:
    if not len(values):
        return Mismatch(ids=0, effective=0.0, mean_gap=0.0, kl=0.0, largest=0.0, clipped=0.0, by_version={})
    logs = _logs(values)
    squares = float((values**2).sum())
    return Mismatch(
        ids=len(values),
        effective=float(values.sum()) ** 2 / squares if squares else 0.0,
        mean_gap=float(np.abs(logs).mean()),
        kl=float((values - 1 - logs).mean()),
        largest=float(values.max()),
        clipped=float(((values < least) | (values > most)).mean()),
        by_version=by_version or {},
    )


def _logs(values: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(divide="ignore"):  # a ratio of 0 has the logarithm minus infinity
        return np.asarray(np.log(values))


def _check_bounds(least: float, most: float) -> None:
    if not 0 <= least < most < float("inf"):
        raise BadOption(f"least={least!r:.30}, most={most!r:.30}: give 0 <= least < most, both finite.")


def _checked(name: str, given: Any, batch: TrainingBatch) -> NDArray[np.float64]:
    values = _float64(given)
    if values.shape != batch.loss_mask.shape:
        raise BadBatch(f"{name} of shape {values.shape}: give one value per position, shape {batch.loss_mask.shape}.")
    return values


def _float64(given: Any) -> NDArray[np.float64]:
    return as_numpy(given).astype(np.float64)
