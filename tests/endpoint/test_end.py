"""A client reports the end of its episode: the response that it gets, and the end of the episode."""

from __future__ import annotations

from typing import Any

import anyio
import httpx
import pytest

from runner import Endpoint, Outcome
from runner.endpoint import endpoint as endpoint_module
from runner.testing import Latency, ScriptedEngine
from tests.endpoint.serving import RUN, chat_body, http, served, user
from tests.endpoint.test_programs import python
from tests.playing import Plain, play_all, until

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone]

ASKED = chat_body([user("One.")], tools=[RUN])
FORMS = ("chat/completions", "responses", "messages", "messages/count_tokens", "end")
SAYS_SO = """
base_url = os.environ["OPENAI_BASE_URL"]
def end(said):
    urllib.request.urlopen(urllib.request.Request(base_url + "/end", json.dumps(said).encode(), method="POST"))
ask("One.")
"""


async def test_ended_episode_answers_nothing_further() -> None:
    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            await client.post("/chat/completions", json=ASKED)
            before = endpoint.over
            assert (await client.post("/end")).status_code == 200
            assert (before, endpoint.over) == (False, True)
            for form in FORMS:
                answer = await client.post(f"/{form}", json=ASKED)
                assert (answer.status_code, answer.headers["x-should-retry"]) == (400, "false"), form
                assert "the episode has ended" in answer.text
        assert await endpoint.wait() == {}

    (trajectory,) = await served(loop, ["Done.", "Never said."])
    assert [turn.text for turn in trajectory.turns] == ["Done."]


async def test_reward_is_returned_to_waits_before_and_after_the_end() -> None:
    async def loop(endpoint: Endpoint) -> None:
        results: list[Any] = []

        async def wait() -> None:
            results.append(await endpoint.wait())

        async with http(endpoint) as client:
            await client.post("/chat/completions", json=ASKED)
            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                await client.post(endpoint.end_url, json={"reward": 0.5, "more": "is not read"})
        assert [*results, await endpoint.wait()] == [{"reward": 0.5}] * 2

    await served(loop, ["Done."])


async def test_reward_that_is_not_a_number_is_refused_and_ends_nothing() -> None:
    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            refused = await client.post(endpoint.end_url, json={"reward": "good"})
            assert refused.status_code == 400
            assert "reward" in refused.text
            assert not endpoint.over
            assert (await client.post("/chat/completions", json=ASKED)).status_code == 200

    await served(loop, ["Done."])


@pytest.mark.parametrize("reward", [1, 0, -1, 0.5])
async def test_a_reward_with_the_programs_key_is_refused_and_ends_nothing(reward: float) -> None:
    async def loop(endpoint: Endpoint) -> None:
        urls = [
            f"{endpoint.base_url}/end",
            f"{endpoint.root_url}/end",
            endpoint.base_url.partition("/e/")[0] + "/v1/end",
        ]
        async with http(endpoint) as client:
            for url in urls:
                refused = await client.post(url, json={"reward": reward})
                assert (refused.status_code, refused.headers["x-should-retry"]) == (403, "false"), url
                assert "end_url" in refused.json()["error"]["message"]
            assert not endpoint.over
            assert (await client.post("/chat/completions", json=ASKED)).status_code == 200
            assert (await client.post("/end", json={"reward": None})).status_code == 200
        assert await endpoint.wait() == {}

    await served(loop, ["Done."])


async def test_reward_key_is_hidden_from_programs() -> None:
    async def loop(endpoint: Endpoint) -> None:
        (end_key,) = set(endpoint.end_url.split("/")) - set(endpoint.base_url.split("/")) - {"end"}
        prints = "files = [each.read_text() for each in pathlib.Path.home().rglob('*') if each.is_file()]"
        program = await endpoint.run(python(f"import os, pathlib\n{prints}\nprint(dict(os.environ), files)"))
        assert endpoint.api_key in program.stdout
        assert end_key not in program.stdout
        root = endpoint.base_url.partition("/e/")[0]
        async with httpx.AsyncClient() as client:
            for path in (*FORMS[:-1], "models"):
                for url, headers in (
                    (f"{root}/e/{end_key}/v1/{path}", {}),
                    (f"{root}/v1/{path}", {"authorization": f"Bearer {end_key}"}),
                    (f"{root}/v1/{path}", {"x-api-key": end_key}),
                ):
                    assert (
                        await client.request("GET" if path == "models" else "POST", url, headers=headers)
                    ).status_code == 401

    await served(loop, [])


@pytest.mark.parametrize("where", ["in the URL", "as bearer", "as x-api-key", "beside the program's key"])
async def test_reward_is_accepted_with_its_key_in_url_or_header(where: str) -> None:
    async def loop(endpoint: Endpoint) -> None:
        root, end_key = endpoint.base_url.partition("/e/")[0], endpoint.end_url.split("/")[4]
        url, headers = {
            "in the URL": (endpoint.end_url, {}),
            "as bearer": (f"{root}/v1/end", {"authorization": f"Bearer {end_key}"}),
            "as x-api-key": (f"{root}/v1/end", {"x-api-key": end_key}),
            "beside the program's key": (f"{endpoint.base_url}/end", {"authorization": f"Bearer {end_key}"}),
        }[where]
        async with httpx.AsyncClient() as client:
            assert (await client.post(url, headers=headers, json={"reward": 0.25})).status_code == 200
            again = await client.post(url, headers=headers, json={"reward": 1})
            assert (again.status_code, again.json()["error"]["code"]) == (400, "episode_over")
        assert await endpoint.wait() == {"reward": 0.25}

    await served(loop, [])


async def test_reward_is_accepted_while_the_request_limit_is_reached() -> None:
    async def loop(endpoint: Endpoint) -> None:
        endpoint._route.in_flight += endpoint._route.max_requests
        async with http(endpoint) as client:
            assert (await client.post("/end")).status_code == 429
            assert (await client.post(endpoint.end_url, json={"reward": 1})).status_code == 200
        endpoint._route.in_flight -= endpoint._route.max_requests

    await served(loop, [])


async def test_both_keys_of_a_closed_block_are_answered_episode_over() -> None:
    class Served(Plain):
        async def rollout(self, conversation: Any) -> None:
            async with self.episode.serve() as before:
                urls = [before.end_url, f"{before.base_url}/end"]
            async with self.episode.serve(), httpx.AsyncClient() as client:
                for url in urls:
                    answer = await client.post(url, json={"reward": 1})
                    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "episode_over")

    (trajectory,) = await play_all(Served, ["Never said."])
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.error


async def test_request_in_flight_at_an_end_request_is_still_answered() -> None:
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
async def test_program_that_ended_the_episode_has_ten_seconds(then: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(endpoint_module, "END_GRACE_SECONDS", 0.2 if "sleep" in then else 50.0)
    results: list[Any] = []

    async def loop(endpoint: Endpoint) -> None:
        try:
            await endpoint.run(python(f"{SAYS_SO}end({{}}); {then}"))
        finally:
            results.append(await endpoint.wait())

    (trajectory,) = await served(loop, ["Done."], outcome=Outcome.COMPLETED)
    assert results == [{}]
    assert trajectory.error == ""
