"""Faults of a chat API and its connection: each ends a turn, an episode or a run, as documented."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from aiohttp import web

from runner import (
    Concurrency,
    ContextFull,
    Conversation,
    EngineDead,
    EngineError,
    Limits,
    Outcome,
    PromptTooLong,
    RequestRejected,
    Run,
    RunFile,
)
from runner.engines.base import BaseEngine, FinishReason
from runner.engines.chat.engine import ChatEngine
from runner.engines.http_retries import FailureKind, RetryPolicy
from tests.engines.chat.api import QUICK, Api, Says, asked, asking, error, hear, refuses, serving, wanted
from tests.engines.troubles import Trouble, hangs_up, hangs_up_after_the_head, never_begins
from tests.playing import Plain, talking, tasks, until_end
from tests.repository import ROOT

pytestmark = pytest.mark.anyio

WATCHDOG_SECONDS = 600.0
KEY = "sk-secret-0123456789"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def says_nonsense(_: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>Bad gateway</html>", status=502, content_type="text/html")


async def overloaded_in_the_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b'data: {"error": {"type": "overloaded_error", "message": "Overloaded"}}\n\n')
    return response


async def ends_at_once(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: [DONE]\n\n")
    return response


async def played(api: Api, environment: Any = Plain, *, tasks: Any = None, engine: Any = None, **options: Any) -> Any:
    """Return the trajectories of a run, the error that ended it, and the run."""
    run = Run(environment, engine or asking(api), tasks=tasks, **{"retries": 0, **options})
    got: list[Any] = []
    try:
        await until_end(run, got)
    except (EngineDead, EngineError) as failure:
        return got, failure, run
    return got, None, run


# --- retries


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        (refuses(429), FailureKind.BUSY),
        (refuses(503), FailureKind.BUSY),
        (refuses(529), FailureKind.BUSY),
        (refuses(500), FailureKind.SERVER),
        (refuses(408), FailureKind.TIMEOUT),
        (says_nonsense, FailureKind.SERVER),
        (hangs_up, FailureKind.CONNECTION),
        (hangs_up_after_the_head, FailureKind.CONNECTION),
        (overloaded_in_the_stream, FailureKind.BUSY),
        (ends_at_once, FailureKind.CONNECTION),
    ],
    ids=["429", "503", "529", "500", "408", "no JSON", "hangs up", "after the head", "in the stream", "nothing said"],
)
async def test_request_that_fails_before_its_first_piece_is_retried(trouble: Trouble, kind: FailureKind) -> None:
    async with asked("Yes", troubles=[trouble, trouble]) as (api, engine):
        pieces, stream = await hear(engine)
        assert "".join(piece.text for piece in pieces if hasattr(piece, "text")) == "Yes"
        assert engine.retries.counts == {kind: 2}
        assert engine.stats().retried == 2
        assert api.bodies[0] == api.bodies[1] == api.bodies[2]
        assert stream.waited > 0
        assert engine.stats().open == 0


async def test_a_server_that_does_not_begin_in_time_is_asked_again() -> None:
    async with asked("Yes", troubles=[never_begins], engine={"timeout": 0.05}) as (_, engine):
        pieces, _ = await hear(engine)
        assert pieces
        assert engine.retries.counts == {FailureKind.TIMEOUT: 1}


async def test_request_is_not_repeated_after_its_first_piece() -> None:
    for said in (Says("A long answer", cut_after=3), Says("A long answer", error_after=3)):
        async with asked(said) as (api, engine):
            with pytest.raises(EngineError):
                await hear(engine)
            assert len(api.bodies) == 1
            assert not engine.retries.counts


async def test_garbage_is_an_engine_error_and_ends_no_run() -> None:
    async with serving(lambda body: Says("Yes", garbage_after=1 if "Question 0" in str(body) else None)) as api:
        (bad, good), failure, _ = await played(api, tasks=tasks(2), concurrency=Concurrency(episodes=1), breaker=1)
    assert failure is None
    assert (bad.outcome, good.outcome) == (Outcome.ENGINE_ERROR, Outcome.COMPLETED)
    assert "cannot be read" in bad.error


async def test_retries_end_with_their_attempts_and_the_run_s_budget() -> None:
    async with asked("Yes", troubles=[refuses(500)] * 20) as (api, engine):
        with pytest.raises(EngineError, match="HTTP 500: no"):
            await hear(engine)
        assert len(api.bodies) == QUICK.attempts
    policy = RetryPolicy(attempts=10, first_seconds=0.001, longest_seconds=0.001, budget=2)
    async with asked("Yes", troubles=[refuses(500)] * 20, engine={"retries": policy}) as (api, engine):
        with pytest.raises(EngineError):
            await hear(engine)
        assert len(api.bodies) == 3


async def test_openai_s_client_asks_nothing_again_by_itself() -> None:
    once = RetryPolicy(attempts=1)
    async with asked("Yes", troubles=[refuses(500)] * 5, engine={"retries": once}) as (api, engine):
        with pytest.raises(EngineError):
            await hear(engine)
        assert len(api.bodies) == 1


async def test_request_is_not_repeated_if_the_server_forbids_it() -> None:
    async with asked("Yes", troubles=[refuses(503, x_should_retry="false")]) as (api, engine):
        with pytest.raises(EngineError):
            await hear(engine)
        assert len(api.bodies) == 1
        await hear(engine)  # other requests are still answered


async def test_a_retry_after_longer_than_the_policy_takes_fails_at_once() -> None:
    async with asked("Yes", troubles=[refuses(429, Retry_After="121")]) as (api, engine):
        with pytest.raises(EngineError, match="429"):
            await hear(engine)
        assert len(api.bodies) == 1


# --- faults that end a run


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (refuses(401, "Incorrect API key"), "refuses the requests: HTTP 401: Incorrect API key"),
        (refuses(403, "not for you"), "HTTP 403: not for you"),
        (refuses(404, "The model `model` does not exist", "model_not_found"), "The model `model` does not exist"),
        (refuses(402, "pay first"), "HTTP 402: pay first"),
        (refuses(429, "You exceeded your quota", "insufficient_quota"), "You exceeded your quota"),
        (refuses(400, "Unsupported parameter: 'top_p'"), "rejects the requests: HTTP 400: Unsupported parameter"),
    ],
    ids=["401", "403", "404", "402", "no quota", "400"],
)
async def test_common_failure_ends_the_run_at_its_first_episode(trouble: Trouble, words: str) -> None:
    async with serving("Yes", troubles=[trouble] * 50) as api:
        one = Concurrency(episodes=1)
        got, failure, _ = await played(api, tasks=tasks(30), concurrency=one, retries=2)
    assert isinstance(failure, EngineDead)
    assert words in str(failure)
    assert api.url in str(failure)
    assert len(api.bodies) == 1
    assert len(got) <= 1


async def test_a_bad_request_after_good_ones_is_that_episode_s_alone() -> None:
    async with serving("Yes") as api:
        engine = asking(api)
        async with engine:
            await hear(engine)
            api.troubles.append(refuses(400, "no such tool"))
            with pytest.raises(RequestRejected, match="no such tool"):
                await hear(engine)
            await hear(engine)


# --- requests that do not fit


@pytest.mark.parametrize(
    "trouble",
    [
        refuses(400, "too long", "context_length_exceeded"),
        refuses(
            400,
            "This model's maximum context length is 100 tokens. However, your prompt contains 140 input tokens.",
        ),
        refuses(400, "prompt is too long: 205 tokens > 200 maximum"),
        refuses(413, "Request Entity Too Large"),
        refuses(400, "The input token count (140) exceeds the maximum number of tokens allowed (100)."),
    ],
    ids=["OpenAI", "vLLM", "Anthropic", "413", "Gemini"],
)
async def test_a_history_that_does_not_fit_is_the_context_limit(trouble: Trouble) -> None:
    async with serving("Yes", troubles=[trouble]) as api:
        (trajectory, other), failure, _ = await played(api, tasks=tasks(2), concurrency=Concurrency(episodes=1))
    assert failure is None
    assert (trajectory.outcome, trajectory.limit) == (Outcome.CONTEXT_LIMIT, "context")
    assert trajectory.turns == []
    assert other.outcome is Outcome.COMPLETED


async def test_an_author_may_shorten_a_history_that_does_not_fit() -> None:
    said = "This model's maximum context length is 100 tokens. However, your prompt contains 140 input tokens."

    async def talk(conversation: Conversation) -> None:
        with pytest.raises(ContextFull) as full:
            await conversation.generate()
        assert (full.value.prompt, full.value.context) == (140, 100)
        conversation.replace("Shorter?")
        await conversation.generate()

    async with serving("Yes", troubles=[refuses(400, said)]) as api:
        (trajectory,), _, _ = await played(api, talking(talk))
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
    assert api.bodies[1]["messages"] == [{"role": "user", "content": "Shorter?"}]


async def test_prompt_too_long_error_has_the_numbers_of_the_server() -> None:
    said = "This model's maximum context length is 100 tokens. However, your messages resulted in 140 tokens."
    async with asked("Yes", troubles=[refuses(400, said)]) as (_, engine):
        with pytest.raises(PromptTooLong) as long:
            await hear(engine)
    assert (long.value.prompt, long.value.context) == (140, 100)


# --- content filters


async def test_filtered_prompt_is_an_empty_turn() -> None:
    body = error("The response was filtered", "content_filter")
    body["error"]["innererror"] = {"code": "ResponsibleAIPolicyViolation"}

    async def filtered(_: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=400)

    async with serving("Yes", troubles=[filtered]) as api:
        (trajectory,), failure, run = await played(api)
    assert failure is None
    assert trajectory.outcome is Outcome.COMPLETED
    assert [(turn.text, turn.finish) for turn in trajectory.turns] == [("", FinishReason.CONTENT_FILTER)]
    assert run.summary.finishes == {"content_filter": 1}


# --- silence and disconnects


async def test_silent_server_fails_the_turn_and_keeps_its_text() -> None:
    async with serving(Says("A long answer", hold_after=3)) as api:
        (trajectory,), _, _ = await played(api, limits=Limits(stall_seconds=0.5))
    assert trajectory.outcome is Outcome.ENGINE_ERROR
    assert "sent nothing for 0.5 s" in trajectory.error
    assert [(turn.text, turn.finish) for turn in trajectory.turns] == [("A long a", FinishReason.ERROR)]


async def test_a_turn_that_is_cut_keeps_what_was_said_and_ends_its_request() -> None:
    async with serving(Says("A long answer", hold_after=3)) as api:
        (trajectory,), _, _ = await played(api, limits=Limits(seconds=0.5))
        with anyio.fail_after(WATCHDOG_SECONDS):
            while api.open:  # noqa: ASYNC110  # the server only detects the closed connection
                await anyio.sleep(0.005)
    assert (trajectory.outcome, trajectory.limit) == (Outcome.TIME_LIMIT, "seconds")
    assert [(turn.text, turn.finish) for turn in trajectory.turns] == [("A long a", FinishReason.ABORT)]


async def test_stream_left_early_frees_its_place() -> None:
    async with asked(Says("A long answer", hold_after=3), engine={"places": 1}) as (api, engine):
        async with engine.stream(wanted()) as stream:
            await anext(stream)
            assert engine.stats().open == 1
        assert stream.finish is not None
        assert stream.finish.reason is FinishReason.ABORT
        assert engine.stats().open == 0
        api.released.set()
        await hear(engine)


# --- secrets


async def test_the_key_is_in_no_file_no_log_and_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "run.db"
    async with serving("Yes", key=KEY) as api:
        engine = asking(api, headers={"X-Proxy-Key": "proxy-secret-1"})
        (trajectory,), _, _ = await played(api, engine=engine, file=file)
        assert trajectory.outcome is Outcome.COMPLETED
        assert api.headers[0]["X-Proxy-Key"] == "proxy-secret-1"
        assert KEY not in f"{engine!r} {engine.describe()}"
        wrong = asking(api, api_key=f"{KEY}-wrong")
        _, failure, _ = await played(api, engine=wrong, file=tmp_path / "other.db")
    assert "401" in str(failure)
    assert "***" in str(failure)  # the server's answer repeats the key that it received
    kept = b"".join(path.read_bytes() for path in (file, tmp_path / "other.db") if path.exists())
    for secret in (KEY, "proxy-secret-1"):
        assert secret.encode() not in kept
        assert secret not in caplog.text
        assert secret not in str(failure)


async def test_other_servers_never_get_openai_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "project-1")
    async with asked("Yes") as (api, engine):
        await hear(engine)
    sent = str(api.headers[0])
    assert not any(each in sent for each in (KEY, "org-1", "project-1"))


async def test_openai_s_own_server_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(Exception, match="api_key"):
        async with ChatEngine("gpt-x"):
            pass


async def test_api_key_is_masked_in_the_errors_of_a_run_file(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    async with serving("Yes", troubles=[refuses(500, f"cannot use {KEY}")] * 20) as api:
        (trajectory,), _, _ = await played(api, engine=asking(api, api_key=KEY), file=file)
    assert "cannot use ***" in trajectory.error
    with RunFile(file) as run_file:
        assert [row.error for row in run_file.rows(trained=None)] == [trajectory.error]


def test_the_key_that_was_typed_is_not_in_the_log(tmp_path: Path) -> None:
    # In its own process, because the log takes over file descriptors. No server listens, so the run fails.
    typed = ["run", "calculator", "--top-k", "4", "--api-model", "m", "--api-url", "http://127.0.0.1:9/v1"]
    command = [sys.executable, "-c", "from runner.cli.app import main; main()", *typed, "--api-key", KEY]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "top_k=4" in done.stderr
    log = (tmp_path / "runs" / "calculator.log").read_text()
    assert "--api-key ***" in log
    assert KEY not in f"{log} {done.stdout} {done.stderr}"


# --- health


async def test_health_of_a_server_that_is_down_raises_engine_dead() -> None:
    async with serving("Hello.") as api:
        engine = await asking(api).__aenter__()
        await engine.health()  # the server has no list of models, but its refusal is also an answer
    try:
        with anyio.fail_after(WATCHDOG_SECONDS), pytest.raises(EngineDead, match=rf"The server at {api.url} is gone: "):
            await engine.health()
        assert not engine.is_alive()
        assert engine.retries.counts[FailureKind.CONNECTION] == QUICK.attempts - 1
    finally:
        await engine.__aexit__()


@pytest.mark.parametrize(("status", "dies"), [(401, False), (404, False), (500, False), (502, True), (503, True)])
async def test_health_takes_statuses_of_gateways_for_a_dead_server(status: int, dies: bool) -> None:
    async with serving("Hello.", models_status=status) as api, asking(api) as engine:
        if dies:
            with pytest.raises(EngineDead, match=f"is gone: HTTP {status}"):
                await engine.health()
        else:
            await engine.health()
        assert engine.is_alive() is not dies


async def test_run_with_an_idle_chat_engine_ends_with_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChatEngine, "health_interval", BaseEngine.health_interval)

    class Waits(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await anyio.sleep_forever()

    async with serving("Hello.", models_status=502) as api:
        with anyio.fail_after(WATCHDOG_SECONDS):
            _, failure, _ = await played(api, Waits, tasks=tasks(1), limits=Limits(seconds=None))
    assert isinstance(failure, EngineDead)
    assert "is gone: HTTP 502" in str(failure)
