"""Proofs of weights: an engine whose results differ from its trainer's is found before any turn continues."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from runner import BadControl, BadWeights, EngineDead, Outcome, RequestRejected, Run, Sampling, Trajectory, WeightProof
from runner.engines.base import GenerationRequest
from runner.engines.proofs import tolerance_of
from runner.engines.state import EngineState, PauseMode
from runner.engines.vllm.engine import VllmEngine
from runner.engines.vllm.parallel import call_all_workers
from runner.testing import Latency, ScriptedEngine
from runner.testing.engine_pool import PooledEngine
from runner.training import weight_proof
from tests import sweeps
from tests.playing import Plain, tasks, until, until_end

pytestmark = pytest.mark.anyio

IDS = list(range(3, 43))


class Model:
    """Log-probabilities that a test can change, for a scripted engine and its trainer."""

    def __init__(self) -> None:
        self.offset = 0.0

    def __call__(self, ids: Any) -> list[float]:
        return [-2.0 - self.offset - each / 100 for each in ids[1:]]

    def proof(self, **fields: Any) -> WeightProof:
        return WeightProof(IDS, self(IDS), **fields)


# --- proofs


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ids": IDS[:5]}, "5 ids and log-probabilities of shape (39,); give one for each id but the first"),
        ({"ids": IDS[:5], "logprobs": [-1.0] * 4}, "5 ids are too few for a proof; give a few hundred, at least 9"),
        ({"ids": ["a"] * 40}, "give token ids, whole numbers"),
        ({"logprobs": [*[-1.0] * 38, math.nan]}, "the log-probability of id 39 is nan"),
        ({"logprobs": [-math.inf, *[-1.0] * 38]}, "the log-probability of id 1 is -inf"),
        ({"logprobs": [0.5, *[-1.0] * 38]}, "the log-probability of id 1 is 0.5"),
        ({"logprobs": [[-1.0] * 39]}, "log-probabilities of shape (1, 39)"),
        ({"logprobs": ["x"] * 39}, "give one number for each id but the first"),
    ],
)
def test_invalid_proof_is_refused_by_name(change: dict[str, Any], said: str) -> None:
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
        with pytest.raises(BadWeights, match="its 40 ids must be fewer than the engine's context of 40"):
            await engine.update_weights("any", proof=WeightProof(IDS, [-1.0] * 39))


@pytest.mark.parametrize("level", [1, 2])
async def test_proof_waits_for_a_sleeping_cache_and_then_holds(level: int) -> None:
    model, figures = Model(), list[Any]()
    async with ScriptedEngine("Yes", scores=model) as engine:
        with engine.on_update(lambda: figures.append(engine.proof_figures)):
            await engine.sleep(level)
            await engine.wake(["weights"])
            model.offset = 0.25
            update = await engine.update_weights("any", proof=model.proof())
            assert (update.proof, engine.proof_figures, figures) == (None, None, [])
            await engine.wake(["kv_cache"])
        assert engine.proof_figures is not None
        assert (engine.proof_figures.median, engine.state) == (0.0, EngineState.RUNNING)
        assert figures == [engine.proof_figures], "listeners get the update with its figures"


async def test_waiting_proof_that_does_not_hold_ends_the_engine_first() -> None:
    model = Model()
    async with ScriptedEngine("Yes", scores=model) as engine:
        await engine.sleep()
        await engine.wake(["weights"])
        wrong = replace(model.proof(), logprobs=[each - 0.3 for each in model(IDS)])
        await engine.update_weights("any", proof=wrong)
        with pytest.raises(
            EngineDead, match=r"the proof of the weights '1' does not hold.*median difference 0\.3 nats"
        ):
            await engine.wake(["kv_cache"])
        assert not engine.is_alive()


async def test_waiting_proof_is_not_that_of_newer_weights() -> None:
    model = Model()
    async with ScriptedEngine("Yes", scores=model) as engine:
        await engine.pause()
        await engine.sleep()
        await engine.wake(["weights"])
        old = model.proof()
        await engine.update_weights("any", proof=old)
        model.offset = 0.3
        await engine.update_weights("newer")
        await engine.wake(["kv_cache"])
        assert (engine.proof_figures, engine.state) == (None, EngineState.PAUSED)


@pytest.mark.parametrize("measured", [False, True])
async def test_quantized_engine_needs_the_proof_of_its_first_weights(measured: bool) -> None:
    """Quantization changes scores by an amount that only a measurement shows."""
    model, first = Model(), [each + 0.12 for each in Model()(IDS)]
    async with ScriptedEngine("Yes", scores=model) as engine:
        engine.runtime.proofs.quantization = "weights in fp8"
        if not measured:
            with pytest.raises(BadControl, match=r"computes with weights in fp8.*call prove\(\) with a proof"):
                await engine.update_weights("any", proof=model.proof())
            assert (engine.weight_version, engine.state) == ("scripted", EngineState.RUNNING)
            return
        await engine.prove(WeightProof(IDS, first, dtype="bfloat16"))
        update = await engine.update_weights("any", proof=WeightProof(IDS, first, dtype="bfloat16"))
        assert update.proof is not None
        assert update.proof.tolerance.median == pytest.approx(0.36)
        assert update.proof.arrived is None
        far = WeightProof(IDS, [each + 0.4 for each in model(IDS)], dtype="bfloat16")
        with pytest.raises(EngineDead, match=r"median difference 0\.4 nats \(at most 0\.36\)"):
            await engine.update_weights("any", proof=far)


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
        with pytest.raises(EngineDead, match=r"the proof of the weights '1' does not hold"):
            await engine.update_weights("any", proof=model.proof())  # a request that waited for the first update
        assert engine.weight_version == "scripted", "nothing was sampled with the new weights"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
async def test_equal_scores_at_the_start_leave_room_for_rounding(dtype: str) -> None:
    """Scores in half precision are multiples of a step: most may be equal at one time and not at the next."""
    model = Model()
    async with ScriptedEngine("Yes", scores=model) as engine:
        proof = model.proof(dtype=dtype)
        await engine.prove(proof)
        model.offset = 0.004
        update = await engine.update_weights("any", proof=proof)
        assert update.proof is not None
        assert update.proof.median == pytest.approx(0.004)


async def test_weights_that_did_not_arrive_are_said_to_be_those_before() -> None:
    model = Model()
    async with ScriptedEngine("Yes", scores=model) as engine:
        await engine.prove(model.proof())
        model.offset = 0.25
        proof, model.offset = model.proof(), 0.0
        with pytest.raises(EngineDead, match="its scores are those of the old weights"):
            await engine.update_weights("any", proof=proof)


@pytest.mark.parametrize(
    ("trainer", "arrives", "moved", "warns"),
    [(0.02, False, False, True), (0.0, False, False, False), (0.02, True, True, False)],
)
async def test_scores_that_stay_under_a_held_proof_are_said(
    trainer: float, arrives: bool, moved: bool, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A step of 0.02 nats is below the rounding, whether it arrives or not."""
    model, offset = Model(), 0.0
    rounding = np.resize([0.02, -0.02], 39)

    def proof() -> WeightProof:
        return WeightProof(IDS, np.asarray(Model()(IDS)) - offset + rounding, dtype="bfloat16")

    async with ScriptedEngine("Yes", scores=model) as engine:
        await engine.prove(proof())
        for share in (1.0, 0.5):  # the first update follows `prove`, the second a proven update
            offset += share * trainer
            model.offset = offset if arrives else 0.0
            caplog.clear()
            update = await engine.update_weights("any", proof=proof())
            assert update.moved is moved
            assert ("change no score of the engine" in caplog.text) == warns


async def test_movement_is_not_compared_with_a_proof_of_older_weights() -> None:
    model = Model()
    async with ScriptedEngine("Yes", scores=model) as engine:
        await engine.update_weights("any", proof=model.proof())
        model.offset = 0.25
        assert (await engine.update_weights("any")).moved is None
        assert (await engine.update_weights("any", proof=model.proof())).moved is None
        assert (await engine.update_weights("any", proof=model.proof())).moved is False


async def test_prove_of_wrong_weights_is_refused_and_changes_nothing() -> None:
    model = Model()
    async with ScriptedEngine("Yes", scores=model) as engine:
        model.offset = 1.0
        proof, model.offset = model.proof(), 0.0
        with pytest.raises(BadWeights, match=r"prove\(\): the engine's log-probabilities differ"):
            await engine.prove(proof)
        assert engine.is_alive()
        await engine.prove(model.proof())


async def test_proof_of_an_adapter_is_not_that_of_the_weights() -> None:
    model = Model()
    async with ScriptedEngine("Yes", scores=model, adapters=("poet",)) as engine:
        await engine.prove(model.proof())
        assert (await engine.prove(model.proof(), "poet")).median == 0.0
        model.offset = 0.25
        proof, model.offset = model.proof(), 0.0
        with pytest.raises(BadWeights, match=r"prove\(adapter='poet'\): .* its scores are those of the old weights"):
            await engine.prove(proof, adapter="poet")
        with pytest.raises(RequestRejected, match="the engine has no adapter 'painter'"):
            await engine.prove(model.proof(), "painter")
        await engine.sleep()
        with pytest.raises(BadControl, match=r"prove\(\): the engine is asleep and cannot score; call wake\(\) first"):
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


async def test_tolerance_of_the_first_proof_is_of_its_number_type_alone() -> None:
    model = Model()
    async with ScriptedEngine("Yes", scores=model) as engine:
        await engine.prove(model.proof(dtype="float32"))
        far = [each + 0.05 for each in model(IDS)]
        held = await engine.update_weights("any", proof=WeightProof(IDS, far, dtype="bfloat16"))
        assert held.proof is not None
        assert held.proof.tolerance.median == 0.08
        with pytest.raises(EngineDead, match=r"median difference 0\.05 nats \(at most 0\.0001\)"):
            await engine.update_weights("any", proof=WeightProof(IDS, far, dtype="float32"))


async def test_tolerance_of_the_first_proof_is_of_its_ids_alone() -> None:
    model = Model()
    async with ScriptedEngine("Yes", scores=model) as engine:
        other = IDS[::-1]
        await engine.prove(model.proof(dtype="bfloat16"))
        far = WeightProof(other, [each + 0.05 for each in model(other)], dtype="bfloat16")
        held = await engine.update_weights("any", proof=far)
        assert held.proof is not None
        assert held.proof.tolerance.median == 0.08, "the rounding on other ids is unknown"
        close = WeightProof(IDS, [each + 0.05 for each in model(IDS)], dtype="bfloat16")
        with pytest.raises(EngineDead, match=r"median difference 0\.05 nats \(at most 0\.005\)"):
            await engine.update_weights("any", proof=close)


async def test_first_proofs_of_several_sets_of_ids_count() -> None:
    model, other = Model(), IDS[::-1]
    async with ScriptedEngine("Yes", scores=model) as engine:
        await engine.prove(model.proof())
        await engine.prove(WeightProof(other, [each + 1e-4 for each in model(other)]))
        tolerances = []
        for ids in (IDS, other):
            update = await engine.update_weights("any", proof=WeightProof(ids, model(ids)))
            assert update.proof is not None
            tolerances.append(update.proof.tolerance.median)
        assert tolerances == pytest.approx([1e-4, 3e-4])


async def test_episodes_of_an_engine_that_a_proof_ended_fail_with_its_cause() -> None:
    engine = ScriptedEngine("A long answer.", scores=Model(), latency=Latency(first=1000, between=1), tick=0.01)
    ended: list[Trajectory] = []

    async def update() -> None:
        await until(lambda: engine.running and engine.stats().open == 3)
        with pytest.raises(EngineDead):
            await engine.update_weights("any", proof=WeightProof(IDS, [-9.0] * 39))

    async with anyio.create_task_group() as group:
        group.start_soon(update)
        with pytest.raises(EngineDead, match="the proof of the weights '1' does not hold"):
            await until_end(Run(Plain, engine, tasks=tasks(3)), ended)
    assert [each.outcome for each in ended] == [Outcome.ENGINE_ERROR] * 3
    assert all("the proof of the weights '1' does not hold" in each.error for each in ended)


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
@pytest.mark.sample_cases(3)
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
        length = sweeps.times(64, 32)

        async def turn(number: int) -> None:
            how = replace(Sampling.defaults(), max_tokens=length, ignore_eos=True)
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
            assert ended == [length] * 24
        await engine.update_weights(hugging_face_model.state_dict())

    float32_engine.home.call(main)


@pytest.mark.engine
def test_proof_waits_for_the_cache_of_the_real_engine(
    float32_engine: PooledEngine, trainer: Any, hugging_face_model: Any
) -> None:
    async def main() -> None:
        engine = float32_engine
        step(trainer)
        await engine.sleep(2)
        await engine.wake(["weights"])
        proof = weight_proof(trainer, engine.tokenizer)
        assert (await engine.update_weights(trainer.state_dict(), proof=proof)).proof is None
        await engine.wake(["kv_cache"])
        assert engine.proof_figures is not None
        assert (engine.proof_figures.ids, engine.state) == (255, EngineState.RUNNING)
        assert engine.proof_figures.median < 1e-4
        await engine.update_weights(hugging_face_model.state_dict())

    float32_engine.home.call(main)


@pytest.mark.whole
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
@pytest.mark.whole  # test_control.py covers an engine's end after a failed load
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


@pytest.mark.engine
def test_a_proof_of_another_model_does_not_hold(float32_engine: PooledEngine, trainer: Any) -> None:
    async def main() -> None:
        del trainer.model.layers[-1]
        proof = weight_proof(trainer, float32_engine.tokenizer)
        with pytest.raises(BadWeights, match="log-probabilities differ from the trainer"):
            await float32_engine.prove(proof)

    float32_engine.home.call(main)


@pytest.mark.engine
def test_proof_in_another_number_type_has_its_tolerance(float32_engine: PooledEngine, trainer: Any) -> None:
    async def main() -> None:
        engine = float32_engine
        await engine.prove(weight_proof(trainer, engine.tokenizer))
        coarse = weight_proof(trainer.bfloat16(), engine.tokenizer)
        assert (coarse.dtype, coarse.weights_dtype) == ("bfloat16", "bfloat16")
        update = await engine.update_weights(trainer.state_dict(), proof=coarse)
        assert update.proof is not None
        assert update.proof.tolerance == tolerance_of(coarse, "bfloat16", None)
        assert update.proof.median > 5e-4, "the same figures would be a fault in float32"
        with pytest.raises(BadWeights, match=r"prove\(\): the engine's log-probabilities differ from the trainer's"):
            await engine.prove(replace(coarse, dtype="float32", weights_dtype="float32"))

    float32_engine.home.call(main)
