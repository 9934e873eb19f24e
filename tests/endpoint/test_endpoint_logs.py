"""Log records of an endpoint: refused requests, answers that were cut, and clients that disconnect."""

from __future__ import annotations

import logging

import anyio
import pytest

from runner import Conversation, Endpoint
from runner.engines.scripted.script import Latency
from runner.testing import ScriptedEngine
from tests.endpoint.serving import RUN, chat_body, http, served, user
from tests.playing import Plain, play_all, until

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone]

ASKED = chat_body([user("One.")], tools=[RUN], stream=True)


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="deltarunner.endpoint")


def slow() -> ScriptedEngine:
    return ScriptedEngine(lambda _: "A long answer.", chunks=1, tick=0.001, latency=Latency(first=1, between=100))


def messages_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "deltarunner.endpoint"]


async def test_refusals_are_logged_without_keys_and_bodies(caplog: pytest.LogCaptureFixture) -> None:
    keys = ["sk-of-another-server"]

    async def loop(endpoint: Endpoint) -> None:
        keys.append(endpoint.api_key)
        async with http(endpoint) as client:
            await client.post("/chat/completions", json={**ASKED, "temperature": "private words"})
            await client.post("/nothing", json={})
            url = endpoint.base_url.replace(endpoint.api_key, keys[0])
            await client.get(f"{url}/models", headers={"authorization": f"Bearer {keys[0]}"})

    await served(loop, ["Never said."])
    assert messages_of(caplog) == [
        "a request was refused with 400: invalid_request",
        "a request was refused with 404: not_found",
        "a request was refused with 401: invalid_api_key",
    ]
    assert not [secret for secret in (*keys, "private words") if secret in "".join(messages_of(caplog))]


async def test_client_that_disconnects_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine = slow()

    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            async with client.stream("POST", "/chat/completions", json=ASKED) as response:
                await anext(response.aiter_lines())
            await until(lambda: engine.stats().open == 0)
            await client.get("/models")

    await served(loop, engine)
    assert messages_of(caplog) == ["a client disconnected before its answer was complete; its turn is cut"]


async def test_answer_cut_at_the_end_of_the_block_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine = slow()

    class Served(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            async with anyio.create_task_group() as group, self.episode.serve() as endpoint:
                group.start_soon(self.ask, endpoint)
                await until(lambda: engine.stats().sampled_tokens > 4)
            await conversation.generate()

        async def ask(self, endpoint: Endpoint) -> None:
            async with http(endpoint) as client:
                await client.post("/chat/completions", json=ASKED)

    await play_all(Served, engine)
    assert messages_of(caplog) == ["an answer was cut: episode_over"]
