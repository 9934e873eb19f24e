"""Comparison of an engine's scores of the same ids before and after it loads weights.

This finds three faults without a proof from a trainer. An engine whose scores change after a reload of its own weights
computes garbage after every update. Scores that do not change at all mean that no weights arrived. Scores of NaN mean
that the new weights are broken.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import numpy as np

from runner.engines.proofs import (
    MIN_SCORES,
    ProofFigures,
    ScoredPass,
    ScoresByPass,
    WeightProof,
    compare_scores,
    has_moved,
    ids_in_steps,
    largest_differences,
    tolerance_of,
)
from runner.errors import RequestRejected
from runner.logs import logger_for

__all__ = ["OwnScores"]

SAMPLE_SIZE: Final = 64
"""Maximum number of ids to score; a few are enough to find a fault."""

_log = logger_for("engines")


class OwnScores:
    """An engine's scores of random ids, which are drawn once.

    Args:
        score: function that computes the scores; it is called while no turn runs.
        vocabulary: number of ids of the model.
        context: maximum number of ids of a request.
        dtype: number type of the engine's computation.
    """

    def __init__(
        self, score: Callable[[Sequence[int]], Awaitable[ScoresByPass]], *, vocabulary: int, context: int, dtype: str
    ) -> None:
        drawn = random.Random(0)
        size = min(SAMPLE_SIZE, context - 1)
        self._score = score
        self._ids = [drawn.randrange(vocabulary) for _ in range(size)] if size > MIN_SCORES else []
        self._dtype = dtype
        self.noise: float | None = None
        """Largest difference between two passes with the same weights, in nats; None before `take` measures it."""
        self.broken: list[int] = []
        """Data-parallel ranks whose scores became NaN or infinity with the last weights."""
        self._last: ScoresByPass | None = None

    def forget(self) -> None:
        """Drop the last scores, after other weights were loaded."""
        self._last = None

    async def take(self) -> bool:
        """Score the ids with the current weights, unless the last scores are of these weights.

        The first call scores the ids a second time, to measure `noise`.

        Returns:
            True if there are scores; False if the context is too short, or if the engine refuses to score ids. After a
            refusal, scoring is not tried again.
        """
        if self._last is None:
            self._last = await self._scores()
        if self._last is not None and self.noise is None:
            again = await self._scores()
            self.noise = None if again is None else max(largest_differences(self._last, again).values())
        return self._last is not None

    async def moved(self) -> bool | None:
        """Score the ids again after new weights were loaded, and set `broken`.

        Returns:
            True if in every pass at least one score changed by more than noise, else False. None if there are no scores
            from before or after the load.
        """
        before, self._last = self._last, await self._scores()
        if before is None or self._last is None:
            return None
        self.broken = sorted({each.rank for each, now in self._last.items() if _became_broken(before[each], now)})
        return has_moved(before, self._last, self.noise or 0.0)

    async def compare(self) -> ProofFigures:
        """Score the ids again, compare them with the scores of `take`, and return the figures of the worst pass."""
        before, self._last = self._last, await self._scores()
        assert before is not None, "call take() before compare()"
        assert self._last is not None, "the engine scored them in take()"
        figures = [self._figures(each, before[each], now) for each, now in self._last.items()]
        return max(figures, key=lambda each: (not each.holds, each.median))

    def _figures(self, scored: ScoredPass, before: Sequence[float], now: Sequence[float]) -> ProofFigures:
        ids = ids_in_steps(self._ids) if scored.in_steps else self._ids
        proof = WeightProof(ids, before, self._dtype)
        tolerance = tolerance_of(proof, self._dtype, None)
        allowed = tolerance.in_steps() if scored.in_steps else tolerance
        return compare_scores(proof, now, allowed, engine_dtype=self._dtype)

    async def _scores(self) -> ScoresByPass | None:
        if not self._ids:
            return None
        try:
            return await self._score(self._ids)
        except RequestRejected as error:
            _log.warning("updates of weights are not compared: the engine does not score ids: %s", error)
            self._ids = []
            return None


def _became_broken(before: Sequence[float], now: Sequence[float]) -> bool:
    # A score that was infinite with the old weights too is not a fault, since some models mask ids.
    new = np.asarray(now)
    return bool((~np.isfinite(new) & (new != np.asarray(before))).any())
