"""Latent attention uses a product of two weights only for sampled ids: a proof finds a stale product."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner import EngineDead, Sampling, VllmEngine
from runner.engines.proofs import STEP_PLACES
from runner.engines.vllm.parallel import call_all_workers
from runner.training import weight_proof
from tests.engines.test_proofs import step
from tests.weight_conformance.architectures import save_tiny

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone]

WORKER = "tests.engines.stale_worker.StepWorker"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # required by vLLM


@pytest.mark.engine
@pytest.mark.apart
@pytest.mark.whole
async def test_stale_product_for_sampled_ids_fails_the_proof(demo_model_folder: Path, tmp_path: Path) -> None:
    start = tmp_path / "start"
    model = save_tiny("DeepSeek V3", start, demo_model_folder)
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4}
    async with VllmEngine(start, template="hermes", worker_extension_cls=WORKER, **options) as engine:
        await engine.prove(weight_proof(model, engine.tokenizer))
        step(model, 0.05)
        proof = weight_proof(model, engine.tokenizer)
        right = await engine.update_weights(model.state_dict(), proof=proof)
        assert right.proof is not None
        assert right.proof.median < 1e-4
        steps = await engine.score(proof.ids[: STEP_PLACES.stop], sampling=Sampling(temperature=1.0))
        assert np.abs(np.array(steps) - proof.logprobs[: len(steps)]).max() < 1e-3
        await call_all_workers(engine.vllm.llm, "keep_products")
        step(model, 0.05)
        with pytest.raises(EngineDead, match="does not hold: for ids in steps, as turns sample them, but not in a"):
            await engine.update_weights(model.state_dict(), proof=weight_proof(model, engine.tokenizer))
