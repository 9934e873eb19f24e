"""Figures of a proof: differences, the share of a change that arrived, and the tolerance."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from runner import BadWeights, EngineDead, ProofTolerance, WeightProof
from runner.engines.proofs import Accepted, compare_scores, failure_reason, tolerance_of
from runner.testing import ScriptedEngine

IDS = list(range(3, 43))


def drawn(seed: int, size: int, spread: float) -> Any:
    return np.random.default_rng(seed).normal(0, spread, size)


def test_figures_are_the_median_and_the_largest_difference() -> None:
    proof = WeightProof(IDS, [-1.0] * 39)
    figures = compare_scores(proof, [-1.0] * 30 + [-1.5] * 8 + [-3.0], ProofTolerance(0.1, 1.0), engine_dtype="float32")
    assert (figures.ids, figures.median, figures.largest, figures.arrived) == (39, 0.0, 2.0, None)
    assert not figures.holds


def test_scores_that_are_not_finite_hold_no_proof() -> None:
    proof = WeightProof(IDS, [-1.0] * 39)
    scores = [-1.0] * 38 + [math.nan]
    figures = compare_scores(proof, scores, ProofTolerance(0.1, 1.0), engine_dtype="float32")
    assert not figures.holds
    assert "NaN or infinity" in failure_reason(figures, proof, scores, None)


@pytest.mark.parametrize(("outliers", "holds"), [(0, True), (4, True), (5, False)])
def test_share_of_ids_may_take_another_route(outliers: int, holds: bool) -> None:
    ids, logprobs = range(101), [-1.0] * 100
    tolerance = ProofTolerance(0.1, 1.0, outlier_share=0.04)
    scores = [-5.0] * outliers + [-1.0] * (100 - outliers)
    figures = compare_scores(WeightProof(ids, logprobs), scores, tolerance, engine_dtype="bfloat16")
    assert (figures.outliers, figures.holds) == (outliers, holds)
    assert "largest" in str(figures)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_exact_types_allow_no_other_route(dtype: str) -> None:
    proof = WeightProof(range(101), [-1.0] * 100, dtype)
    figures = compare_scores(proof, [-1.0] * 99 + [-1.1], tolerance_of(proof, dtype, None), engine_dtype=dtype)
    assert not figures.holds


def test_half_precision_with_nan_holds_no_proof() -> None:
    proof = WeightProof(range(101), [-1.0] * 100, "bfloat16")
    scores = [-1.0] * 99 + [math.nan]
    tolerance = tolerance_of(proof, "bfloat16", None)
    assert tolerance.outlier_share > 0.01
    assert not compare_scores(proof, scores, tolerance, engine_dtype="bfloat16").holds


SCORE_COUNT = 400
WIDE = tolerance_of(WeightProof(IDS, [-1.0] * 39), "bfloat16", None)


class Update:
    """A trainer's change of log-probabilities, the engine's scores before it, and a proof of it."""

    def __init__(self, change: float, noise: float, **fields: Any) -> None:
        old = -4 - np.abs(drawn(1, SCORE_COUNT, 1.0))
        self.change = drawn(2, SCORE_COUNT, change)
        self.before = Accepted(WeightProof(range(SCORE_COUNT + 1), old, **fields), old + drawn(3, SCORE_COUNT, noise))
        self.proof = WeightProof(range(SCORE_COUNT + 1), old + self.change, **fields)

    def judged(self, seen: Any, engine_dtype: str = "bfloat16") -> tuple[float | None, str]:
        """Return the share that arrived if the engine's scores changed by `seen`, and why the proof fails."""
        scores = (np.asarray(self.before.scores) + seen).tolist()
        figures = compare_scores(self.proof, scores, WIDE, self.before, engine_dtype=engine_dtype)
        assert figures.holds, "the difference alone is within the noise"
        return figures.arrived, failure_reason(figures, self.proof, scores, self.before)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.8, 1.0])
def test_arrived_share_of_a_change_is_measured_below_the_noise(share: float) -> None:
    update = Update(0.02, 0.02, dtype="float32", weights_dtype="bfloat16")
    arrived, why = update.judged(share * update.change + drawn(4, SCORE_COUNT, 0.005))
    assert arrived == pytest.approx(share, abs=0.1)
    assert bool(why) == (share < 0.7)


@pytest.mark.parametrize("change", [0.01, 0.03, 0.1])
def test_coarse_score_steps_are_not_judged_a_missing_change(change: float) -> None:
    """Logits in bfloat16 between 16 and 32 are multiples of an eighth: most do not change for a small update."""
    update, step = Update(change, 0.02, dtype="float32", weights_dtype="bfloat16"), 0.125
    exact = np.random.default_rng(7).uniform(0, step, SCORE_COUNT)
    seen = (np.floor((exact + update.change) / step) - np.floor(exact / step)) * step
    arrived, why = update.judged(seen)
    assert arrived is None or arrived == pytest.approx(1.0, abs=0.4)
    assert not why


@pytest.mark.parametrize(("size", "says"), [(0.5, False), (0.1, True)])
def test_rerouted_experts_are_not_judged_a_missing_change(size: float, says: bool) -> None:
    """In a mixture of experts, a tenth of the ids differ by much, before and after the update."""
    update = Update(0.05, 0.01, dtype="float32", weights_dtype="bfloat16")
    routed = np.where(np.random.default_rng(5).random(SCORE_COUNT) < 0.1, drawn(6, SCORE_COUNT, size), 0.0)
    arrived, why = update.judged(update.change + routed)
    assert (arrived is not None) == says
    assert not says or arrived == pytest.approx(1.0, abs=0.15)
    assert not why


def test_a_change_that_the_engine_rounds_away_is_not_missing() -> None:
    """A small step of float32 weights leaves most of the engine's bfloat16 weights unchanged."""
    lost = drawn(4, SCORE_COUNT, 0.002)
    rounded_here = Update(0.02, 0.02, dtype="float32", weights_dtype="float32")
    assert rounded_here.judged(lost) == (None, "")
    rounded_before = Update(0.02, 0.02, dtype="float32", weights_dtype="bfloat16")
    assert "only" in rounded_before.judged(lost)[1]


def test_rounding_in_the_proof_itself_is_not_a_missing_change() -> None:
    """Most of a bfloat16 trainer's change is its own rounding, which no engine reproduces."""
    update = Update(0.02, 0.02, dtype="bfloat16")
    assert update.judged(drawn(4, SCORE_COUNT, 0.002)) == (None, "")
    large = Update(0.05, 0.01, dtype="bfloat16")
    assert "only" in large.judged(drawn(4, SCORE_COUNT, 0.002))[1]


def test_change_lost_in_the_noise_is_not_judged() -> None:
    update = Update(1e-5, 0.0, dtype="float32", weights_dtype="bfloat16")
    assert update.judged(drawn(3, SCORE_COUNT, 0.02)) == (None, "")


def test_tenth_of_a_change_may_be_missing_in_float32() -> None:
    update = Update(1e-4, 1e-6)
    exact = tolerance_of(update.proof, "float32", None)
    for share, fails in ((0.85, True), (0.95, False)):
        scores = (np.asarray(update.before.scores) + share * update.change).tolist()
        figures = compare_scores(update.proof, scores, exact, update.before, engine_dtype="float32")
        assert figures.holds
        assert bool(failure_reason(figures, update.proof, scores, update.before)) == fails


@pytest.mark.parametrize(
    ("dtype", "start", "allowed"),
    [
        ("bfloat16", 0.02, 0.06),
        ("bfloat16", 0.07, 0.105),
        ("int8", 0.1, 0.3),
        ("float32", 0.0004, 0.0012),
    ],
)
def test_wide_start_does_not_hide_a_stale_tensor(dtype: str, start: float, allowed: float) -> None:
    """An output layer with its old weights differs by 0.12 nats and more."""
    proof = WeightProof(IDS, [-1.0] * 39)
    baseline = compare_scores(proof, [-1.0 - start] * 39, tolerance_of(proof, dtype, None), engine_dtype=dtype)
    assert tolerance_of(proof, dtype, baseline).median == pytest.approx(allowed)


@pytest.mark.parametrize(
    ("dtype", "start", "allowed"),
    [("bfloat16", 0.0, 0.005), ("float16", 0.001, 0.005), ("int8", 0.0, 0.005), ("float32", 0.0, 0.0001)],
)
def test_small_start_leaves_room_for_the_rounding_of_its_type(dtype: str, start: float, allowed: float) -> None:
    proof = WeightProof(IDS, [-1.0] * 39)
    baseline = compare_scores(proof, [-1.0 - start] * 39, tolerance_of(proof, dtype, None), engine_dtype=dtype)
    assert tolerance_of(proof, dtype, baseline).median == pytest.approx(allowed)


def test_tolerance_is_that_of_the_coarser_type() -> None:
    float32, bfloat16 = WeightProof(IDS, [-1.0] * 39, "float32"), WeightProof(IDS, [-1.0] * 39, "torch.bfloat16")
    assert tolerance_of(float32, "float32", None).median < tolerance_of(bfloat16, "float32", None).median
    assert tolerance_of(bfloat16, "float32", None) == tolerance_of(float32, "bfloat16", None)


@pytest.mark.anyio
async def test_first_proof_may_differ_by_more_than_the_table() -> None:
    """Some models round more (Apertus in float32: 0.0007 nats in the median). Later proofs have this as tolerance."""
    logprobs = [-2.0 - each / 100 for each in IDS[1:]]
    noisy = WeightProof(IDS, [each + 0.002 for each in logprobs], dtype="float32")
    wrong = WeightProof(IDS, [each + 0.01 for each in logprobs], dtype="float32")
    async with ScriptedEngine("Yes", scores=lambda ids: [-2.0 - each / 100 for each in ids[1:]]) as engine:
        with pytest.raises(BadWeights, match="differ"):
            await engine.prove(wrong)
        await engine.prove(noisy)
        update = await engine.update_weights("any", proof=noisy)
        assert update.proof is not None
        assert update.proof.tolerance.median == pytest.approx(0.005)
        later = WeightProof([*IDS, 50], [*noisy.logprobs, -2.5], dtype="float32")
        with pytest.raises(EngineDead, match="does not hold"):
            await engine.update_weights("other", proof=later)
