"""Two workers that share a model: they sample like the whole model, and new weights reach both."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from runner import Run, WeightProof
from runner.engines.base import GenerationRequest
from runner.engines.vllm.engine import VllmEngine
from runner.engines.vllm.parallel import BINDING, call_all_workers
from runner.errors import BadModel, EngineDead
from runner.options import Sampling
from tests.engines.even_model import even_model
from tests.playing import Plain, twice

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.apart, pytest.mark.sample_units("unusual engines", 7)]

TOLERANCE_NATS = 1e-3  # in float32
PROMPT = list(range(1000, 1100))


@pytest.fixture(scope="module")
def model(demo_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return even_model(tmp_path_factory.mktemp("even-model"), demo_model_folder)


@pytest.fixture(autouse=True, scope="module")
def cores() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if bound := os.environ.get(BINDING):  # the cores of one worker, as `make test` sets them for its processes
            patch.setenv(BINDING, f"{bound}|{bound}")
        yield


@pytest.fixture(scope="module")
async def engine(model: Path, cores: None, anyio_backend: str) -> AsyncIterator[VllmEngine]:
    options: dict[str, Any] = {"worker_extension_cls": "tests.engines.stale_worker.OwnWorker", "dtype": "float32"}
    async with VllmEngine(model, tensor_parallel_size=2, max_num_seqs=4, max_model_len=1024, **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def weights(model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(model / "model.safetensors"))


class Twice(Plain):
    async def rollout(self, conversation: Any) -> None:
        await twice(conversation)


async def assert_says(engine: VllmEngine, model: Path, weights: Mapping[str, Any]) -> None:
    """Assert that Hugging Face's model with these weights has the same greedy ids and log-probabilities."""
    import torch
    from transformers import AutoModelForCausalLM

    sampling = dataclasses.replace(Sampling.defaults(), max_tokens=12, temperature=0.0)
    async with engine.stream(GenerationRequest(name="shared", prompt=PROMPT, sampling=sampling)) as stream:
        deltas = [delta async for delta in stream]
    said = [token_id for delta in deltas for token_id in delta.token_ids]
    teacher = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    teacher.load_state_dict(weights)
    with torch.no_grad():
        logits = teacher(torch.tensor([[*PROMPT, *said]])).logits[0, len(PROMPT) - 1 : -1]
    assert logits.argmax(-1).tolist() == said
    wanted = logits.log_softmax(-1).gather(-1, torch.tensor(said)[:, None])[:, 0]
    given = torch.tensor([logprob for delta in deltas for logprob in delta.logprobs or ()])
    assert float((wanted - given).abs().max()) < TOLERANCE_NATS


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by torch in its own code
async def test_both_workers_have_the_weights_and_new_ones_reach_both(
    engine: VllmEngine, model: Path, weights: dict[str, Any]
) -> None:
    assert engine.describe()["parallel"] == {"data": 1, "tensor": 2, "pipeline": 1}
    assert await engine.devices() == ["cpu", "cpu"]
    await assert_says(engine, model, weights)
    # All tensors that workers share, by rows or by columns.
    others = {name: tensor.roll(1, 0) if tensor.ndim == 2 else tensor for name, tensor in weights.items()}
    await engine.update_weights(others)
    await assert_says(engine, model, others)
    await engine.update_weights(model)
    await assert_says(engine, model, weights)


async def test_worker_that_keeps_its_old_shard_is_named(
    engine: VllmEngine, weights: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {name: tensor * 1.1 if tensor.ndim == 2 else tensor for name, tensor in weights.items()}
    await engine.update_weights(others)
    proof = WeightProof(PROMPT, await engine.score(PROMPT))
    await engine.update_weights(weights)
    await call_all_workers(engine.vllm.llm, "keep_old_weights", number=1)
    with monkeypatch.context() as patch:
        patch.setattr(engine.vllm, "ended_by", EngineDead)  # later tests use this engine
        with pytest.raises(EngineDead, match=r"does not hold.*Worker 1 of 2, counted from 0, kept its old values of"):
            await engine.update_weights(others, proof=proof)
    held = await engine.update_weights(others, proof=proof)
    assert held.proof is not None
    await engine.update_weights(weights)


async def test_episodes_play_on_shared_workers(engine: VllmEngine) -> None:
    async with Run(Twice, engine, group_size=4, sampling=Sampling(max_tokens=8)) as run:
        played = [trajectory async for trajectory in run]
    assert not run.summary.failed, run.summary.faults
    assert [len(trajectory.turns) for trajectory in played] == [2] * 4


async def test_heads_that_cannot_be_shared_out_are_named(demo_model_folder: Path, cores: None) -> None:
    with pytest.raises(BadModel, match=r"attention heads \(9\) must be divisible by tensor parallel size \(2\)"):
        async with VllmEngine(demo_model_folder, template="pythonic", tensor_parallel_size=2):
            pytest.fail("it started")
