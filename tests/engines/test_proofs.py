"""Proofs of weights: an engine that computes something else than its trainer is found before any turn goes on."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from runner import BadControl, BadWeights, EngineDead, Outcome, ProofTolerance, Run, Sampling, WeightProof
from runner.engines.base import GenerationRequest
from runner.engines.proofs import Accepted, compare_scores, failure_reason, tolerance_of
from runner.engines.state import EngineState, PauseMode
from runner.engines.vllm.engine import VllmEngine
from runner.engines.vllm.parallel import call_all_workers
from runner.testing import Latency, ScriptedEngine
from runner.testing.engine_pool import PooledEngine
from runner.training import weight_proof
from tests.cluster.in_process import InProcessWorker
from tests.cluster.playing import dice_engine, fleet, until
from tests.playing import Plain, tasks

pytestmark = pytest.mark.anyio

IDS = list(range(3, 43))


class Model:
    """Log-probabilities that a test moves, for a scripted engine and for its trainer."""

    def __init__(self) -> None:
        self.offset = 0.0

    def __call__(self, ids: Any) -> list[float]:
        return [-2.0 - self.offset - each / 100 for each in ids[1:]]

    def proof(self, **fields: Any) -> WeightProof:
        return WeightProof(IDS, self(IDS), **fields)


# --- what a proof is


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ids": IDS[:5]}, "5 ids and log-probabilities of shape (39,); give one for each id but the first"),
        ({"ids": IDS[:5], "logprobs": [-1.0] * 4}, "5 ids prove nothing; give some hundred, 9 at least"),
        ({"ids": ["a"] * 40}, "give token ids, whole numbers"),
        ({"logprobs": [*[-1.0] * 38, math.nan]}, "the log-probability of id 39 is nan"),
        ({"logprobs": [-math.inf, *[-1.0] * 38]}, "the log-probability of id 1 is -inf"),
        ({"logprobs": [0.5, *[-1.0] * 38]}, "the log-probability of id 1 is 0.5"),
        ({"logprobs": [[-1.0] * 39]}, "log-probabilities of shape (1, 39)"),
        ({"logprobs": ["x"] * 39}, "give one number for each id but the first"),
    ],
)
def test_a_proof_that_cannot_be_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadWeights) as raised:
        WeightProof(**{"ids": IDS, "logprobs": [-1.0] * 39, **change})
    assert said in str(raised.value)


async def test_proof_of_another_vocabulary_is_refused_first() -> None:
    proof = WeightProof([*IDS, 10**6], [-1.0] * 40)
    async with ScriptedEngine("Yes") as engine:
        with pytest.raises(BadWeights, match="the engine's model does not have the id 1000000"):
            await engine.update_weights("any", proof=proof)
        assert (engine.weight_version, engine.state) == ("scripted", EngineState.RUNNING)


async def test_a_proof_longer_than_the_context_is_refused() -> None:
    async with ScriptedEngine("Yes", context=40) as engine:
        with pytest.raises(BadWeights, match="40 ids do not fit the engine's context of 40"):
            await engine.update_weights("any", proof=WeightProof(IDS, [-1.0] * 39))


async def test_a_proof_is_refused_while_the_cache_sleeps() -> None:
    async with ScriptedEngine("Yes", scores=(model := Model())) as engine:
        await engine.sleep()
        await engine.wake(["weights"])
        with pytest.raises(BadControl, match="the memory of the cache is asleep"):
            await engine.update_weights("any", proof=model.proof())
        await engine.wake(["kv_cache"])
        await engine.update_weights("any", proof=model.proof())


# --- the figures


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


SIZE = 400
WIDE = ProofTolerance(0.08, 2.0)
"""Rounding of bfloat16."""


class Update:
    """A trainer's change of log-probabilities, the engine's scores before it, and a proof of it."""

    def __init__(self, change: float, noise: float, **fields: Any) -> None:
        old = -4 - np.abs(drawn(1, SIZE, 1.0))
        self.change = drawn(2, SIZE, change)
        self.before = Accepted(WeightProof(range(SIZE + 1), old, **fields), old + drawn(3, SIZE, noise))
        self.proof = WeightProof(range(SIZE + 1), old + self.change, **fields)

    def judged(self, seen: Any, engine_dtype: str = "bfloat16") -> tuple[float | None, str]:
        """The share that arrived where the engine's scores moved by `seen`, and why the proof fails."""
        scores = (np.asarray(self.before.scores) + seen).tolist()
        figures = compare_scores(self.proof, scores, WIDE, self.before, engine_dtype=engine_dtype)
        assert figures.holds, "the difference by itself is within the noise"
        return figures.arrived, failure_reason(figures, self.proof, scores, self.before)


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_arrived_share_of_a_change_is_measured_below_the_noise(share: float) -> None:
    update = Update(0.02, 0.02, dtype="float32", weights_dtype="bfloat16")
    arrived, why = update.judged(share * update.change + drawn(4, SIZE, 0.005))
    assert arrived == pytest.approx(share, abs=0.1)
    assert bool(why) == (share < 0.5)


@pytest.mark.parametrize("change", [0.01, 0.03, 0.1])
def test_scores_that_move_in_steps_are_no_missing_change(change: float) -> None:
    """Logits in bfloat16 between 16 and 32 are multiples of an eighth: most do not move for a small change."""
    update, step = Update(change, 0.02, dtype="float32", weights_dtype="bfloat16"), 0.125
    exact = np.random.default_rng(7).uniform(0, step, SIZE)
    seen = (np.floor((exact + update.change) / step) - np.floor(exact / step)) * step
    arrived, why = update.judged(seen)
    assert arrived is None or arrived == pytest.approx(1.0, abs=0.4)
    assert not why


@pytest.mark.parametrize(("size", "says"), [(0.5, False), (0.1, True)])
def test_ids_that_take_another_route_are_no_missing_change(size: float, says: bool) -> None:
    """A tenth of the ids of a mixture of experts differ by much, before and after."""
    update = Update(0.05, 0.01, dtype="float32", weights_dtype="bfloat16")
    routed = np.where(np.random.default_rng(5).random(SIZE) < 0.1, drawn(6, SIZE, size), 0.0)
    arrived, why = update.judged(update.change + routed)
    assert (arrived is not None) == says
    assert not says or arrived == pytest.approx(1.0, abs=0.15)
    assert not why


def test_a_change_that_the_engine_rounds_away_is_not_missing() -> None:
    """A small step of float32 weights leaves most of the engine's in bfloat16 as they were."""
    lost = drawn(4, SIZE, 0.002)
    rounded_here = Update(0.02, 0.02, dtype="float32", weights_dtype="float32")
    assert rounded_here.judged(lost) == (None, "")
    rounded_before = Update(0.02, 0.02, dtype="float32", weights_dtype="bfloat16")
    assert "only" in rounded_before.judged(lost)[1]


def test_rounding_in_the_proof_itself_is_not_a_missing_change() -> None:
    """Most of a bfloat16 trainer's change is its own rounding, which no engine shows."""
    update = Update(0.02, 0.02, dtype="bfloat16")
    assert update.judged(drawn(4, SIZE, 0.002)) == (None, "")
    large = Update(0.05, 0.01, dtype="bfloat16")
    assert "only" in large.judged(drawn(4, SIZE, 0.002))[1]


def test_a_change_that_is_lost_in_the_noise_says_nothing() -> None:
    update = Update(1e-5, 0.0, dtype="float32", weights_dtype="bfloat16")
    assert update.judged(drawn(3, SIZE, 0.02)) == (None, "")


def test_tolerance_is_that_of_the_coarser_type() -> None:
    float32, bfloat16 = WeightProof(IDS, [-1.0] * 39, "float32"), WeightProof(IDS, [-1.0] * 39, "torch.bfloat16")
    assert tolerance_of(float32, "float32", None).median < tolerance_of(bfloat16, "float32", None).median
    assert tolerance_of(bfloat16, "float32", None) == tolerance_of(float32, "bfloat16", None)


# --- an engine


async def test_an_update_with_a_proof_has_its_figures() -> None:
    model = Model()
    async with ScriptedEngine("Yes", scores=model) as engine:
        first = await engine.prove(model.proof())
        assert (first.ids, first.median, first.largest) == (39, 0.0, 0.0)
        model.offset = 0.25
        update = await engine.update_weights("any", proof=model.proof())
        assert update.proof is not None
        assert (update.proof.ids, update.proof.median) == (39, 0.0)
        assert update.proof.arrived == pytest.approx(1.0)
        assert (await engine.update_weights("any")).proof is None


async def test_a_proof_that_does_not_hold_ends_the_engine() -> None:
    model = Model()
    async with ScriptedEngine("Yes", scores=model) as engine:
        wrong = replace(model.proof(), logprobs=[each - 0.3 for each in model(IDS)])
        with pytest.raises(
            EngineDead, match=r"the proof of the weights '1' does not hold.*median difference 0\.3 nats"
        ):
            await engine.update_weights("any", proof=wrong)
        assert not engine.is_alive()
        assert engine.weight_version == "scripted", "nothing was sampled with the new ones"


async def test_weights_that_did_not_arrive_are_said_to_be_those_before() -> None:
    model = Model()
    async with ScriptedEngine("Yes", scores=model) as engine:
        await engine.prove(model.proof())
        model.offset = 0.25
        proof, model.offset = model.proof(), 0.0
        with pytest.raises(EngineDead, match="its scores are those of the old weights"):
            await engine.update_weights("any", proof=proof)


async def test_prove_of_wrong_weights_is_refused_and_changes_nothing() -> None:
    model = Model()
    async with ScriptedEngine("Yes", scores=model) as engine:
        model.offset = 1.0
        proof, model.offset = model.proof(), 0.0
        with pytest.raises(BadWeights, match=r"prove\(\): the engine's log-probabilities differ"):
            await engine.prove(proof)
        assert engine.is_alive()
        await engine.prove(model.proof())


async def test_tolerance_follows_from_the_proof_of_the_first_weights() -> None:
    model, noise = Model(), [0.02, -0.02]
    async with ScriptedEngine("Yes", scores=model) as engine:
        noisy = [each + noise[n % 2] for n, each in enumerate(model(IDS))]
        await engine.prove(WeightProof(IDS, noisy, dtype="bfloat16"))
        held = await engine.update_weights("any", proof=WeightProof(IDS, noisy, dtype="bfloat16"))
        assert held.proof is not None
        assert held.proof.tolerance.median == pytest.approx(0.06)
        far = WeightProof(IDS, [each + 0.07 for each in model(IDS)], dtype="bfloat16")
        with pytest.raises(EngineDead, match=r"median difference 0\.07"):
            await engine.update_weights("any", proof=far)


async def play(engine: ScriptedEngine, outcomes: list[Outcome]) -> None:
    async with Run(Plain, engine, tasks=tasks(3)) as run:
        outcomes += [trajectory.outcome async for trajectory in run]


async def test_episodes_of_an_engine_that_a_proof_ended_fail_with_its_cause() -> None:
    slow = Latency(first=1000, between=1)
    engine = ScriptedEngine("A long answer.", scores=Model(), latency=slow, tick=0.01)
    ended: list[Outcome] = []

    async def update() -> None:
        await until(lambda: engine.running and engine.stats().open == 3)
        with pytest.raises(EngineDead):
            await engine.update_weights("any", proof=WeightProof(IDS, [-9.0] * 39))

    async with anyio.create_task_group() as group:
        group.start_soon(update)
        with pytest.raises(EngineDead, match="the proof of the weights '1' does not hold"):
            await play(engine, ended)
    assert set(ended) <= {Outcome.ENGINE_ERROR}


# --- many engines


async def test_a_worker_that_keeps_its_old_weights_is_dismissed_by_name() -> None:
    async with fleet(3, dice_engine(scores=Model())) as (engine, launcher), engine:
        await engine.prove(Model().proof())
        odd = launcher.workers[1].worker.engine
        kept = Model()
        kept.offset = 0.5
        object.__setattr__(odd._planner, "scores", kept)
        update = await engine.update_weights("new", proof=Model().proof())
        assert update.proof is not None
        assert update.proof.median == 0.0
        await until(lambda: len(engine.workers()) == 3 and {each.version for each in engine.workers()} == {"1"})
        assert launcher.workers[1] not in launcher.alive
        (lost,) = [event for event in engine.events if "the proof of the weights" in event]
        assert "worker 1" in lost
        assert "does not hold" in lost


async def test_a_worker_that_joins_later_has_to_pass_the_proof_too() -> None:
    def plant(worker: InProcessWorker) -> None:
        """Have the first worker that comes compute something else."""
        launcher.on_start = lambda _: None
        object.__setattr__(worker.worker.engine._planner, "scores", lambda ids: [-9.0] * (len(ids) - 1))

    async with fleet(2, dice_engine(scores=Model())) as (engine, launcher), engine:
        await engine.update_weights("new", proof=Model().proof())
        launcher.on_start = plant
        launcher.workers[0].kill()
        await until(lambda: [each.number for each in engine.workers()] == [1, 3])
        assert any("worker 2" in event and "the proof of the weights" in event for event in engine.events)
        assert {each.version for each in engine.workers()} == {"1"}


async def test_fleet_refuses_a_proof_of_another_vocabulary_first() -> None:
    async with fleet(2, dice_engine(scores=Model())) as (engine, launcher), engine:
        with pytest.raises(BadWeights, match="does not have the id 1000000"):
            await engine.update_weights("new", proof=WeightProof([*IDS, 10**6], [-1.0] * 40))
        assert engine.weight_version == "scripted"
        assert len(launcher.alive) == 2


# --- the real engine


@pytest.fixture
def trainer(hugging_face_model: Any) -> Any:
    """A trainer's model, which a test may change."""
    return copy.deepcopy(hugging_face_model)


def step(model: Any, size: float = 0.01, seed: int = 0) -> None:
    """Change every matrix by a share of its spread, as an optimizer would."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * size)


@pytest.mark.engine
@pytest.mark.parametrize("mode", list(PauseMode))
def test_a_right_update_under_turns_is_proven_and_loses_none(
    mode: PauseMode, float32_engine: PooledEngine, trainer: Any, hugging_face_model: Any
) -> None:
    async def main() -> None:
        engine = float32_engine
        first = await engine.prove(weight_proof(trainer, engine.tokenizer))
        assert first.median < 1e-4
        step(trainer)
        proof, ended = weight_proof(trainer, engine.tokenizer), list[int]()

        async def turn(number: int) -> None:
            how = replace(Sampling.defaults(), max_tokens=64, ignore_eos=True)
            wanted = GenerationRequest(name=f"{number}/main/0", prompt=[number + 20] * 9, sampling=how)
            async with engine.stream(wanted) as deltas:
                ids = [token_id async for delta in deltas for token_id in delta.token_ids]
            ended.append(len(ids))

        async with anyio.create_task_group() as group:
            for number in range(24):  # more than run at once
                group.start_soon(turn, number)
            await until(lambda: engine.stats().running >= 8)
            update = await engine.update_weights(trainer.state_dict(), mode=mode, proof=proof)
        assert update.proof is not None
        assert (update.proof.ids, update.proof.holds) == (255, True)
        assert update.proof.arrived == pytest.approx(1.0, abs=1e-3)
        assert len(ended) == 24
        if mode is not PauseMode.ABORT:
            assert ended == [64] * 24
        await engine.update_weights(hugging_face_model.state_dict())

    float32_engine.home.call(main)


@pytest.mark.engine
def test_a_turn_that_is_left_while_a_proof_is_scored_leaves_nothing(
    float32_engine: PooledEngine, hugging_face_model: Any
) -> None:
    async def main() -> None:
        engine = float32_engine
        proof = weight_proof(hugging_face_model, engine.tokenizer)

        async def turn(number: int) -> None:
            how = replace(Sampling.defaults(), max_tokens=400, ignore_eos=True)
            wanted = GenerationRequest(name=f"{number}/main/0", prompt=[number + 20] * 9, sampling=how)
            async with engine.stream(wanted) as deltas:
                async for _ in deltas:
                    pass

        async with anyio.create_task_group() as group, anyio.create_task_group() as turns:
            for number in range(12):
                turns.start_soon(turn, number)
            await until(lambda: engine.stats().running >= 4)
            group.start_soon(partial(engine.update_weights, hugging_face_model.state_dict(), proof=proof))
            await until(lambda: engine.state is EngineState.UPDATING)
            turns.cancel_scope.cancel()
        assert engine.state is EngineState.RUNNING

    float32_engine.home.call(main)


@pytest.mark.engine
@pytest.mark.apart
@pytest.mark.asyncio_alone
async def test_update_that_dies_between_two_tensors_ends_the_engine(
    small_model_folder: Path, hugging_face_model: Any
) -> None:
    extension = "tests.engines.stale_worker.OwnWorker"
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4}
    async with VllmEngine(small_model_folder, worker_extension_cls=extension, **options) as engine:
        proof = weight_proof(hugging_face_model, engine.tokenizer)
        assert (await engine.update_weights(hugging_face_model.state_dict(), proof=proof)).version == "1"
        await call_all_workers(engine.vllm.llm, "die_after", tensors=3)
        with pytest.raises(EngineDead, match="the update dies between two tensors"):
            await engine.update_weights(hugging_face_model.state_dict(), proof=proof)
        assert engine.weight_version == "1"
        with pytest.raises(EngineDead, match="the update dies between two tensors"):
            await engine.score(range(20, 60))


def swapped_heads(model: Any) -> None:
    weight = model.model.layers[2].self_attn.q_proj.weight
    size = weight.shape[0] // model.config.num_attention_heads
    weight[: 2 * size] = weight[: 2 * size].roll(size, 0)


def swapped_halves(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    gate, up = mlp.gate_proj.weight.clone(), mlp.up_proj.weight.clone()
    mlp.gate_proj.weight.copy_(up)
    mlp.up_proj.weight.copy_(gate)


FAULTS: dict[str, Callable[[Any], None]] = {
    "one tensor by 1%": lambda model: model.model.layers[3].self_attn.o_proj.weight.mul_(1.01),
    "one tensor by 10%": lambda model: model.model.layers[0].mlp.down_proj.weight.mul_(1.1),
    "a norm by 1%": lambda model: model.model.norm.weight.mul_(1.01),
    "two heads swapped": swapped_heads,
    "the halves of a fused projection swapped": swapped_halves,
    "one row of the embedding": lambda model: model.model.embed_tokens.weight[28].mul_(0.5),
}


@pytest.mark.engine
@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_differ_in_one_place_hold_no_proof(
    fault: str, float32_engine: PooledEngine, trainer: Any, hugging_face_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine gets weights with a fault, and the proof is of the right ones."""
    import torch

    async def main() -> None:
        engine = float32_engine
        right = weight_proof(hugging_face_model, engine.tokenizer)
        await engine.prove(right)
        with torch.no_grad():
            FAULTS[fault](trainer)
        runtime = engine.runtime
        assert runtime is not None
        # Others play on this engine afterwards.
        monkeypatch.setattr(runtime, "ended_by", EngineDead)
        with pytest.raises(EngineDead, match=r"the proof of the weights .* does not hold"):
            await engine.update_weights(trainer.state_dict(), proof=right)
        assert engine.stats().state is EngineState.PAUSED, "no turn goes on"
        update = await engine.update_weights(hugging_face_model.state_dict(), proof=right)
        assert update.proof is not None
        assert engine.state is EngineState.RUNNING

    float32_engine.home.call(main)


@pytest.mark.engine
def test_a_proof_of_another_model_does_not_hold(float32_engine: PooledEngine, trainer: Any) -> None:
    async def main() -> None:
        del trainer.model.layers[-1]
        proof = weight_proof(trainer, float32_engine.tokenizer)
        with pytest.raises(BadWeights, match="log-probabilities differ from the trainer"):
            await float32_engine.prove(proof)

    float32_engine.home.call(main)
