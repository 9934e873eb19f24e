"""Turns that an engine samples during an update, for a comparison of their ids with the weights of each version."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import anyio

from runner.engines.base import Delta, Engine, GenerationRequest
from runner.engines.proofs import MIN_SCORES
from runner.errors import BadOption
from runner.options import Sampling
from runner.tokens.log import VersionSpan

__all__ = ["CrossingTurn", "turns_across_update"]

TURN_COUNT: Final = 4
PROMPT_SIZE: Final = 16
MAX_IDS: Final = 4096
"""Maximum number of ids of a turn, large enough that it ends after the update."""
LATE_IDS: Final = 64
"""Number of ids of a turn that are read after the update. The first of them may have waited in a queue since before the
update, and may be from the old weights.
"""


@dataclass(frozen=True, slots=True)
class CrossingTurn:
    """A turn with ids that the old weights sampled, and ids that the new weights sampled."""

    ids: Sequence[int]
    """Ids of the prompt and of the turn."""
    logprobs: Sequence[float]
    """Log-probability of each sampled id."""
    versions: Sequence[VersionSpan]
    """Weight versions of the sampled ids, as spans that count from the first sampled id."""

    @property
    def old(self) -> slice:
        """Positions of the sampled ids with the old version."""
        return slice(self.versions[0].start, self.versions[0].end)

    @property
    def new(self) -> slice:
        """Positions of the sampled ids with the new version."""
        return slice(self.versions[-1].start, self.versions[-1].end)

    def sampled_of(self, scores: Sequence[float]) -> Sequence[float]:
        """Return the scores of the sampled ids, from scores of all ids but the first."""
        return scores[len(scores) - len(self.logprobs) :]


async def turns_across_update(engine: Engine, update: Callable[[], Awaitable[Any]]) -> list[CrossingTurn]:
    """Sample several turns at the same time, update the weights once, and return the turns across the update.

    Returns:
        The turns with enough ids of both weights for a comparison, at least one.

    Raises:
        BadOption: no turn has enough ids of both weights.
    """
    crossed, updated = list[CrossingTurn](), anyio.Event()
    begun = [anyio.Event() for _ in range(TURN_COUNT)]
    async with anyio.create_task_group() as turns:
        for number, has_begun in enumerate(begun):
            turns.start_soon(_take_turns, engine, number, has_begun, updated, crossed)
        for has_begun in begun:
            await has_begun.wait()
        await update()
        updated.set()
    if not crossed:
        raise BadOption(
            f"no turn had {MIN_SCORES} ids of the old weights and {MIN_SCORES} of the new ones: all turns ended at the "
            f"context of {engine.context} ids; give a larger max_model_len."
        )
    return crossed


async def _take_turns(
    engine: Engine, number: int, begun: anyio.Event, updated: anyio.Event, crossed: list[CrossingTurn]
) -> None:
    """Sample turns one by one until the update is done. Add turns with enough ids of both weights to `crossed`."""
    prompt = [number + 5] * PROMPT_SIZE
    longest = min(MAX_IDS, engine.context - PROMPT_SIZE)
    # The prompts have different lengths, so that turns do not all end at the same time.
    sampling = replace(Sampling.defaults(), max_tokens=longest - longest * number // (2 * TURN_COUNT), ignore_eos=True)
    request = GenerationRequest(name=f"turn {number}/main/0", prompt=prompt, sampling=sampling)
    while not updated.is_set():
        read, late = list[Delta](), 0
        try:
            async with engine.stream(request) as deltas:
                async for delta in deltas:
                    read.append(delta)
                    late += len(delta.token_ids) if updated.is_set() else 0
                    if late >= LATE_IDS:
                        break
                    if len(read) >= MIN_SCORES:
                        begun.set()
        finally:
            begun.set()
        read += deltas.rest
        versions = () if deltas.finish is None else deltas.finish.versions
        if len(versions) > 1 and all(span.end - span.start >= MIN_SCORES for span in (versions[0], versions[-1])):
            ids = [token_id for delta in read for token_id in delta.token_ids]
            crossed.append(CrossingTurn([*prompt, *ids], list(_logprobs(read)), versions))


def _logprobs(deltas: Sequence[Delta]) -> Iterator[float]:
    for delta in deltas:
        assert delta.logprobs is not None, "an engine with weights has log-probabilities"
        yield from delta.logprobs
