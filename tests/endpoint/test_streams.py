"""Streams of an endpoint: the time at which text arrives, and turns whose client disconnects."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import orjson
import pytest

from runner import Conversation, Endpoint, Limits, Outcome, Sampling
from runner.chat_requests import Again, Delivery
from runner.endpoint import chat_completions, response_events, streaming
from runner.endpoint.wire_form import AnswerWriter
from runner.engines.scripted.script import Fault, Latency, Reply
from runner.testing import ScriptedEngine
from tests.endpoint.serving import RUN, chat_body, events_of, http, served, user
from tests.playing import Plain, play_all, until

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.asyncio_alone, pytest.mark.sample_functions(2)]

ASKED = chat_body([user("One.")], tools=[RUN], stream=True)


def slow(text: str = "A long answer indeed.", between: int = 20) -> ScriptedEngine:
    """An engine that takes time for each id."""
    return ScriptedEngine(lambda _: text, chunks=1, tick=0.001, latency=Latency(first=1, between=between), record=True)


def _recorded(endpoint: Endpoint) -> int:
    return sum(turn.end - turn.start for thread in endpoint.threads for turn in thread.turns)


async def test_deltas_reach_the_client_as_they_are_sampled() -> None:
    """The first sampled text arrives while the turn continues."""
    recorded_counts: list[int] = []

    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client, client.stream("POST", "/chat/completions", json=ASKED) as response:
            lines = (line async for line in response.aiter_lines() if '"content":"' in line)
            recorded_counts.extend([_recorded(endpoint) async for line in lines if '"content":""' not in line])

    await served(loop, slow())
    assert recorded_counts[:3] == [0, 0, 0], "text arrived before the turn was recorded"


async def test_turn_of_a_disconnected_client_is_taken_back() -> None:
    engine = slow(between=50)

    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            async with client.stream("POST", "/chat/completions", json=ASKED) as response:
                async for line in response.aiter_lines():
                    if '"content":"A' in line:
                        break
            await until(lambda: engine.stats().open == 0)
            # The same request without streaming, and without a mark of a retry.
            answer = await client.post("/chat/completions", json={**ASKED, "stream": False})
        assert answer.json()["choices"][0]["message"]["content"] == "A long answer indeed."

    (trajectory,) = await served(loop, engine)
    first, second = trajectory.requests
    assert (first.delivery, second.again) == (Delivery.CUT, Again.TAKEN_BACK)
    assert trajectory.turns[0].retried
    assert not trajectory.turns[1].retried


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_frees_the_engine(stream: bool) -> None:
    """Nothing else would free it, since the sampled text has no end."""
    engine = ScriptedEngine(lambda _: "Words.", chunks=1, tick=0.001, latency=Latency(first=1, between=10**6), places=1)

    async def loop(endpoint: Endpoint) -> None:
        with _asked(endpoint, "first", stream=stream):
            await until(lambda: engine.stats().sampled_tokens > 0)
            assert engine.stats().open == 1
        await until(lambda: engine.stats().open == 0, seconds=DISCONNECT_SECONDS)

    (trajectory,) = await served(loop, engine)
    assert [request.delivery for request in trajectory.requests] == [Delivery.CUT]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_frees_the_engine_also_while_queued(stream: bool) -> None:
    engine = ScriptedEngine(lambda _: "Words.", chunks=1, tick=0.001, latency=Latency(first=1, between=10**6), places=1)

    async def loop(endpoint: Endpoint) -> None:
        with _asked(endpoint, "first", stream=stream):
            await until(lambda: engine.stats().open == 1)
            with _asked(endpoint, "second", stream=stream):
                await until(lambda: engine.stats().waiting == 1)
            await until(lambda: engine.stats().waiting == 0, seconds=DISCONNECT_SECONDS)
            assert engine.stats().open == 1, "the first request continues"
        await until(lambda: engine.stats().open == 0, seconds=DISCONNECT_SECONDS)

    (trajectory,) = await served(loop, engine)
    assert len(trajectory.turns) == 1, "nothing was sampled for the request in the queue"


DISCONNECT_SECONDS = 0.5
"""Time in which the engine must be free after a disconnect: ten times the promised time."""


@contextmanager
def _asked(endpoint: Endpoint, text: str, *, stream: bool) -> Iterator[None]:
    """A client that sends a request, and disconnects at the end of the block."""
    url = httpx.URL(endpoint.base_url)
    body = orjson.dumps(chat_body([user(text)], tools=[RUN], stream=stream))
    head = f"POST {url.path}/chat/completions HTTP/1.1\r\nhost: {url.netloc.decode()}\r\n"
    with socket.create_connection((url.host, url.port or 0)) as client:
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        yield


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", ["chat/completions", "responses", "messages"])
async def test_undelivered_answer_is_replayed_byte_for_byte(form: str, stream: bool, monkeypatch: Any) -> None:
    """The second client receives the undelivered end of the first one's answer, and nothing is sampled."""
    engine = ScriptedEngine(["The answer.", "Another one."], record=True)
    ends: list[bytes] = []
    for module in (chat_completions, response_events):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: 1_700_000_000.0))
    # No text is written before the end, so the end contains the whole answer.
    monkeypatch.setattr(AnswerWriter, "write", lambda writer, progress: b"")
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": [user("One.")], "return_token_ids": True},
        "responses": {"input": "One."},
        "messages": {"messages": [user("One.")], "max_tokens": 100},
    }

    async def loop(endpoint: Endpoint) -> None:
        passed = streaming.ClientConnection.write

        async def losing(line: Any, body: bytes, *, more: bool = True) -> None:
            ends.append(body)
            if len(ends) == 1:
                raise streaming.ClientGone
            await passed(line, body, more=more)

        monkeypatch.setattr(streaming.ClientConnection, "write", losing)
        async with http(endpoint) as client:
            body = {"model": "any", "stream": stream, **bodies[form]}
            with pytest.raises(httpx.HTTPError):
                await client.post(f"/{form}", json=body)
            for _ in range(2):
                assert (await client.post(f"/{form}", json=body)).status_code == 200

    (trajectory,) = await served(loop, engine, serve={"train": True})
    assert [request.again for request in trajectory.requests] == ["", Again.REPLAYED, Again.SIBLING]
    assert len(engine.calls) == 2, "the replay sampled nothing"
    lost, replayed, sibling = ends
    assert lost == replayed != sibling
    assert b"The answer." in replayed


async def test_requests_at_the_same_time_are_siblings_and_never_an_error() -> None:
    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client, anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(ok, client)

    async def ok(client: httpx.AsyncClient) -> None:
        answer = await client.post("/chat/completions", json=ASKED)
        assert answer.status_code == 200

    (trajectory,) = await served(loop, slow(between=5))
    assert sorted(request.again for request in trajectory.requests) == ["", Again.SIBLING, Again.SIBLING]
    assert len({turn.log.ids.tobytes() for turn in trajectory.turns}) >= 1
    assert not any(turn.retried for turn in trajectory.turns)


async def test_waiting_request_is_kept_alive_and_errors_keep_statuses(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(streaming, "FIRST_BYTE_SECONDS", 0.05)
    monkeypatch.setattr(streaming, "KEEP_ALIVE_SECONDS", 0.05)
    engine = ScriptedEngine(lambda _: "Words.", chunks=1, tick=0.001, latency=Latency(first=400, between=1))

    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            bad = await client.post("/chat/completions", json={**ASKED, "temperature": "hot"})
            answer = await client.post("/chat/completions", json=ASKED)
        assert bad.status_code == 400
        assert answer.text.count(": waiting\n\n") >= 2
        assert "".join(each["choices"][0]["delta"].get("content") or "" for each in events_of(answer.text)) == "Words."

    await served(loop, engine)


async def test_stream_is_kept_alive_while_a_call_is_sampled(monkeypatch: Any) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_SECONDS", 0.05)
    call = '<tool_call>\n{"name": "run", "arguments": {"command": "' + "x" * 100 + '"}}\n</tool_call>'
    engine = ScriptedEngine(
        lambda _: call, chunks=1, tick=0.001, latency=Latency(first=1, between=5), template="hermes"
    )

    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            answer = await client.post("/chat/completions", json=ASKED)
        begin, *silence, rest = answer.text.partition('"tool_calls"')[0].split(": waiting\n\n")
        assert '"role":"assistant"' in begin
        assert len(silence) >= 2
        assert rest.startswith("data: ")

    await served(loop, engine)


async def test_ids_sampled_before_a_pause_have_arrived() -> None:
    engine = slow(between=20)
    texts: list[str] = []

    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client, client.stream("POST", "/chat/completions", json=ASKED) as response:
            lines = response.aiter_lines()
            await until(lambda: engine.stats().sampled_tokens > 5)
            await engine.pause(mode="keep")
            sampled = engine.stats().sampled_tokens
            received = 0
            async for line in lines:
                if line.startswith("data: {"):
                    delta = orjson.loads(line.removeprefix("data: "))["choices"][0]
                    received += len(delta.get("token_ids", ()))
                    texts.append(delta["delta"].get("content") or "")
                if received == sampled:
                    break
            assert 0 < len("".join(texts)) < len("A long answer indeed.")
            await engine.resume()
            rest = events_of("\n".join([line async for line in lines]))
            texts.extend(each["choices"][0]["delta"].get("content") or "" for each in rest)

    async def asking_for_ids(endpoint: Endpoint) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(ASKED, "return_token_ids", True)
            await loop(endpoint)

    await served(asking_for_ids, engine)
    assert "".join(texts) == "A long answer indeed."


async def test_client_that_never_reads_blocks_nothing() -> None:
    engine = ScriptedEngine(lambda _: "word " * 10_000, context=100_000)
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

    class Served(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            async with self.episode.serve() as endpoint:
                url = httpx.URL(endpoint.base_url)
                deaf.connect((url.host, url.port or 0))
                body = orjson.dumps({**ASKED, "return_token_ids": True, "logprobs": True, "top_logprobs": 20})
                head = f"POST {url.path}/chat/completions HTTP/1.1\r\nhost: {url.netloc.decode()}\r\n"
                deaf.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
                (connection,) = await _connections(self.episode._state.shared.endpoints)
                await until(lambda: connection.flow.write_paused)
                paused.append(True)
                await anyio.sleep(3600)

    before, paused = asyncio.all_tasks(), list[bool]()
    with deaf:
        (trajectory,) = await play_all(
            Served, engine, sampling=Sampling(max_tokens=60_000), limits=Limits(seconds=6), breaker=1
        )
        assert (paused, trajectory.outcome) == ([True], Outcome.TIME_LIMIT)
        assert engine.stats().open == 0
        assert asyncio.all_tasks() == before, "no task still waits for the client"


async def _connections(server: Any) -> list[Any]:
    await until(lambda: server._server.server_state.connections)
    return list(server._server.server_state.connections)


async def test_every_connection_sends_small_pieces_without_delay() -> None:
    """No small piece waits until the one before it was acknowledged, which takes 40 ms."""
    kept: list[Any] = []

    class Served(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            async with self.episode.serve() as endpoint, http(endpoint) as client:
                await client.post("/chat/completions", json={**ASKED, "stream": False})
                for each in await _connections(self.episode._state.shared.endpoints):
                    own = each.transport.get_extra_info("socket")
                    kept.append(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    await play_all(Served, ["Done."])
    assert kept
    assert all(kept)


async def test_failure_in_a_stream_ends_it_with_a_final_error() -> None:
    engine = ScriptedEngine(lambda _: Reply("A long answer.", chunks=1, fault=Fault.error(at=3)))
    responses: list[httpx.Response] = []

    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            responses.append(await client.post("/chat/completions", json=ASKED))

    await served(loop, engine, outcome=Outcome.ENGINE_ERROR, retries=0, breaker=1)
    (answer,) = responses
    if answer.status_code == 200:  # some of the answer was already sent
        assert events_of(answer.text)[-1]["error"]["code"] == "episode_over"
    else:
        assert (answer.status_code, answer.headers["x-should-retry"]) == (400, "false")


async def test_restarted_turn_breaks_its_stream() -> None:
    """A stream cannot take back text that it has sent, so it breaks off without an end."""
    engine = slow(between=30)

    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            async with anyio.create_task_group() as group:
                group.start_soon(_paused_in_the_middle, engine, endpoint)
                with pytest.raises(httpx.RemoteProtocolError):
                    await client.post("/chat/completions", json=ASKED)
            answer = await client.post("/chat/completions", json=ASKED)
        assert answer.status_code == 200
        said = "".join(each["choices"][0]["delta"].get("content") or "" for each in events_of(answer.text))
        assert said == "A long answer indeed."

    (trajectory,) = await served(loop, engine)
    assert [request.again for request in trajectory.requests] == ["", Again.TAKEN_BACK]


async def _paused_in_the_middle(engine: ScriptedEngine, endpoint: Endpoint) -> None:
    await until(lambda: engine.stats().sampled_tokens > 4)
    await engine.pause(mode="abort")
    await engine.resume()


async def test_requests_beyond_at_once_are_answered_429_and_retry_after() -> None:
    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client, anyio.create_task_group() as group:
            answers: list[httpx.Response] = []

            async def ask(number: int) -> None:
                answers.append(await client.post("/chat/completions", json=chat_body([user(str(number))], tools=[RUN])))

            for number in range(4):
                group.start_soon(ask, number)
            await until(lambda: len(answers) == 4)
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses == [200, 200, 429, 429]
        busy = next(answer for answer in answers if answer.status_code == 429)
        assert busy.headers["retry-after"] == "1"
        assert busy.headers["x-should-retry"] == "true"

    await served(loop, slow(between=5), serve={"at_once": 2})
