"""Keys of a request: the places where clients put them, and the one that counts if there are two."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest

from runner import Conversation, Endpoint, Outcome
from tests.endpoint.serving import RUN, chat_body, served, user
from tests.playing import Plain, play, recording

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone]

ASKED = chat_body([user("One.")], tools=[RUN])
WRONG = "sk-ant-of-another-server"


async def statuses(endpoint: Endpoint, *headers: dict[str, str]) -> list[int]:
    """Return the statuses of requests with these headers, without a key in the address."""
    url = endpoint.base_url.partition("/e/")[0] + "/v1/models"
    async with httpx.AsyncClient() as client:
        return [(await client.get(url, headers=each)).status_code for each in headers]


async def test_request_is_accepted_only_with_a_right_key_in_a_header() -> None:
    async def loop(endpoint: Endpoint) -> None:
        right, bearer = endpoint.api_key, "authorization"
        assert (
            await statuses(
                endpoint,
                {bearer: f"Bearer {right}", "x-api-key": right},
                {bearer: f"Bearer {WRONG}", "x-api-key": right},
                {bearer: f"Bearer {right}", "x-api-key": WRONG},
                {bearer: f"bearer  {right}"},
                {bearer: "Basic abc", "x-api-key": right},
                {bearer: f"Bearer {right}", "x-api-key": ""},
            )
            == [200] * 6
        )
        assert (
            await statuses(
                endpoint,
                {bearer: f"Bearer {WRONG}", "x-api-key": WRONG},
                {bearer: f"Bearer {WRONG}"},
                {bearer: "Bearer"},
                {bearer: right},
                {},
            )
            == [401] * 5
        )

    await served(loop, recording(["Never said."], template="hermes"))


@pytest.mark.parametrize("wrong", ["auth_token", "api_key"])
async def test_anthropics_client_with_a_token_of_another_server_is_answered(wrong: str, monkeypatch: Any) -> None:
    """The user's environment sets one variable, and the program passes the key in the other one."""

    async def loop(endpoint: Endpoint) -> None:
        right = {"auth_token": "api_key", "api_key": "auth_token"}[wrong]
        monkeypatch.setenv(f"ANTHROPIC_{wrong.upper()}", WRONG)
        keys: Any = {right: endpoint.api_key}
        urls = (endpoint.root_url, endpoint.root_url.partition("/e/")[0])
        for url in urls:
            async with anthropic.AsyncAnthropic(base_url=url, max_retries=0, **keys) as client:
                answer = await client.messages.create(model="any", max_tokens=50, messages=[user("One.")])
            assert [getattr(each, "text", "") for each in answer.content] == ["Done."]

    await served(loop, recording(["Done.", "Done."], template="hermes"), serve={"train": True})


async def test_a_right_key_counts_beside_one_of_an_episode_that_is_over() -> None:
    class Served(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            async with self.episode.serve() as before:
                over = before.api_key
            async with self.episode.serve() as endpoint:
                both = {"authorization": f"Bearer {over}", "x-api-key": endpoint.api_key}
                assert await statuses(endpoint, both) == [200]
                assert await statuses(endpoint, {"authorization": f"Bearer {over}", "x-api-key": WRONG}) == [400]

    trajectory = await play(Served, ["Never said."])
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
