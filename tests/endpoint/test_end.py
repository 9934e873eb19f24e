"""A client says that it is done with its episode: what it is answered then, and what becomes of it."""

from __future__ import annotations

from typing import Any

import anyio
import httpx
import pytest

from runner import Endpoint, Outcome
from runner.endpoint import endpoint as endpoint_module
from runner.testing import Latency, ScriptedEngine
from tests.endpoint.serving import RUN, chat_body, http, served, until, user
from tests.endpoint.test_programs import python

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone]

ASKED = chat_body([user("One.")], tools=[RUN])
FORMS = ("chat/completions", "responses", "messages", "messages/count_tokens", "end")
SAYS_SO = """
base_url = os.environ["OPENAI_BASE_URL"]
def end(said):
    urllib.request.urlopen(urllib.request.Request(base_url + "/end", json.dumps(said).encode(), method="POST"))
ask("One.")
"""


async def test_who_has_said_so_is_answered_nothing_further_though_nobody_waits_for_it() -> None:
    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            await client.post("/chat/completions", json=ASKED)
            before = endpoint.over
            assert (await client.post("/end")).status_code == 200
            assert (before, endpoint.over) == (False, True)
            for form in FORMS:
                answer = await client.post(f"/{form}", json=ASKED)
                assert (answer.status_code, answer.headers["x-should-retry"]) == (400, "false"), form
                assert "episode is over" in answer.text
        assert await endpoint.wait() == {}

    (trajectory,) = await served(loop, ["Done.", "Never said."])
    assert [turn.text for turn in trajectory.turns] == ["Done."]


async def test_what_it_said_is_told_to_who_waits_then_or_later() -> None:
    async def loop(endpoint: Endpoint) -> None:
        told: list[Any] = []

        async def wait() -> None:
            told.append(await endpoint.wait())

        async with http(endpoint) as client:
            await client.post("/chat/completions", json=ASKED)
            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                await client.post("/end", json={"reward": 0.5, "more": "is not read"})
        assert [*told, await endpoint.wait()] == [{"reward": 0.5}] * 2

    await served(loop, ["Done."])


async def test_a_reward_that_is_no_number_is_refused_and_ends_nothing() -> None:
    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            refused = await client.post("/end", json={"reward": "good"})
            assert refused.status_code == 400
            assert "reward" in refused.text
            assert not endpoint.over
            assert (await client.post("/chat/completions", json=ASKED)).status_code == 200

    await served(loop, ["Done."])


async def test_what_is_being_answered_when_it_says_so_is_answered() -> None:
    engine = ScriptedEngine(["A long answer."], chunks=1, tick=0.001, latency=Latency(first=1, between=20), record=True)

    async def loop(endpoint: Endpoint) -> None:
        answers: list[httpx.Response] = []

        async def ask() -> None:
            answers.append(await client.post("/chat/completions", json=ASKED))

        async with http(endpoint) as client, anyio.create_task_group() as group:
            group.start_soon(ask)
            await until(lambda: engine.stats().sampled_tokens > 0)
            await engine.pause(mode="keep")
            await client.post("/end")
            assert not answers
            await engine.resume()
        assert [each.json()["choices"][0]["message"]["content"] for each in answers] == ["A long answer."]

    (trajectory,) = await served(loop, engine)
    assert [turn.text for turn in trajectory.turns] == ["A long answer."]


@pytest.mark.parametrize("then", ["sys.exit(3)", "import time; time.sleep(600)"], ids=["by itself", "not"])
async def test_a_program_that_says_so_has_ten_seconds_to_end_whatever_its_code(then: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(endpoint_module, "LAST_SECONDS", 0.2 if "sleep" in then else 50.0)
    told: list[Any] = []

    async def loop(endpoint: Endpoint) -> None:
        try:
            await endpoint.run(python(f"{SAYS_SO}end({{'reward': 1}}); {then}"))
        finally:
            told.append(await endpoint.wait())

    (trajectory,) = await served(loop, ["Done."], outcome=Outcome.COMPLETED)
    assert told == [{"reward": 1.0}]
    assert trajectory.error == ""
