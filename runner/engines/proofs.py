"""Proofs of weights: a trainer's log-probabilities of some ids, compared with an engine's scores.

Equal tensors do not prove that an engine computes with them, since engines keep packed, fused and derived copies. Equal
log-probabilities of the same ids are a proof for every layout, and take one forward pass.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from runner.errors import BadWeights

__all__ = ["Accepted", "ProofFigures", "ProofTolerance", "ScoredPass", "ScoresByPass", "WeightProof", "compare_scores"]

MIN_SCORES: Final = 8
"""Minimum number of log-probabilities of a proof; the median of fewer is not reliable."""
LEAST_MEDIAN_NATS: Final = 1e-4
"""Smallest tolerance for the median difference, if engine and trainer both compute in float32 or float64."""
BASELINE_FACTOR: Final = 3.0
"""Allowed difference between engine and trainer, as a multiple of their difference with the starting weights."""
WIDE_BASELINE_FACTOR: Final = 1.5
"""Limit of the allowed median difference, as a multiple of the median difference with the starting weights. The limit
is never below the value in `_TOLERANCES` or `SMALL_MEDIAN_NATS`. This factor is smaller than `BASELINE_FACTOR`: a
difference that is large from the start must not hide a stale tensor.
"""
SMALL_MEDIAN_NATS: Final = 0.005
"""Median difference that is small compared with the difference that a stale tensor causes. Up to this value, the whole
`BASELINE_FACTOR` applies. In a coarser type than float32 this is also the smallest tolerance for the median: scores are
multiples of a rounding step, so a median of 0 at the start may be by chance.
"""
MISSING_STANDARD_ERRORS: Final = 4.0
"""A change counts as missing if the share that arrived is more than this many standard errors below the needed
share, `ProofTolerance.min_arrived`.
"""
SHOWN_SHARE: Final = 0.5
"""A change counts as shown if the share that arrived is more than `MISSING_STANDARD_ERRORS` standard errors above this
share.
"""
MAX_ERROR: Final = 0.125
"""Maximum standard error of the share of a change that arrived; a less certain share is not used."""
MIN_SIGNAL: Final = 4.0
"""Minimum size of the change, as a multiple of the rounding in a half-precision trainer. Rounding in that trainer
makes the share of the change look smaller than it is.
"""
_PRECISE: Final = frozenset({"float32", "float64"})
UNMOVED_NATS: Final = 1e-7
"""Two scores that differ by less than this count as equal."""
NOISE_FACTOR: Final = 2.0
"""Scores count as changed if they differ by more than this multiple of the difference between two passes with the same
weights.
"""

STEP_PLACES: Final = range(2, 18)
"""Positions of the ids that are also scored in steps, as turns sample them: the first ones, whose prompts are short."""
STEP_OUTLIER_SHARE: Final = 0.25
"""Share of the ids at `STEP_PLACES` that may differ by more than `ProofTolerance.largest`, in half precision."""
STEP_MEDIAN_FACTOR: Final = 2.0
"""Allowed median of the ids at `STEP_PLACES` in half precision, as a multiple of the median of all ids."""


def ids_in_steps(ids: Sequence[int]) -> Sequence[int]:
    """Return the ids at `STEP_PLACES`, with one id before them."""
    return ids[STEP_PLACES.start - 1 : STEP_PLACES.stop]


def has_ids_in_steps(ids: Sequence[int]) -> bool:
    """Return True if there are enough ids at `STEP_PLACES` for a median."""
    return len(ids_in_steps(ids)) > MIN_SCORES


class ScoredPass(NamedTuple):
    """Pass that scores ids, as a prompt or in steps.

    Some engines use different copies of the weights for prompts and for sampled ids. For example, latent attention
    (DeepSeek) has a product of two weights that only steps use.
    """

    rank: int = 0
    """Data-parallel rank."""
    in_steps: bool = False
    """True if each of the ids was computed in a step of its own; these are the ids at `STEP_PLACES`."""


ScoresByPass: TypeAlias = Mapping[ScoredPass, Sequence[float]]
"""Log-probabilities of ids, by pass: of each id but the first, or of the ids at `STEP_PLACES`."""


@dataclass(frozen=True, slots=True)
class ProofTolerance:
    """Allowed difference between the log-probabilities of an engine and a trainer, in nats."""

    median: float
    """Maximum median of the differences."""
    largest: float
    """Maximum difference of an id."""
    outlier_share: float = 0.0
    """Share of the ids that may differ by more than `largest`: rounding in half precision routes some ids to other
    experts."""
    min_arrived: float = 0.5
    """Share of a change that has to arrive. Rounding hides some of it: up to a quarter with experts in bfloat16."""

    def in_steps(self) -> ProofTolerance:
        """Return the tolerance for the few ids that are scored in steps; the same tolerance if `outlier_share` is 0."""
        if not self.outlier_share:
            return self
        return replace(self, median=STEP_MEDIAN_FACTOR * self.median, outlier_share=STEP_OUTLIER_SHARE)


# Measured differences, in nats. Dense models: 3e-5 in float32 on CPUs; a median of 0.022 and a maximum of 0.336 in
# bfloat16 on an H200 (10,918 ids). Tiny mixtures of experts in bfloat16 on an H200: a median of 0.026; single ids of 95
# differ by more than 2.
_TOLERANCES: Final[Mapping[str, ProofTolerance]] = {
    "float64": ProofTolerance(5e-4, 0.05, min_arrived=0.9),
    "float32": ProofTolerance(5e-4, 0.05, min_arrived=0.9),
    "float16": ProofTolerance(0.03, 1.0, 0.05, min_arrived=0.7),
    "bfloat16": ProofTolerance(0.08, 2.0, 0.05, min_arrived=0.7),
}
_COARSEST: Final = ProofTolerance(0.15, 4.0, 0.05)
"""Tolerance of quantized weights, of unknown number types such as a server's, and of types outside of the table."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightProof:
    """A trainer's log-probabilities of some ids; `weight_proof` computes them with a torch model.

    Raises:
        BadWeights: there are too few ids, an id is not a whole number, an id after the first has no log-probability or
            several, or a log-probability is invalid.
    """

    ids: Sequence[int]
    """Sequence of ids, shape [n]; a few hundred, similar to the training data."""
    logprobs: Sequence[float]
    """Log-probability of each id but the first, given the ids before it, in nats at temperature 1; shape [n - 1]."""
    dtype: str | None = None
    """Number type of the trainer's computation, by torch's name; None for the engine's type."""
    weights_dtype: str | None = None
    """Number type of the trainer's weights; None for `dtype`. If the engine's type is coarser, the
    engine rounds the weights and loses small changes. The share that arrived is then not compared.
    """

    def __post_init__(self) -> None:
        try:
            ids = tuple(map(operator.index, self.ids))
        except TypeError as error:
            raise BadWeights(f"WeightProof(ids=...): {error}; give token ids, whole numbers.") from None
        try:
            logprobs = np.asarray(self.logprobs, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise BadWeights(
                f"WeightProof(logprobs=...): {error}; give one number for each id but the first."
            ) from None
        if logprobs.shape != (len(ids) - 1,):
            raise BadWeights(
                f"WeightProof: {len(ids)} ids and log-probabilities of shape {logprobs.shape}; give one for each id "
                "but the first."
            )
        if len(logprobs) < MIN_SCORES:
            raise BadWeights(
                f"WeightProof: {len(ids)} ids are too few for a proof; give a few hundred, at least {MIN_SCORES + 1}."
            )
        wrong = np.flatnonzero(~np.isfinite(logprobs) | (logprobs > 1e-3))
        if len(wrong):
            place = int(wrong[0])
            raise BadWeights(
                f"WeightProof: the log-probability of id {place + 1} is {logprobs[place]}; give "
                "log-probabilities in nats, finite and at most 0. A model that computes other values is broken."
            )
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "logprobs", tuple(logprobs.tolist()))
        for name in ("dtype", "weights_dtype"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, str(given).removeprefix("torch."))

    def check(self, *, vocabulary: int, context: int) -> None:
        """Check that an engine can score the proof.

        Raises:
            BadWeights: an id is outside of the vocabulary, or there are too many ids for the context.
        """
        wrong = next((token_id for token_id in self.ids if not 0 <= token_id < vocabulary), None)
        if wrong is not None:
            raise BadWeights(
                f"WeightProof: the engine's model does not have the id {wrong}; its ids are 0 to {vocabulary - 1}: the "
                "proof is of another model. Give a proof of this one."
            )
        if len(self.ids) >= context:
            raise BadWeights(
                f"WeightProof: its {len(self.ids)} ids must be fewer than the engine's context of {context}; omit some."
            )

    def in_steps(self) -> WeightProof:
        """Return the part of the proof that an engine scores in steps."""
        return replace(
            self, ids=ids_in_steps(self.ids), logprobs=self.logprobs[STEP_PLACES.start - 1 : STEP_PLACES.stop - 1]
        )


@dataclass(frozen=True, slots=True)
class ProofFigures:
    """Comparison of an engine's scores with a proof."""

    ids: int
    """Number of compared ids."""
    median: float
    """Median of the differences, in nats."""
    largest: float
    """Largest difference, in nats."""
    tolerance: ProofTolerance
    """Allowed differences."""
    arrived: float | None = None
    """Share of the trainer's change since the last proof that the engine's scores show: 1 for all, 0 for none. None if
    there is no last proof, if it has other ids or number types, if the share is not certain enough, or if the engine
    rounds the weights of the proof.
    """
    arrived_error: float | None = None
    """Standard error of `arrived`; None if `arrived` is None."""
    outliers: int = 0
    """Number of ids that differ by more than the tolerance's `largest`."""

    @property
    def holds(self) -> bool:
        """True if the differences are within the tolerance."""
        few_outliers = self.outliers <= self.tolerance.outlier_share * self.ids
        return math.isfinite(self.largest) and self.median <= self.tolerance.median and few_outliers

    def __str__(self) -> str:
        return (
            f"{self.ids} ids, median difference {self.median:.2g} nats (at most {self.tolerance.median:.2g}), largest "
            f"{self.largest:.2g} ({self._share_allowed()}at most {self.tolerance.largest:.2g})"
        )

    def _share_allowed(self) -> str:
        share = self.tolerance.outlier_share
        return f"for {1 - share:.0%} of the ids " if share else ""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A proof that held, and the engine's scores of its ids when it was accepted."""

    proof: WeightProof
    scores: Sequence[float]
    """Engine's log-probability of each id but the first."""
    version: str = ""
    """Version of the weights that the engine scored."""
    by_pass: ScoresByPass | None = None
    """Scores of every pass. None if turns ran at the same time, since another batch size changes the rounding."""

    def is_of(self, proof: WeightProof, version: str) -> bool:
        """Return True if the scores are of the ids of this proof, with the weights of this version."""
        return self.version == version and self.proof.ids == proof.ids


def tolerance_of(proof: WeightProof, engine_dtype: str, baseline: ProofFigures | None) -> ProofTolerance:
    """Return the tolerance for a proof.

    Args:
        proof: the proof.
        engine_dtype: number type of the engine's computation.
        baseline: figures of a proof of the starting weights, of the same ids and number types; None without such a
            proof.

    Returns:
        The tolerance in the table `_TOLERANCES` for the coarser of the engine's and the trainer's type; `_COARSEST` for
        a type outside of the table, such as quantized weights. A baseline replaces two of its values. `median` becomes
        three times the baseline's, at least `LEAST_MEDIAN_NATS` (or `SMALL_MEDIAN_NATS` in a coarser type than
        float32). It is at most the largest of the table's median, one and a half times the baseline's median, and
        `SMALL_MEDIAN_NATS`; `_COARSEST` has no such maximum. `largest` becomes three times the baseline's, at least the
        table's.
    """
    names = [engine_dtype, *([proof.dtype] if proof.dtype is not None else [])]
    known = max((_TOLERANCES.get(name, _COARSEST) for name in names), key=lambda each: each.median)
    if baseline is None:
        return known
    least = LEAST_MEDIAN_NATS if _PRECISE.issuperset(names) else SMALL_MEDIAN_NATS
    median = max(BASELINE_FACTOR * baseline.median, least)
    if known is not _COARSEST:
        median = min(median, max(known.median, WIDE_BASELINE_FACTOR * baseline.median, SMALL_MEDIAN_NATS))
    # At least the table's value, since rounding alone can route an id to another expert.
    return replace(known, median=median, largest=max(BASELINE_FACTOR * baseline.largest, known.largest))


def tolerance_in_steps(of_prompt: ProofTolerance, of_steps: ProofTolerance | None) -> ProofTolerance:
    """Return the tolerance for the ids that are scored in steps, with the larger `median` and `largest` of two.

    A trainer may compute exactly as the engine computes a prompt, and not as the engine computes steps. Then the
    difference in a prompt does not show the rounding in steps.

    Args:
        of_prompt: the tolerance for all ids, scored as a prompt.
        of_steps: the tolerance by a baseline that was scored in steps; None without such a baseline.
    """
    given = [each.in_steps() for each in (of_prompt, of_steps) if each is not None]
    return replace(given[0], median=max(each.median for each in given), largest=max(each.largest for each in given))


def compare_scores(
    proof: WeightProof,
    scores: Sequence[float],
    tolerance: ProofTolerance,
    before: Accepted | None = None,
    *,
    engine_dtype: str,
) -> ProofFigures:
    """Compare an engine's scores with a proof.

    Args:
        proof: the trainer's log-probabilities.
        scores: the engine's scores of the same ids.
        tolerance: the allowed differences.
        before: the last proof that held, to compute the share of the change that arrived; ignored if its ids or number
            types differ.
        engine_dtype: number type of the engine's computation.
    """
    given, wanted = np.asarray(scores, dtype=np.float64), np.asarray(proof.logprobs)
    differences = np.abs(given - wanted)
    differences[~np.isfinite(given)] = np.inf
    share, error = None, None
    if before is not None and _is_comparable(proof, before.proof, engine_dtype):
        precise = (proof.dtype or engine_dtype) in _PRECISE
        share, error = _arrived(wanted, given, before, precise=precise)
    return ProofFigures(
        len(given),
        float(np.median(differences)),
        float(differences.max()),
        tolerance,
        share,
        error,
        outliers=int((differences > tolerance.largest).sum()),
    )


def largest_differences(before: ScoresByPass, now: ScoresByPass) -> dict[ScoredPass, float]:
    """Return the largest difference between the scores before and now, for each pass."""
    largest = {}
    for each in now:
        old, new = np.asarray(before[each]), np.asarray(now[each])
        # Equal scores have the difference 0, even if both are infinite.
        difference = np.abs(np.subtract(new, old, out=np.zeros(len(new)), where=old != new))
        largest[each] = float(np.where(np.isnan(difference), np.inf, difference).max())
    return largest


def has_moved(before: ScoresByPass, now: ScoresByPass, noise: float) -> bool:
    """Return True if in every pass at least one score changed by more than `NOISE_FACTOR` times the noise.

    `noise` is the largest difference between two passes with the same weights, in nats.
    """
    return min(largest_differences(before, now).values()) > NOISE_FACTOR * noise + UNMOVED_NATS


def shows_arrival(figures: ProofFigures) -> bool:
    """Return True if the share that arrived exceeds `SHOWN_SHARE` by `MISSING_STANDARD_ERRORS` standard errors."""
    share, error = figures.arrived, figures.arrived_error
    return share is not None and error is not None and share - MISSING_STANDARD_ERRORS * error > SHOWN_SHARE


def number_types(proof: WeightProof) -> tuple[str | None, str | None]:
    """Return the number types of computation and weights. Only proofs with equal number types are compared."""
    return proof.dtype, proof.weights_dtype


def _is_comparable(proof: WeightProof, before: WeightProof, engine_dtype: str) -> bool:
    """Return True if two proofs have the same ids and number types, and the engine does not round their weights."""
    weights = proof.weights_dtype or proof.dtype or engine_dtype
    unrounded = weights == engine_dtype or engine_dtype in _PRECISE
    return unrounded and before.ids == proof.ids and number_types(before) == number_types(proof)


def _arrived(wanted: Any, scores: Any, before: Accepted, *, precise: bool) -> tuple[float | None, float | None]:
    """Return the share of the trainer's change that the engine's scores show, and the standard error of the share.

    Both are None if the change is zero or hidden by rounding, if a score is not finite, or if the error is too large.

    The share is a slope by least squares, not a median of ratios. Logits in half precision move in steps: for a small
    change most scores do not move and a few move too much, but their mean is correct. The error allows a different
    variance for each id (HC3 of MacKinnon and White 1985), since some ids may be routed to other experts.
    """
    old = np.asarray(before.proof.logprobs)
    change, seen = wanted - old, scores - np.asarray(before.scores)
    power = float(change @ change)
    if not power or not np.isfinite(seen).all():
        return None, None
    if not precise:
        rounding = np.asarray(before.scores) - old
        if power < MIN_SIGNAL**2 * float(rounding @ rounding):
            return None, None
    share = float(seen @ change) / power
    leverage = np.minimum(change**2 / power, 0.99)
    rest = (seen - share * change) / (1 - leverage)
    error = math.sqrt(float(change**2 @ rest**2)) / power
    return (share, error) if error < MAX_ERROR else (None, None)


def compare_in_steps(
    proof: WeightProof, scores: Sequence[float], tolerance: ProofTolerance, *, engine_dtype: str
) -> tuple[ProofFigures, str]:
    """Compare the scores of the ids at `STEP_PLACES` with a proof.

    Args:
        proof: the whole proof.
        scores: the engine's scores, in steps.
        tolerance: the result of `tolerance_in_steps`.
        engine_dtype: number type of the engine's computation.

    Returns:
        The figures, and the reason why the proof does not hold; "" if it holds.
    """
    part = proof.in_steps()
    figures = compare_scores(part, scores, tolerance, engine_dtype=engine_dtype)
    why = failure_reason(figures, part, scores, None)
    return figures, f"for ids in steps, as turns sample them, but not in a prompt, {why}" if why else ""


def failure_reason(figures: ProofFigures, proof: WeightProof, scores: Sequence[float], before: Accepted | None) -> str:
    """Return the reason why a proof does not hold, for people; empty if it holds."""
    unmoved = (
        before is not None
        and before.proof.ids == proof.ids
        and max(abs(now - then) for now, then in zip(scores, before.scores, strict=True)) < UNMOVED_NATS
    )
    if not all(map(math.isfinite, scores)):
        return "the engine computes NaN or infinity with these weights"
    if not figures.holds:
        stale = "; its scores are those of the old weights, so the new ones did not arrive" if unmoved else ""
        return f"the engine's log-probabilities differ from the trainer's: {figures}{stale}"
    share, error = figures.arrived, figures.arrived_error
    if (
        share is not None
        and error is not None
        and share + MISSING_STANDARD_ERRORS * error < figures.tolerance.min_arrived
    ):
        return (
            f"only {share:.0%} of the trainer's change shows in the engine's scores ({figures}): "
            "the engine still computes with old weights"
        )
    return ""
