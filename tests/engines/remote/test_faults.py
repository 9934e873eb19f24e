"""Faults of a server and its connection: each ends a request, an episode or a run, as documented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from aiohttp import web

from runner import Concurrency, EngineDead, EngineError, Limits, Outcome, RequestRejected, Run
from runner.engines.base import FinishReason
from runner.engines.http_retries import FailureKind
from runner.engines.remote.dialect import ServerDialect
from runner.engines.remote.engine import RemoteEngine
from runner.errors import BadModel, BadOption
from runner.options import Constraint, ConstraintKind
from runner.testing import Latency
from tests.engines.remote.model_folder import byte_model
from tests.engines.remote.remote_requests import TEXT, asked, read, remote, serve, text_of, wanted
from tests.engines.troubles import Trouble, hangs_up, hangs_up_after_the_head, hangs_up_in_a_line, never_begins
from tests.playing import Plain, tasks

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone]

WATCHDOG_SECONDS = 600.0

KEY = "sk-secret-0123456789"


# --- faults


def answers(status: int, text: str = "", **headers: str) -> Trouble:
    async def trouble(_: web.Request) -> web.StreamResponse:
        body = {"error": {"message": text, "code": status}}
        return web.json_response(body, status=status, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return trouble


def says(*events: bytes) -> Trouble:
    async def trouble(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        for event in events:
            await response.write(b"data: " + event + b"\n\n")
        await response.write_eof()
        return response

    return trouble


# --- at the start


async def test_refused_key_at_the_start_has_the_fix(tmp_path: Path) -> None:
    async with serve(tmp_path, key="right") as server:
        with pytest.raises(BadOption, match=r"refuses the key: .*401: Unauthorized. Give its key as api_key="):
            await remote(server, tmp_path, api_key="wrong").__aenter__()
        async with remote(server, tmp_path, api_key="right") as engine:
            assert text_of(await read(engine)) == TEXT


async def test_missing_endpoint_at_the_start_has_the_fix(tmp_path: Path) -> None:
    async with serve(tmp_path, dialect=ServerDialect.COMPLETIONS) as server:
        with pytest.raises(BadOption, match=r"/inference/v1/generate answered 404.*--enable-scale-out"):
            await remote(server, tmp_path, dialect=None).__aenter__()


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_dialect_of_a_server_is_found_without_an_option(tmp_path: Path, dialect: str) -> None:
    async with (
        serve(tmp_path, dialect=ServerDialect(dialect)) as server,
        remote(server, tmp_path, dialect=None) as engine,
    ):
        assert engine.describe()["dialect"] == dialect
        assert text_of(await read(engine)) == TEXT


async def test_another_vocabulary_is_refused_by_the_first_difference(tmp_path: Path) -> None:
    def shifted(text: str) -> list[int]:
        return [each + (each == ord("j")) for each in server.engine.tokenizer.encode(text)]

    async with serve(tmp_path, tokenize=shifted) as server:
        with pytest.raises(
            BadModel, match=r"'The quick brown .* after 'ox ', the server has the id 107 \('k' in .* 106 \('j'"
        ):
            await remote(server, tmp_path).__aenter__()


async def test_a_server_that_lacks_a_control_token_is_refused_by_its_name(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        other = byte_model(tmp_path / "other", further=["<|extra|>"])
        with pytest.raises(BadModel, match=r"has the id 60 \('<' in .*, and the folder the id 259 \('<\|extra\|>' in"):
            await RemoteEngine(server.url, other).__aenter__()


async def test_unknown_model_is_refused_with_the_served_ones(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        with pytest.raises(BadModel, match=r"has no model 'qwen', only scripted. Give the name of one of these"):
            await remote(server, tmp_path, name="qwen").__aenter__()
        async with remote(server, tmp_path, name="scripted") as engine:
            await read(engine)
        assert server.bodies[-1]["model"] == "scripted"


async def test_unreachable_server_is_reported_after_the_retries(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        pass
    engine = remote(server, tmp_path)
    with pytest.raises(EngineError, match=f"{server.url} cannot be used: "):
        await engine.__aenter__()
    assert engine.retries.counts == {FailureKind.CONNECTION: 2}


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://there", "http://"])
async def test_invalid_server_address_is_refused(url: str) -> None:
    with pytest.raises(BadOption, match="give the server's address"):
        RemoteEngine(url)


@pytest.mark.parametrize("url", ["http://me:secret@there:8000", "http://there/?key=1"])
async def test_secret_in_the_address_is_refused(url: str) -> None:
    with pytest.raises(BadOption, match="api_key="):
        RemoteEngine(url)


async def test_an_address_may_end_as_clients_of_openai_want_it(tmp_path: Path) -> None:
    async with serve(tmp_path) as server, RemoteEngine(f"{server.url}/v1/", tmp_path / "model") as engine:
        assert engine.describe()["server"] == server.url


# --- before the first id


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        (answers(429, "full", Retry_After="0"), FailureKind.BUSY),
        (answers(503, "starting"), FailureKind.BUSY),
        (hangs_up, FailureKind.CONNECTION),
        (hangs_up_after_the_head, FailureKind.CONNECTION),
        (hangs_up_in_a_line, FailureKind.CONNECTION),
        (says(b'{"error": {"message": "a rank is lost", "code": 503}}'), FailureKind.BUSY),
    ],
    ids=["429", "503", "no answer", "no id", "half an event", "503 in the answer"],
)
async def test_request_that_fails_before_its_first_id_is_retried(
    tmp_path: Path, trouble: Trouble, kind: FailureKind
) -> None:
    async with asked(tmp_path, troubles=[trouble]) as (server, engine):
        assert text_of(await read(engine)) == TEXT
        assert len(server.bodies) == 2
        assert server.bodies[0] == server.bodies[1]
        assert engine.retries.counts == {kind: 1}


async def test_a_request_that_stays_refused_fails_alone_after_the_last_try(tmp_path: Path) -> None:
    async with asked(tmp_path, troubles=[answers(429, "full")] * 3) as (server, engine):
        with pytest.raises(EngineError, match=r"episode/main/0: .* answered 429: full"):
            await read(engine)
        assert len(server.bodies) == 3
        assert text_of(await read(engine)) == TEXT
        assert engine.is_alive()


async def test_a_server_that_wants_to_be_left_alone_for_long_is(tmp_path: Path) -> None:
    async with asked(tmp_path, troubles=[answers(429, "tomorrow", Retry_After="86400")]) as (server, engine):
        with pytest.raises(EngineError, match="tomorrow"):
            await read(engine)
        assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (answers(500, "out of memory"), "answered 500: out of memory"),
        (says(b"{not json"), "cannot be read"),
        (says(b'{"choices": [{"index": 0}]}'), r"cannot be read \(KeyError"),
        (says(b"[1, 2]"), "an event that is not an object"),
        (says(b'{"error": {"message": "no memory", "code": 500}}'), "no memory"),
        (answers(302), "answered 302"),
    ],
    ids=["500", "no json", "no fields", "no object", "error", "redirection"],
)
async def test_server_error_fails_only_its_request_at_once(tmp_path: Path, trouble: Trouble, said: str) -> None:
    async with asked(tmp_path, troubles=[trouble]) as (server, engine):
        stream = engine.stream(wanted())
        with pytest.raises(EngineError, match=said) as raised:
            async with stream:
                await anext(stream)
        assert not isinstance(raised.value, EngineDead)
        assert stream.finish is not None
        assert stream.finish.reason is FinishReason.ERROR
        assert len(server.bodies) == 1
        assert text_of(await read(engine)) == TEXT


@pytest.mark.parametrize(
    "trouble",
    [
        answers(500, f"cannot use {KEY}"),
        says(b'{"error": {"message": "cannot use %b", "code": 500}}' % KEY.encode()),
        says(b"{cannot use %b" % KEY.encode()),
        says(b'{"choices": [{"index": 0, "token_ids": ["cannot use %b"]}]}' % KEY.encode()),
    ],
    ids=["status", "in the answer", "no json", "no id"],
)
async def test_key_that_a_server_repeats_is_masked_in_errors(tmp_path: Path, trouble: Trouble) -> None:
    async with asked(tmp_path, key=KEY, engine={"api_key": KEY}, troubles=[trouble]) as (_, engine):
        with pytest.raises(EngineError, match=r"cannot use \*\*\*") as raised:
            await read(engine)
        assert KEY not in str(raised.value)


async def test_a_server_that_does_not_begin_to_answer_is_given_up_in_time(tmp_path: Path) -> None:
    async with asked(tmp_path, troubles=[never_begins], engine={"timeout": 0.5}) as (server, engine):
        with anyio.fail_after(WATCHDOG_SECONDS), pytest.raises(EngineError, match=r"did not answer within 0\.5 s"):
            await read(engine)
        assert len(server.bodies) == 1
        assert text_of(await read(engine)) == TEXT


async def test_rejected_request_ends_the_engine_by_name(tmp_path: Path) -> None:
    async with asked(tmp_path, troubles=[answers(400, "no such field: token_ids")]) as (_, engine):
        for _ in range(2):
            with pytest.raises(EngineDead, match=r"rejects the requests: .*no such field: token_ids"):
                await read(engine)
        with pytest.raises(EngineDead, match="no such field"):
            await engine.health()


async def test_rejected_constraint_fails_only_its_request(tmp_path: Path) -> None:
    schema = Constraint(ConstraintKind.JSON, "{}")
    async with asked(tmp_path, troubles=[answers(400, "no such schema")]) as (_, engine):
        with pytest.raises(RequestRejected, match=r"episode/main/0: .*no such schema"):
            await read(engine, wanted(constraint=schema))
        assert text_of(await read(engine, wanted(constraint=schema))) == TEXT


# --- after an id


async def test_broken_stream_is_not_retried_and_keeps_its_ids(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"latency": Latency(between=1), "tick": 0.001, "cut_after": 5}
    async with asked(tmp_path, **settings) as (server, engine):
        stream, ids = engine.stream(wanted()), list[int]()

        async def read_all() -> None:
            async with stream:
                async for delta in stream:
                    ids.extend(delta.token_ids)

        with pytest.raises(EngineError, match="episode/main/0: "):
            await read_all()
        assert bytes(ids).decode() == TEXT[: len(ids)]
        assert 0 < len(ids) <= 5
        assert len(server.bodies) == 1
        assert engine.retries.counts.total() == 0
        assert stream.finish is not None
        assert stream.finish.reason is FinishReason.ERROR
        assert [(span.start, span.end) for span in stream.finish.versions] == [(0, len(ids))]


# --- runs


async def play(run: Run) -> list[Outcome]:
    outcomes: list[Outcome] = []
    async with run:
        async for trajectory in run:
            outcomes.append(trajectory.outcome)  # noqa: PERF401  # outcomes before an error count too
    return outcomes


async def test_a_request_that_breaks_off_is_played_again_by_its_run(tmp_path: Path) -> None:
    async with asked(tmp_path, troubles=[answers(500, "out of memory")]) as (_, engine):
        run = Run(Plain(), engine, tasks=tasks(4))
        assert await play(run) == [Outcome.COMPLETED] * 4
        assert run.summary.retried == 1


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_refusal_ends_the_run_at_its_first_episode(tmp_path: Path, status: int) -> None:
    troubles = [answers(status, "not you")] * 100
    async with asked(tmp_path, troubles=troubles) as (server, engine):
        run = Run(Plain(), engine, tasks=tasks(50), retries=3)
        with pytest.raises(EngineDead, match=rf"{server.url} refuses the requests: .*{status}: not you"):
            await play(run)
        assert len(server.bodies) <= engine.places
        assert run.summary.retried == 0


async def test_server_that_disappears_ends_the_run_by_name(tmp_path: Path) -> None:
    async def vanishes(request: web.Request) -> web.StreamResponse | None:
        await server.vanish()
        return await hangs_up(request)

    async with asked(tmp_path, troubles=[vanishes] * 50) as (server, engine):
        # One episode at a time: no other connects while the server ends.
        run = Run(Plain(), engine, tasks=tasks(50), retries=1, concurrency=Concurrency(episodes=1))
        with anyio.fail_after(WATCHDOG_SECONDS), pytest.raises(EngineDead, match=f"{server.url} is gone: "):
            await play(run)


async def test_long_first_prompt_reaches_the_context_limit(tmp_path: Path) -> None:
    async with asked(tmp_path, context=20) as (server, engine):
        run = Run(Plain(), engine, tasks=tasks(1), limits=Limits(turns=3))
        assert await play(run) == [Outcome.CONTEXT_LIMIT]
        assert server.bodies == []
