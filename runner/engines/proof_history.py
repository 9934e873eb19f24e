"""The history of weight proofs of an engine: the difference by rounding, and the last proof that held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from runner.engines.proofs import (
    SMALL_MEDIAN_NATS,
    Accepted,
    ProofFigures,
    ScoredPass,
    ScoresByPass,
    WeightProof,
    compare_in_steps,
    compare_scores,
    failure_reason,
    number_types,
    tolerance_in_steps,
    tolerance_of,
)
from runner.errors import BadControl

__all__ = ["ProofHistory"]


class ProofHistory:
    """Proofs that held on one engine."""

    def __init__(self) -> None:
        self.quantization = ""
        """Quantization of the weights or the cache, which changes scores by more than rounding; "" without
        quantization.
        """
        self.last: Accepted | None = None
        """Last proof that held."""
        self._baselines: dict[tuple[Any, ...], ProofFigures] = {}  # figures by ids, number types and pass

    def compare(
        self,
        proof: WeightProof,
        scores: Sequence[float],
        dtype: str,
        *,
        in_steps: bool = False,
        measures: bool = False,
    ) -> tuple[ProofFigures, str]:
        """Compare an engine's scores with a proof.

        Args:
            proof: the proof.
            scores: the engine's log-probabilities of the same ids.
            dtype: number type of the engine's computation.
            in_steps: True if `scores` are those of the ids at `STEP_PLACES`, scored in steps.
            measures: True if this proof measures the difference by rounding. Its median may then be up to
                `SMALL_MEDIAN_NATS`, even where the tolerance is smaller.

        Returns:
            The figures, and the reason why the proof does not hold; "" if it holds.
        """
        computed_in = self.quantization or dtype
        tolerance = tolerance_of(proof, computed_in, self._baseline_of(proof))
        if measures:
            tolerance = replace(tolerance, median=max(tolerance.median, SMALL_MEDIAN_NATS))
        if in_steps:
            baseline = self._baseline_of(proof, in_steps=True)
            of_steps = None if baseline is None else tolerance_of(proof, computed_in, baseline)
            return compare_in_steps(proof, scores, tolerance_in_steps(tolerance, of_steps), engine_dtype=computed_in)
        figures = compare_scores(proof, scores, tolerance, self.last, engine_dtype=computed_in)
        return figures, failure_reason(figures, proof, scores, self.last)

    def _baseline_of(self, proof: WeightProof, *, in_steps: bool = False) -> ProofFigures | None:
        return self._baselines.get((proof.ids, *number_types(proof), in_steps))

    def require_tolerance(self, proof: WeightProof) -> None:
        """Check that the tolerance for a proof is known.

        For a quantized engine, the difference to the trainer has to be measured first.

        Raises:
            BadControl: quantization causes a difference that was not measured.
        """
        if self.quantization and self._baseline_of(proof) is None:
            raise BadControl(
                f"update_weights(proof=): the engine computes with {self.quantization}, and the difference to the "
                "trainer was not measured for these ids: before the first update, call prove() with a proof of the "
                "starting weights, the same ids and number types."
            )

    def keep(
        self,
        proof: WeightProof,
        scores: ScoresByPass,
        version: str,
        *,
        baselines: Mapping[ScoredPass, ProofFigures] | None = None,
        ran_beside_turns: bool = False,
    ) -> None:
        """Keep a proof that held, as the reference for the next one.

        Args:
            proof: the proof.
            scores: the engine's log-probabilities of the same ids, by pass; the first pass scored all ids.
            version: version of the weights that the engine scored.
            baselines: figures by pass, if the proof is of the starting weights: they show the difference by rounding
                alone. Otherwise None.
            ran_beside_turns: True if turns ran at the same time, since another batch size changes the rounding.
        """
        self.last = Accepted(proof, next(iter(scores.values())), version, None if ran_beside_turns else scores)
        for scored, figures in (baselines or {}).items():
            # Only the first baseline is kept, since the owner of the weights may exchange them without a new version.
            self._baselines.setdefault((proof.ids, *number_types(proof), scored.in_steps), figures)
