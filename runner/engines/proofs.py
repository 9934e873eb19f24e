"""Proofs of weights: the log-probabilities that a trainer's model gives some ids, compared with an engine's scores.

Comparing tensors cannot show that an engine computes with them: engines keep packed, fused and derived copies. Equal
log-probabilities of the same ids can, for every layout, for the cost of one forward pass.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from runner.errors import BadWeights

__all__ = ["Accepted", "ProofFigures", "ProofTolerance", "WeightProof", "compare_scores"]

MIN_SCORES: Final = 8
"""The fewest log-probabilities that a proof may have: the median of fewer says nothing."""
BASELINE_FACTOR: Final = 3.0
"""An engine may differ from a trainer by so many times what it differed with the weights that it started with."""
MIN_ARRIVED: Final = 0.5
"""The share of a change that has to arrive. Rounding hides some of it: with experts in bfloat16 up to a quarter."""
MISSING_STANDARD_ERRORS: Final = 4.0
"""Standard errors below `MIN_ARRIVED` from which on a part of the change counts as missing."""
MAX_ERROR: Final = 0.125
"""The standard error of that share above which it says nothing."""
MIN_SIGNAL: Final = 4.0
"""How many times the change has to be as large as the rounding of a trainer that computes in half precision: rounding
in what is compared *with* makes the share look smaller than it is."""
_PRECISE: Final = frozenset({"float32", "float64"})
UNMOVED_NATS: Final = 1e-7
"""Scores that differ by less are the same scores."""


@dataclass(frozen=True, slots=True)
class ProofTolerance:
    """The allowed difference between an engine's and a trainer's log-probabilities, in nats."""

    median: float
    """The most that half of the ids may differ by."""
    largest: float
    """The most that any id may differ by."""


# Seen: float32 on CPUs 3e-5 for dense models; bfloat16 on an H200 0.022 in the median and 0.336 at most (10,918 ids).
_TOLERANCES: Final[Mapping[str, ProofTolerance]] = {
    "float64": ProofTolerance(5e-4, 0.05),
    "float32": ProofTolerance(5e-4, 0.05),
    "float16": ProofTolerance(0.03, 1.0),
    "bfloat16": ProofTolerance(0.08, 2.0),
}
_COARSEST: Final = ProofTolerance(0.15, 4.0)
"""Of quantized weights and number types that are not in the table."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightProof:
    """The log-probabilities that a trainer's model gives some ids; `weight_proof` makes one of a torch model.

    Raises:
        BadWeights: too few ids, other than one value for each id but the first, or a value that is no log-probability.
    """

    ids: Sequence[int]
    """A sequence, shape [n]; a few hundred ids, of the kind that the model is trained on."""
    logprobs: Sequence[float]
    """The log-probability of each id but the first, given those before it, in nats and at temperature 1; shape
    [n - 1]."""
    dtype: str | None = None
    """The number type that the trainer computed in, by torch's name; None for that of the engine."""
    weights_dtype: str | None = None
    """The number type of the weights that it computed with; None for `dtype`. An engine of a coarser type rounds them
    and loses small changes: the share that arrived is not compared for such a proof."""

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
                f"WeightProof: {len(ids)} ids prove nothing; give some hundred, {MIN_SCORES + 1} at least."
            )
        wrong = np.flatnonzero(~np.isfinite(logprobs) | (logprobs > 1e-3))
        if len(wrong):
            place = int(wrong[0])
            raise BadWeights(
                f"WeightProof: the log-probability of id {place + 1} is {logprobs[place]}; the model that made the "
                "proof is broken, or these are not log-probabilities."
            )
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "logprobs", tuple(logprobs.tolist()))
        for name in ("dtype", "weights_dtype"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, str(given).removeprefix("torch."))

    def check(self, *, vocabulary: int, context: int) -> None:
        """Refuse a proof that an engine could not score.

        Raises:
            BadWeights: an id that the vocabulary does not have, or more ids than the context.
        """
        wrong = next((token_id for token_id in self.ids if not 0 <= token_id < vocabulary), None)
        if wrong is not None:
            raise BadWeights(
                f"WeightProof: there is no id {wrong} in the engine's model, whose ids are 0 to {vocabulary - 1}: the "
                "proof is of another model."
            )
        if len(self.ids) >= context:
            raise BadWeights(f"WeightProof: {len(self.ids)} ids, and the engine's context is {context}; give fewer.")


@dataclass(frozen=True, slots=True)
class ProofFigures:
    """The comparison of an engine's scores with a proof."""

    ids: int
    """The number of ids that were compared."""
    median: float
    """The median of the differences, in nats."""
    largest: float
    """The largest difference, in nats."""
    tolerance: ProofTolerance
    """The differences that were allowed."""
    arrived: float | None = None
    """The share of the trainer's change since the last proof of the same ids that the engine's scores show: 1 where all
    of it arrived, 0 where none did. None without such a proof, where the change is lost in the noise, and where the
    engine rounds the weights of the proof."""
    arrived_error: float | None = None
    """The standard error of `arrived`; None with it."""

    @property
    def holds(self) -> bool:
        """True where the differences are within the tolerance."""
        return self.median <= self.tolerance.median and self.largest <= self.tolerance.largest

    def __str__(self) -> str:
        return (
            f"{self.ids} ids, median difference {self.median:.2g} nats (at most {self.tolerance.median:.2g}), largest "
            f"{self.largest:.2g} (at most {self.tolerance.largest:.2g})"
        )


@dataclass(frozen=True, slots=True)
class Accepted:
    """A proof that held, with the scores that the engine had then."""

    proof: WeightProof
    """The proof."""
    scores: Sequence[float]
    """The engine's log-probability of each id but the first."""


def tolerance_of(proof: WeightProof, engine_dtype: str, baseline: ProofFigures | None) -> ProofTolerance:
    """The tolerance for a proof.

    Args:
        proof: the proof.
        engine_dtype: the number type that the engine computes in.
        baseline: the figures of a proof of the weights that the engine started with; they replace the table of types.

    Returns:
        That of the coarser of both types; with a baseline three times its median, and three times its largest
        difference where that is more than the table allows.
    """
    names = [engine_dtype, *([proof.dtype] if proof.dtype is not None else [])]
    known = max((_TOLERANCES.get(name, _COARSEST) for name in names), key=lambda each: each.median)
    if baseline is None:
        return known
    floor = _TOLERANCES["float32"]
    return ProofTolerance(
        max(BASELINE_FACTOR * baseline.median, floor.median / 5),
        # Never less than by the table: where experts are chosen, one id may take another route by rounding alone.
        max(BASELINE_FACTOR * baseline.largest, known.largest),
    )


def compare_scores(
    proof: WeightProof,
    scores: Sequence[float],
    tolerance: ProofTolerance,
    before: Accepted | None = None,
    *,
    engine_dtype: str,
) -> ProofFigures:
    """The figures of an engine's scores beside a proof.

    Args:
        proof: the trainer's log-probabilities.
        scores: the engine's, of the same ids.
        tolerance: the differences that are allowed.
        before: the last proof that held, for the share of the change that arrived; other ids than the proof's say
            nothing.
        engine_dtype: the number type that the engine computes in.
    """
    given, wanted = np.asarray(scores, dtype=np.float64), np.asarray(proof.logprobs)
    differences = np.abs(given - wanted)
    differences[~np.isfinite(given)] = np.inf
    share, error = None, None
    if before is not None and before.proof.ids == proof.ids:
        proofs = (before.proof, proof)
        if all(_same_weights(each, engine_dtype) for each in proofs):
            precise = all((each.dtype or engine_dtype) in _PRECISE for each in proofs)
            share, error = _arrived(wanted, given, before, precise=precise)
    return ProofFigures(len(given), float(np.median(differences)), float(differences.max()), tolerance, share, error)


def _same_weights(proof: WeightProof, engine_dtype: str) -> bool:
    """Return whether an engine computes with the very weights of a proof and does not round them."""
    weights = proof.weights_dtype or proof.dtype or engine_dtype
    return weights == engine_dtype or engine_dtype in _PRECISE


def _arrived(wanted: Any, scores: Any, before: Accepted, *, precise: bool) -> tuple[float | None, float | None]:
    """The regression of the engine's change on the trainer's and its error; None where that is too large.

    By squares, and not by a median of ratios: logits in half precision move in steps, so that most scores do not move
    at all for a small change and few move by too much. Their mean is right. The error allows for another spread of each
    id (HC3 of MacKinnon and White 1985): where experts are chosen, some ids take another route.
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


def failure_reason(figures: ProofFigures, proof: WeightProof, scores: Sequence[float], before: Accepted | None) -> str:
    """The reason for which a proof does not hold, for people; empty where it holds."""
    unmoved = (
        before is not None
        and before.proof.ids == proof.ids
        and max(abs(now - then) for now, then in zip(scores, before.scores, strict=True)) < UNMOVED_NATS
    )
    if not all(map(math.isfinite, scores)):
        return "the engine computes NaN or infinity with these weights"
    if not figures.holds:
        stale = "; its scores are those of the weights before, so that the new ones did not arrive" if unmoved else ""
        return f"the engine computes other log-probabilities than the trainer: {figures}{stale}"
    share, error = figures.arrived, figures.arrived_error
    if share is not None and error is not None and share + MISSING_STANDARD_ERRORS * error < MIN_ARRIVED:
        return (
            f"of what the trainer changed only {share:.0%} shows in the engine's scores ({figures}): it "
            "still computes with weights from before"
        )
    return ""
