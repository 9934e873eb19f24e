"""Streams of an endpoint: what arrives when, and what becomes of a turn whose client goes away."""

from __future__ import annotations

from typing import Any

import anyio
import httpx
import orjson
import pytest

from runner import Endpoint, Outcome
from runner.chat_requests import Again, Delivery
from runner.endpoint import streaming
from runner.engines.scripted.script import Fault, Latency, Reply
from runner.testing import ScriptedEngine
from tests.endpoint.serving import RUN, chat_body, events_of, http, served, until, user

pytestmark = pytest.mark.anyio

ASKED = chat_body([user("One.")], tools=[RUN], stream=True)


def slow(text: str = "A long answer indeed.", between: int = 20) -> ScriptedEngine:
    """An engine whose ids take their time."""
    return ScriptedEngine(lambda _: text, chunks=1, tick=0.001, latency=Latency(first=1, between=between), record=True)


def _recorded(endpoint: Endpoint) -> int:
    return sum(turn.end - turn.start for thread in endpoint.threads for turn in thread.turns)


async def test_deltas_reach_the_client_as_they_are_sampled() -> None:
    """What was sampled first has arrived while the turn goes on."""
    heard: list[int] = []

    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client, client.stream("POST", "/chat/completions", json=ASKED) as response:
            told = (line async for line in response.aiter_lines() if '"content":"' in line)
            heard.extend([_recorded(endpoint) async for line in told if '"content":""' not in line])

    await served(loop, slow())
    assert heard[:3] == [0, 0, 0], "pieces were heard before the turn was recorded"


async def test_a_client_that_goes_away_frees_the_engine_and_its_turn_is_taken_back_when_it_asks_again() -> None:
    engine = slow(between=50)

    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            async with client.stream("POST", "/chat/completions", json=ASKED) as response:
                async for line in response.aiter_lines():
                    if '"content":"A' in line:
                        break
            await until(lambda: engine.stats().open == 0)
            # The same by another transport, without a mark of a retry.
            answer = await client.post("/chat/completions", json={**ASKED, "stream": False})
        assert answer.json()["choices"][0]["message"]["content"] == "A long answer indeed."

    (trajectory,) = await served(loop, engine)
    first, second = trajectory.requests
    assert (first.delivery, second.again) == (Delivery.CUT, Again.TAKEN_BACK)
    assert trajectory.turns[0].retried
    assert not trajectory.turns[1].retried


async def test_a_client_that_goes_away_while_it_waits_leaves_the_queue() -> None:
    engine = ScriptedEngine(lambda _: "Words.", chunks=1, tick=0.001, latency=Latency(first=1, between=50), places=1)

    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client, anyio.create_task_group() as group:
            group.start_soon(lambda: client.post("/chat/completions", json=chat_body([user("first")], tools=[RUN])))
            await until(lambda: engine.stats().open == 1)
            with anyio.move_on_after(0.2):
                await client.post("/chat/completions", json=chat_body([user("second")], tools=[RUN]))
            await until(lambda: engine.stats().waiting == 0)

    await served(loop, engine)
    assert engine.stats().open == 0


async def test_an_answer_that_was_finished_and_not_delivered_is_replayed_byte_for_byte(monkeypatch: Any) -> None:
    engine = ScriptedEngine(["The answer.", "Another one."], record=True)
    bodies: list[bytes] = []
    lost = iter([True])

    async def loop(endpoint: Endpoint) -> None:
        passed = streaming._Line.write

        async def losing(line: Any, body: bytes, *, more: bool = True) -> None:
            if not more and next(lost, False):
                raise streaming._Gone
            if not more:
                bodies.append(body)
            await passed(line, body, more=more)

        monkeypatch.setattr(streaming._Line, "write", losing)
        async with http(endpoint) as client:
            body = chat_body([user("One.")], tools=[RUN], return_token_ids=True)
            with pytest.raises(httpx.HTTPError):
                await client.post("/chat/completions", json=body)
            for _ in range(2):
                await client.post("/chat/completions", json=body)

    (trajectory,) = await served(loop, engine)
    assert [request.again for request in trajectory.requests] == ["", Again.REPLAYED, Again.SIBLING]
    assert len(engine.calls) == 2, "the replay sampled nothing"
    said = [orjson.loads(body)["choices"][0]["token_ids"] for body in bodies]
    assert said == [list(turn.token_ids) for turn in trajectory.turns]


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


async def test_a_request_that_waits_hears_that_it_is_heard_and_errors_before_keep_their_status(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(streaming, "FIRST_BYTE", 0.05)
    monkeypatch.setattr(streaming, "KEEP_ALIVE", 0.05)
    engine = ScriptedEngine(lambda _: "Words.", chunks=1, tick=0.001, latency=Latency(first=400, between=1))

    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            bad = await client.post("/chat/completions", json={**ASKED, "temperature": "hot"})
            answer = await client.post("/chat/completions", json=ASKED)
        assert bad.status_code == 400
        assert answer.text.count(": waiting\n\n") >= 2
        assert "".join(each["choices"][0]["delta"].get("content") or "" for each in events_of(answer.text)) == "Words."

    await served(loop, engine)


async def test_what_fails_in_the_middle_of_a_stream_ends_it_with_an_error_that_is_not_to_be_tried_again() -> None:
    engine = ScriptedEngine(lambda _: Reply("A long answer.", chunks=1, fault=Fault.error(at=3)))
    told: list[httpx.Response] = []

    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            told.append(await client.post("/chat/completions", json=ASKED))

    await served(loop, engine, outcome=Outcome.ENGINE_ERROR, retries=0, breaker=1)
    (answer,) = told
    if answer.status_code == 200:  # some of it was told before
        assert events_of(answer.text)[-1]["error"]["code"] == "episode_over"
    else:
        assert (answer.status_code, answer.headers["x-should-retry"]) == (400, "false")


async def test_a_turn_that_is_sampled_anew_after_some_of_it_was_told_is_cut_and_the_client_asks_again() -> None:
    """A stream cannot take back what it told; so the client gets no end of it."""
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


async def test_more_requests_than_may_be_in_flight_are_told_to_wait() -> None:
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
