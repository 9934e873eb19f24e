"""Comparison of an engine's scores of the same ids before and after it loads weights.

This finds two faults without a proof from a trainer. An engine whose scores change after a reload of its own weights
computes garbage after every update. Scores that do not change at all mean that no weights arrived.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from runner.engines.proofs import MIN_SCORES, UNMOVED_NATS, ProofFigures, WeightProof, compare_scores, tolerance_of
from runner.errors import RequestRejected
from runner.logs import logger_for

__all__ = ["OwnScores"]

SAMPLE_SIZE: Final = 64
"""Number of scored ids; a few are enough to find both faults."""
NOISE_FACTOR: Final = 2.0
"""Scores count as changed above this multiple of the difference between two passes with the same weights."""

Scores = Mapping[int, Sequence[float]]
"""Log-probability of each id but the first, by data-parallel rank."""

_log = logger_for("engines")


class OwnScores:
    """An engine's scores of ids that are drawn once.

    Args:
        score: computes the scores while no turn runs.
        vocabulary: number of ids of the model.
        context: maximum number of ids of a request.
        dtype: number type of the engine's computation.
    """

    def __init__(
        self, score: Callable[[Sequence[int]], Awaitable[Scores]], *, vocabulary: int, context: int, dtype: str
    ) -> None:
        drawn = random.Random(0)
        size = min(SAMPLE_SIZE, context - 1)
        self._score = score
        self._ids = [drawn.randrange(vocabulary) for _ in range(size)] if size > MIN_SCORES else []
        self._dtype = dtype
        self._last: Scores | None = None
        self._noise: float | None = None

    def forget(self) -> None:
        """Drop the last scores, after other weights were loaded."""
        self._last = None

    async def take(self) -> bool:
        """Score the ids with the current weights, unless the last scores are of them.

        Returns:
            False if the engine refuses; it is then not tried again.
        """
        if self._last is None:
            self._last = await self._scores()
        if self._last is not None and self._noise is None:
            again = await self._scores()
            self._noise = None if again is None else _largest(self._last, again)
        return self._last is not None

    async def moved(self) -> bool | None:
        """Score the ids again. Return False if no score changed since `take`, None if the engine refuses."""
        before, self._last = self._last, await self._scores()
        if before is None or self._last is None:
            return None
        return _largest(before, self._last) > NOISE_FACTOR * (self._noise or 0.0) + UNMOVED_NATS

    async def compare(self) -> ProofFigures:
        """Score the ids again, compare them with those of `take`, and return the figures of the worst rank."""
        before, self._last = self._last, await self._scores()
        assert before is not None, "take() was called before"
        assert self._last is not None, "the engine scored them in take()"
        return max((self._figures(before[rank], self._last[rank]) for rank in before), key=lambda each: each.median)

    def _figures(self, before: Sequence[float], now: Sequence[float]) -> ProofFigures:
        proof = WeightProof(self._ids, before, self._dtype)
        return compare_scores(proof, now, tolerance_of(proof, self._dtype, None), engine_dtype=self._dtype)

    async def _scores(self) -> Scores | None:
        if not self._ids:
            return None
        try:
            return await self._score(self._ids)
        except RequestRejected as error:
            _log.warning("updates of weights are not compared: the engine does not score ids: %s", error)
            self._ids = []
            return None


def _largest(before: Scores, now: Scores) -> float:
    # NaN counts as a change: broken scores must not be reported as unchanged.
    differences = [abs(a - b) for rank in before for a, b in zip(before[rank], now[rank], strict=True)]
    return max((each if each == each else float("inf") for each in differences), default=0.0)
