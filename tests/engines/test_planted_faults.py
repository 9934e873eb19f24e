"""Proofs of weights find planted faults, and accept every right update."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from runner import EngineDead
from runner.engines.state import EngineState
from runner.engines.vllm.engine import VllmEngine
from runner.testing.engine_pool import PooledEngine
from runner.training import weight_proof
from runner.training.tiny_model import save_tiny_model
from tests import sweeps
from tests.engines.planted_faults import EXPERT_FAULTS, Trial, faults, stepped
from tests.engines.small_model import small_model

SIZES = (64, 256, 1024) if sweeps.whole() else (256,)
NAMES = tuple(faults(pytest.importorskip("transformers").LlamaConfig()))


def test_thirty_faults_are_planted() -> None:
    assert len(NAMES) == 30


@pytest.mark.engine
@pytest.mark.parametrize("fault", sweeps.part(NAMES, 30))
def test_update_with_a_planted_fault_is_ended_by_its_proof(
    fault: str, float32_engine: PooledEngine, hugging_face_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine gets weights with a fault, and a proof of the right weights."""

    async def main() -> None:
        engine, trainer = float32_engine, copy.deepcopy(hugging_face_model)
        old = {name: each.clone() for name, each in trainer.state_dict().items() if name != "lm_head.weight"}
        await engine.update_weights(old)
        runtime = engine.runtime
        assert runtime is not None
        with monkeypatch.context() as patch:
            # As at the engine's start, when `prove` measures the tolerance: other tests have already updated this
            # engine.
            patch.setattr(runtime, "versions", runtime.versions[-1:])
            await engine.prove(weight_proof(trainer, engine.tokenizer))
        right = stepped(old, 1)
        trainer.load_state_dict(right, strict=False)
        proof, wrong = weight_proof(trainer, engine.tokenizer), dict(right)
        faults(trainer.config)[fault](wrong, old)
        with monkeypatch.context() as patch:
            patch.setattr(runtime, "ended_by", EngineDead)  # later tests use this engine
            with pytest.raises(EngineDead, match=r"the proof of the weights .* does not hold"):
                await engine.update_weights(wrong, proof=proof)
        assert engine.stats().state is EngineState.PAUSED, "the engine stays paused, so no turn continues"
        held = await engine.update_weights(right, proof=proof)
        assert held.proof is not None
        assert engine.state is EngineState.RUNNING
        await engine.update_weights(old)

    float32_engine.home.call(main)


@pytest.mark.whole
@pytest.mark.engine
def test_right_updates_in_float32_raise_no_alarm(float32_engine: PooledEngine, hugging_face_model: Any) -> None:
    async def main() -> None:
        trial = Trial(float32_engine, copy.deepcopy(hugging_face_model), "float32", SIZES)
        await trial.start()
        assert set((await trial.false_alarms(sweeps.times(8, 2))).values()) == {0}
        await float32_engine.update_weights(trial.first)

    float32_engine.home.call(main)


@pytest.mark.engine
@pytest.mark.apart
@pytest.mark.whole
@pytest.mark.anyio
@pytest.mark.asyncio_alone
async def test_right_updates_in_bfloat16_raise_no_alarm(demo_model_folder: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = small_model(tmp_path, demo_model_folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    async with VllmEngine(folder, dtype="bfloat16", max_model_len=2048, max_num_seqs=4) as engine:
        trial = Trial(engine, model, "bfloat16", (64, 256, 1024))
        await trial.start()
        proofs = trial.proofs(stepped(trial.first, 1))
        stale = await trial.after(faults(model.config)["every tensor is stale"], trial.first, proofs)
        assert all(why for _, why in stale.values()), "an update that did not arrive at all is found"
        assert set((await trial.false_alarms(8)).values()) == {0}


@pytest.mark.engine
@pytest.mark.apart
@pytest.mark.whole
@pytest.mark.anyio
@pytest.mark.asyncio_alone
async def test_faults_of_experts_and_routers_hold_no_proof(demo_model_folder: Path, tmp_path: Path) -> None:
    import transformers

    config = transformers.Qwen3MoeConfig(num_experts=8, architectures=["Qwen3MoeForCausalLM"])
    config.save_pretrained(tmp_path / "config")
    vocabulary = transformers.AutoConfig.from_pretrained(demo_model_folder).vocab_size
    folder = tmp_path / "start"
    model = save_tiny_model(tmp_path / "config", folder, tokenizer=demo_model_folder, vocabulary=vocabulary)
    async with VllmEngine(folder, template="hermes", dtype="float32", max_model_len=2048, max_num_seqs=4) as engine:
        trial = Trial(engine, model, "float32", (64, 256, 1024))
        await trial.start()
        right = stepped(trial.first, 1)
        proofs = trial.proofs(right)
        for name, fault in EXPERT_FAULTS.items():
            judged = await trial.after(fault, right, proofs)
            assert all(why for _, why in judged.values()), name
        await engine.update_weights(right)
        assert not any(why for _, why in (await trial.judged(proofs)).values())
