"""Proofs of weights in steps: 16 ids of a proof are scored as turns sample them, and have a tolerance of their own."""

from __future__ import annotations

from typing import Any

import pytest

from runner import BadWeights, EngineDead, Sampling, WeightProof
from runner.engines.proofs import ScoredPass, ScoresByPass, ids_in_steps
from runner.testing import ScriptedEngine

pytestmark = pytest.mark.anyio

IDS = list(range(3, 43))


def logprobs_of(ids: Any) -> list[float]:
    """Log-probabilities that do not depend on the place of an id, which differs between the two passes."""
    return [-2.0 - each / 100 for each in ids[1:]]


class TwoPasses:
    """Scores of a scripted engine as a prompt and in steps, each with an offset."""

    def __init__(self, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        assert engine.runtime is not None
        self.of_prompt = self.of_steps = 0.0
        monkeypatch.setattr(engine, "score", self.score)
        monkeypatch.setattr(engine.runtime, "scores_in_steps", True)
        monkeypatch.setattr(engine.runtime, "score_while_paused", self.both)

    async def score(self, ids: Any, *, sampling: Sampling | None = None) -> list[float]:
        as_sampled = sampling is not None and sampling.temperature == 1.0
        return [each - (self.of_steps if as_sampled else self.of_prompt) for each in logprobs_of(ids)]

    async def both(self, ids: Any) -> ScoresByPass:
        in_steps = await self.score(ids_in_steps(ids), sampling=Sampling(temperature=1.0))
        return {ScoredPass(): await self.score(ids), ScoredPass(in_steps=True): in_steps}


def proof_of(offset: float = 0.0, dtype: str = "float32") -> WeightProof:
    return WeightProof(IDS, [each - offset for each in logprobs_of(IDS)], dtype=dtype)


@pytest.mark.parametrize("stale", [False, True])
async def test_proof_covers_the_steps_in_which_turns_sample(stale: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may compute sampled ids with copies of the weights that it does not use for a prompt."""
    async with ScriptedEngine("Yes", scores=logprobs_of) as engine:
        scores = TwoPasses(engine, monkeypatch)
        await engine.prove(proof_of())
        scores.of_prompt, scores.of_steps = 0.25, 0.0 if stale else 0.25
        if not stale:
            update = await engine.update_weights("any", proof=proof_of(0.25))
            assert update.proof is not None
            assert update.proof.ids == 39
            return
        with pytest.raises(
            EngineDead, match=r"does not hold: for ids in steps, as turns.*16 ids, median difference 0\.25"
        ):
            await engine.update_weights("any", proof=proof_of(0.25))


async def test_first_proof_measures_the_rounding_in_steps_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that computes as the engine computes a prompt differs from its steps, by rounding alone."""
    proof = proof_of(dtype="bfloat16")
    async with ScriptedEngine("Yes", scores=logprobs_of) as engine:
        scores = TwoPasses(engine, monkeypatch)
        scores.of_steps = 0.04
        assert (await engine.prove(proof)).median == 0.0
        update = await engine.update_weights("any", proof=proof)
        assert update.proof is not None
        assert update.proof.tolerance.median == 0.005
        scores.of_steps = 0.3
        with pytest.raises(
            EngineDead, match=r"for ids in steps.*16 ids, median difference 0\.3 nats \(at most 0\.16\)"
        ):
            await engine.update_weights("any", proof=proof)


async def test_steps_with_old_weights_are_found_without_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other code updates some engines; then `prove` alone compares."""
    async with ScriptedEngine("Yes", scores=logprobs_of) as engine:
        scores = TwoPasses(engine, monkeypatch)
        scores.of_steps = 0.25
        with pytest.raises(BadWeights, match=r"prove\(\): for ids in steps, as turns sample them, but not in a prompt"):
            await engine.prove(proof_of())
        scores.of_steps = 0.0
        await engine.prove(proof_of())
