"""A real vLLM server: it samples the same ids as our own engine, and frees requests of a disconnected client."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from envs.calculator import Calculator
from runner import Concurrency, Limits, Outcome, RequestRejected, Run, RunFile, Sampling
from runner.engines.base import Engine, FinishReason, GenerationRequest
from runner.engines.remote.dialect import ServerDialect
from runner.engines.remote.engine import RemoteEngine
from runner.errors import BadModel
from runner.options import Constraint, ConstraintKind
from runner.testing import assert_exact
from runner.testing.engine_pool import PooledEngine
from runner.tokens.top_logprobs import TopLogprobs
from tests.engines.remote.model_folder import byte_model
from tests.engines.remote.model_server import ModelServer
from tests.verifying import verify

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.sample_units("unusual engines", 7, unit="remote")]

WATCHDOG_SECONDS = 600.0
PROMPT = list(range(60, 100))
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


def wanted(max_tokens: int = 24, *, name: str = "episode/main/0", **options: Any) -> GenerationRequest:
    own = {field: options.pop(field) for field in ("constraint", "seed") if field in options}
    sampling = replace(Sampling.defaults(), max_tokens=max_tokens, **options)
    return GenerationRequest(name=name, prompt=PROMPT, sampling=sampling, stop_ids=(2,), **own)


async def said(engine: Engine, request: GenerationRequest) -> dict[str, Any]:
    """Return everything that a request returned."""
    stream = engine.stream(request)
    async with stream:
        deltas = [delta async for delta in stream]
    assert stream.finish is not None
    return {
        "ids": [token_id for delta in deltas for token_id in delta.token_ids],
        "logprobs": [logprob for delta in deltas for logprob in delta.logprobs or ()],
        "top": [row for delta in deltas if delta.top is not None for row in most_likely(delta.top)],
        "finish": (stream.finish.reason, stream.finish.stop),
        "versions": [(span.start, span.end) for span in stream.finish.versions],
    }


def most_likely(top: TopLogprobs) -> list[list[int]]:
    """The most likely ids of each position, without ids that could not be sampled, whose order is arbitrary."""
    rows = zip(top.id_rows().tolist(), top.logprob_rows().tolist(), strict=True)
    return [[each for each, logprob in zip(*row, strict=True) if math.isfinite(logprob)] for row in rows]


def remote(server: ModelServer, **options: Any) -> RemoteEngine:
    return RemoteEngine(server.url, server.folder, **{"template": "pythonic", **options})


ASKED = {
    "greedy": wanted(temperature=0.0, logprobs=3),
    "seeded": wanted(seed=11, logprobs=3),
    "cool, of a few": wanted(seed=12, temperature=0.7, top_p=0.9, top_k=20, logprobs=2),
    "penalised": wanted(seed=13, repetition_penalty=1.3, presence_penalty=0.5, logit_bias={216: -5.0}),
    "at least": wanted(seed=14, min_tokens=20),
    "constrained": wanted(40, seed=15, constraint=Constraint(ConstraintKind.JSON, SCHEMA)),
    "one of two": wanted(seed=16, constraint=Constraint(ConstraintKind.CHOICE, '["yes", "no"]')),
}


async def test_server_and_local_engine_sample_equal_ids(
    model_server: ModelServer, float32_engine: PooledEngine
) -> None:
    async with remote(model_server) as engine:
        far = {name: await said(engine, request) for name, request in ASKED.items()}
    async with remote(model_server, dialect=ServerDialect.COMPLETIONS) as engine:
        completed = {name: await said(engine, request) for name, request in ASKED.items()}
    near = {
        name: await anyio.to_thread.run_sync(float32_engine.home.call, said, float32_engine.inner, request)
        for name, request in ASKED.items()
    }
    for name, ours in near.items():
        for theirs in (far[name], completed[name]):
            assert (theirs["ids"], theirs["finish"]) == (ours["ids"], ours["finish"]), name
            assert theirs["logprobs"] == pytest.approx(ours["logprobs"], abs=1e-4), name
            assert theirs["top"] == ours["top"], name
            assert theirs["versions"] == ours["versions"], name
    assert {name: each["finish"][0] for name, each in near.items()}["at least"] is FinishReason.LENGTH


async def test_server_and_local_engine_compute_equal_scores(
    model_server: ModelServer, float32_engine: PooledEngine
) -> None:
    async with remote(model_server) as engine:
        far = await engine.score(PROMPT, start=3)
    async with remote(model_server, dialect=ServerDialect.COMPLETIONS) as engine:
        assert await engine.score(PROMPT, start=3) == pytest.approx(far, abs=1e-6)
    score = partial(float32_engine.inner.score, PROMPT, start=3)
    near = await anyio.to_thread.run_sync(float32_engine.home.call, score)
    assert len(near) == len(PROMPT) - 3
    assert far == pytest.approx(near, abs=1e-4)


async def test_leaving_a_turn_frees_its_place_on_the_server(model_server: ModelServer) -> None:
    async with remote(model_server) as engine:
        with anyio.fail_after(WATCHDOG_SECONDS), anyio.CancelScope() as scope:
            async with engine.stream(wanted(1900, temperature=0.0)) as stream:
                await anext(stream)
                assert await model_server.open_requests() == 1
                scope.cancel()
                await anext(stream)
        assert scope.cancelled_caught
        with anyio.fail_after(WATCHDOG_SECONDS):
            await model_server.until_idle()


async def test_a_folder_of_another_vocabulary_is_refused(model_server: ModelServer, tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"has another vocabulary than the model's folder. In the text 'The quick"):
        await RemoteEngine(model_server.url, byte_model(tmp_path / "other")).__aenter__()


async def test_schema_that_the_server_refuses_fails_its_request_alone(model_server: ModelServer) -> None:
    async with remote(model_server) as engine:
        with pytest.raises(RequestRejected, match=r"episode/main/0: .* refuses the request: .*nothing of the kind"):
            await said(engine, wanted(constraint=Constraint(ConstraintKind.JSON, '{"type": "nothing of the kind"}')))
        assert len((await said(engine, wanted(temperature=0.0)))["ids"]) == 24


async def test_a_run_of_the_calculator_is_exact_and_verified(model_server: ModelServer, tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    async with remote(model_server) as engine:
        run = Run(
            Calculator(questions=6),
            engine,
            file=file,
            group_size=2,
            concurrency=Concurrency(episodes=8),
            limits=Limits(turns=3),
            sampling=Sampling(logprobs=2),
        )
        async with run:
            played = [trajectory async for trajectory in run]
        for trajectory in played:
            assert_exact(trajectory, engine)
        assert engine.stats().open == 0
        await model_server.until_idle()
    assert len(played) == 12
    assert {each.outcome for each in played} <= {Outcome.COMPLETED, Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT}
    spans = [span.version for each in played for segment in each.segments for span in segment.log.versions]
    assert set(spans) == {"default"}
    checked = verify(file, "--model", str(model_server.folder))
    assert checked.exit_code == 0, checked.output
    with RunFile(file) as run_file:
        assert run_file.complete
        assert run_file.header.engine["versions"].keys() == {"vllm"}


async def test_places_and_cached_tokens_are_read_from_the_server(model_server: ModelServer) -> None:
    async with remote(model_server) as engine:
        assert (engine.places, engine.context) == (8, 2048)
        assert engine.describe()["logprobs"] == "processed_logprobs"
        await engine.reset_prefix_cache()
        cached = []
        for _ in range(2):
            stream = engine.stream(wanted(2, temperature=0.0))
            async with stream:
                _ = [delta async for delta in stream]
            assert stream.finish is not None
            cached.append(stream.finish.cached_tokens)
        assert cached == [0, 32]
