"""The block of `episode.serve()`: when it may be entered, its arguments, and open requests at its end."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import anyio
import httpx
import pytest

from runner import Concurrency, Conversation, Endpoint, Limits, Outcome, reward, tool
from runner.chat_requests import Delivery
from runner.endpoint import application
from runner.engines.scripted.script import Latency
from runner.testing import ScriptedEngine
from tests.endpoint.serving import RUN, chat_body, events_of, http, served, user
from tests.endpoint.test_programs import python
from tests.playing import Plain, play, play_all, tasks, until

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.asyncio_alone]

ASKED = chat_body([user("One.")], tools=[RUN])


def slow(between: int = 100) -> ScriptedEngine:
    return ScriptedEngine(lambda _: "A long answer.", chunks=1, tick=0.001, latency=Latency(first=1, between=between))


async def test_requests_in_flight_at_the_end_of_the_block_are_cut() -> None:
    engine, answers = slow(), list[httpx.Response]()

    class Served(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            async with anyio.create_task_group() as group:
                async with self.episode.serve() as endpoint:
                    for stream in (True, False):
                        group.start_soon(self.ask, endpoint, stream)
                    await until(lambda: engine.stats().sampled_tokens > 4)
                await until(lambda: engine.stats().open == 0)
                await until(lambda: len(answers) == 2)
            await conversation.generate()

        async def ask(self, endpoint: Endpoint, stream: bool) -> None:
            async with http(endpoint) as client:
                answers.append(await client.post("/chat/completions", json={**ASKED, "stream": stream}))

    trajectories = await play_all(Served, engine)
    assert {each.outcome for each in trajectories} == {Outcome.COMPLETED}
    whole, streamed = sorted(answers, key=lambda answer: "event-stream" in answer.headers["content-type"])
    assert (whole.status_code, whole.headers["x-should-retry"]) == (400, "false")
    assert events_of(streamed.text)[-1]["error"]["code"] == whole.json()["error"]["code"] == "episode_over"
    requests = [request for each in trajectories for request in each.requests]
    assert [request.delivery for request in requests] == [Delivery.CUT, Delivery.CUT]


async def test_several_blocks_of_an_episode_have_a_key_each() -> None:
    class Served(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            async with self.episode.serve() as one:
                async with self.episode.serve(train=False) as other:
                    for endpoint in (one, other):
                        async with http(endpoint) as client:
                            answer = await client.post("/chat/completions", json={**ASKED, "user": endpoint.api_key})
                            assert answer.status_code == 200
                async with http(one) as client:
                    assert (await client.post("/chat/completions", json=ASKED)).status_code == 200
                async with http(other) as client:
                    assert (await client.post("/chat/completions", json=ASKED)).status_code == 400

    (trajectory,) = await play_all(Served, ["One.", "Two.", "Three."])
    assert len(trajectory.turns) == 3


async def test_serving_outside_of_rollout_names_the_right_place() -> None:
    said: list[str] = []

    async def try_it(served: Any) -> None:
        with pytest.raises(RuntimeError, match="is for rollout") as error:
            async with served.episode.serve():
                pass
        said.append(str(error.value))

    class Served(Plain):
        async def setup(self) -> None:
            await try_it(self)

        @tool
        async def look(self) -> str:
            """Look."""
            await try_it(self)
            return "seen"

        @reward
        async def correct(self) -> float:
            await try_it(self)
            return 1.0

        async def close(self) -> None:
            await try_it(self)

    says = ['<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>', "Done."]
    await play(Served, ScriptedEngine(says, template="hermes"))
    assert len(said) == 4


async def test_a_tool_within_a_rollout_may_serve() -> None:
    class Served(Plain):
        @tool
        async def delegate(self) -> str:
            """Ask a program."""
            async with self.episode.serve() as endpoint:
                return (await endpoint.run(python("print(ask('One.'))"))).stdout

        async def rollout(self, conversation: Conversation) -> None:
            turn = await conversation.generate()
            conversation.add(await conversation.call_tools(turn))

    def says(call: Any) -> str:
        return "Done." if "One." in call.prompt else '<tool_call>\n{"name": "delegate", "arguments": {}}\n</tool_call>'

    main, asked = await play_all(Served, ScriptedEngine(says, template="hermes"))
    assert main.segments[0].messages[-1]["content"] == "Done.\n"
    assert [turn.text for turn in asked.turns] == ["Done."]


@pytest.mark.parametrize("at_once", [0, -1, True, None, "many"])
async def test_at_once_below_one_or_not_a_whole_number_is_refused(at_once: Any) -> None:
    async def loop(endpoint: Endpoint) -> None:
        raise AssertionError("it began")

    with pytest.raises(AssertionError, match=r"at_once=.*give a whole number of at least 1"):
        await served(loop, [], serve={"at_once": at_once}, breaker=1)


async def test_train_function_that_raises_is_env_error() -> None:
    def train(thread: Any) -> bool:
        raise KeyError("its author's own")

    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            answer = await client.post("/chat/completions", json=ASKED)
            assert (answer.status_code, answer.headers["x-should-retry"]) == (400, "false")

    class Served(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            async with self.episode.serve(train=train) as endpoint:
                await loop(endpoint)

    trajectory = await play(Served, ["Done."], breaker=1)
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert "its author's own" in trajectory.error
    assert trajectory.reward is None


async def test_requests_after_a_limit_get_the_same_answer() -> None:
    code = """
ask("One.")
for number in range(5):
    try: ask("Two.")
    except urllib.error.HTTPError as error: print(error.code, error.headers["x-should-retry"])
"""
    kept: list[str] = []

    async def loop(endpoint: Endpoint) -> None:
        kept.append((await endpoint.run(python(code))).stdout)

    await served(loop, ["Done."], outcome=Outcome.TURN_LIMIT, limits=Limits(turns=1))
    assert kept == ["400 false\n" * 5]


async def test_keys_of_episodes_that_are_over_are_forgotten_oldest_first(monkeypatch: Any) -> None:
    monkeypatch.setattr(application, "MAX_FINISHED_KEYS", 2)

    class Served(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            over: list[Endpoint] = []
            for _ in range(4):
                async with self.episode.serve() as endpoint:
                    over.append(endpoint)
            async with self.episode.serve(), httpx.AsyncClient() as client:
                answers = [await client.post(f"{each.base_url}/chat/completions", json=ASKED) for each in over]
            assert [answer.status_code for answer in answers] == [401, 401, 400, 400]
            await conversation.generate()

    assert (await play(Served, ["Done."])).outcome is Outcome.COMPLETED


async def test_the_key_of_an_episode_that_is_over_holds_nothing_of_it() -> None:
    plays: list[weakref.ref[Any]] = []

    class Served(Plain):
        def tasks(self) -> Any:
            return tasks(4)

        async def rollout(self, conversation: Conversation) -> None:
            async with self.episode.serve() as endpoint, http(endpoint) as client:
                plays.append(weakref.ref(self.episode._state))
                await client.post("/chat/completions", json=ASKED)
                if len(plays) == 4:
                    gc.collect()
                    assert [play() is None for play in plays] == [True, True, True, False]

    trajectories = await play_all(Served, ScriptedEngine(lambda _: "Done."), concurrency=Concurrency(episodes=1))
    assert [each.error for each in trajectories] == [""] * 4
