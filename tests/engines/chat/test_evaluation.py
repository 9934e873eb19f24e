"""Runs whose agents use an API of messages: to evaluate it, to judge, or to play a user, but never to train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner import (
    BadBatch,
    BadOption,
    Concurrency,
    Conversation,
    Limits,
    Outcome,
    Sampling,
    Task,
    Trajectory,
    Usage,
    reward,
)
from runner.engines.base import FinishReason
from runner.testing import ScriptedEngine, call
from runner.training.batch import TrainingBatch
from tests.engines.chat.adding import Adding, adds, all_agents, played
from tests.engines.chat.api import Says, asking, serving
from tests.engines.chat.served import asking_endpoint, endpoint_of
from tests.playing import Plain, talking

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


# --- a whole run


async def test_an_api_is_evaluated_as_any_engine_is() -> None:
    async with serving(adds) as api:
        trajectories = await played(Adding, asking(api))
    assert [each.reward for each in trajectories] == [1.0] * 4
    for each in trajectories:
        assert not each.trained
        assert [message["role"] for message in each.messages] == ["system", "user", "assistant", "tool", "assistant"]
        first, last = each.turns
        assert (first.reasoning, [made.name for made in first.tool_calls]) == ("A sum.", ["add"])
        assert (last.text, last.reasoning, last.finish) == (f"It is {each.task.answer}.", "Easy.", FinishReason.STOP)
        assert not len(first.log)
        assert not first.has_ids
    sent = api.bodies[0]
    assert sent["messages"][0] == {"role": "system", "content": "Use the tool."}
    assert sent["tools"][0]["function"]["name"] == "add"
    assert sent["tool_choice"] == "auto"


async def test_our_own_endpoint_can_be_evaluated_by_a_second_run() -> None:
    says = [[call("add", a=0, b=1)], "<think>Easy.</think>It is 1."]
    served: list[Trajectory] = []
    async with endpoint_of(says, served) as endpoint:
        engine = asking_endpoint(endpoint)
        (trajectory,) = await played(Adding, engine, tasks=[Task(id="t", prompt="0 + 1?", answer="1")])
    assert trajectory.reward == 1.0
    asked, answered = trajectory.turns
    assert [each.arguments for each in asked.tool_calls] == [{"a": 0, "b": 1}]
    assert (answered.text, answered.reasoning) == ("It is 1.", "Easy.")
    # The server's own count is the number of ids that it sampled.
    (there,) = [each for each in served if each.turns]
    assert [turn.tokens for turn in trajectory.turns] == [turn.tokens for turn in there.turns]
    assert [turn.usage and turn.usage.prompt_tokens for turn in trajectory.turns] == [
        turn.start for turn in there.turns
    ]
    assert [each.verdict.value for each in there.requests] == ["new", "append"]


async def test_results_do_not_depend_on_how_wide_the_run_is() -> None:
    async def at(width: int) -> list[tuple[Any, ...]]:
        async with serving(adds) as api:
            got = await played(Adding, asking(api), concurrency=Concurrency(episodes=width), seed=3)
        return [(each.id, each.reward, each.messages, [turn.seed for turn in each.turns]) for each in got]

    assert await at(1) == await at(8)


async def test_every_turn_has_a_seed_of_its_own_unless_seeds_are_left_out() -> None:
    async with serving("Yes") as api:
        first, second = await played(Plain, asking(api), group_size=2)
        assert {body["seed"] for body in api.bodies} == {each.turns[0].seed for each in (first, second)}
        assert len({body["seed"] for body in api.bodies}) == 2
        (third,) = await played(Plain, asking(api, leave_out=("seed",)))
        assert third.turns[0].seed is None


# --- token counts and limits


async def test_run_sampling_and_limits_apply_to_the_evaluated_model() -> None:
    class Talking(Plain):
        def step(self, turn: Any) -> str:
            return "Continue."

    async with serving("Yes") as api:
        run = {"sampling": Sampling(temperature=0.2, max_tokens=5), "limits": Limits(turns=3)}
        (trajectory,) = await played(Talking, asking(api), **run)
        assert (trajectory.outcome, trajectory.limit) == (Outcome.TURN_LIMIT, "turns")
        assert len(trajectory.turns) == 3
        assert [(body["temperature"], body["max_tokens"]) for body in api.bodies] == [(0.2, 5)] * 3


async def test_the_limit_on_tokens_counts_as_the_server_counts() -> None:
    class Talking(Plain):
        def step(self, turn: Any) -> str:
            return "Continue."

    said = Says("Yes", usage={"prompt_tokens": 10, "completion_tokens": 4})
    async with serving(said) as api:
        (trajectory,) = await played(Talking, asking(api), limits=Limits(tokens=10))
    assert (trajectory.outcome, trajectory.limit) == (Outcome.TOKEN_LIMIT, "tokens")
    assert [body["max_tokens"] for body in api.bodies] == [10, 6, 2]


async def test_turn_cut_at_its_limit_ends_the_episode() -> None:
    async with serving(Says("Yes", finish="length")) as api:
        (trajectory,) = await played(Plain, asking(api))
    assert (trajectory.outcome, trajectory.limit) == (Outcome.TOKEN_LIMIT, "max_tokens")


async def test_the_context_limit_holds_as_the_server_counts() -> None:
    class Talking(Plain):
        def step(self, turn: Any) -> str:
            return "Continue."

    said = Says("Yes", usage={"prompt_tokens": 90, "completion_tokens": 20})
    async with serving(said) as api:
        (trajectory,) = await played(Talking, asking(api), limits=Limits(context=100))
    assert (trajectory.outcome, trajectory.limit) == (Outcome.CONTEXT_LIMIT, "context")
    assert len(api.bodies) == 1


async def test_a_judge_by_an_api_scores_what_a_model_of_ids_said(tmp_path: Path) -> None:
    class Judged(Plain):
        @reward
        async def correct(self) -> float:
            judge = self.episode.conversation("judge", system_prompt="Grade from 0 to 1.")
            judge.add(self.episode.text)
            return float((await judge.generate(sampling=Sampling(temperature=0.0))).text)

    async with serving("0.5") as api:
        engine = asking(api)
        options: Any = {"engines": {"judge": engine}, "sampling": Sampling(temperature=0.7)}
        main, judge = await all_agents(tmp_path / "run.db", Judged, ScriptedEngine("It is 4."), **options)
    assert (main.trained, main.reward) == (True, 0.5)
    assert (judge.trained, judge.agent, judge.turns[0].text) == (False, "judge", "0.5")
    assert judge.turns[0].usage == Usage(
        prompt_tokens=7, completion_tokens=3, model="model-2026-01-01", fingerprint="fp_1"
    )
    (body,) = api.bodies
    assert body["temperature"] == 0.0
    assert body["messages"][-1] == {"role": "user", "content": "It is 4."}


async def test_a_simulated_user_by_an_api_plays_with_a_trained_agent(tmp_path: Path) -> None:
    class Talked(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            user = self.episode.conversation("user", prompt="You are a customer.")
            for _ in range(2):
                user.add((await conversation.generate()).text)
                conversation.add((await user.generate()).text)

    async with serving(lambda body: Says(f"Message {len(body['messages'])}")) as api:
        engines = {"user": asking(api)}
        main, user = await all_agents(tmp_path / "run.db", Talked, ScriptedEngine("Hm"), engines=engines)
    assert [turn.text for turn in user.turns] == ["Message 2", "Message 4"]
    assert [message["content"] for message in main.messages[-1:]] == ["Message 4"]
    assert main.trained


# --- never trained


async def test_training_on_a_chat_api_is_refused_by_name() -> None:
    class Trains(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            with pytest.raises(BadOption, match="agent 'other' plays on a ChatEngine, which returns no token ids"):
                self.episode.conversation("other", train=True)
            with pytest.raises(BadOption, match="agent 'branch' plays on a ChatEngine"):
                conversation.branch("branch")
            await conversation.generate()

    async with serving("Yes") as api:
        await played(Trains, asking(api))


async def test_a_batch_for_training_refuses_what_an_api_said() -> None:
    async with serving(adds) as api:
        trajectories = await played(Adding, asking(api))
    with pytest.raises(BadBatch, match="'t0#0' of agent 'main' was run on a message engine"):
        TrainingBatch.padded(trajectories, pad_id=0)


async def test_options_of_chat_templates_are_refused_where_there_is_none() -> None:
    async with serving("Yes") as api:
        for options, words in (
            ({"template_options": {"enable_thinking": False}}, "template_options"),
            ({"tool_format": "vllm:hermes"}, "tool_format"),
            ({"max_version_lag": 1}, "max_version_lag=1: ChatEngine has no weight updates"),
            ({"sampling": Sampling(top_k=5)}, r"Sampling\(top_k=5\)"),
        ):
            with pytest.raises(BadOption, match=words):
                await played(Plain, asking(api), **options)
        assert not api.bodies


async def test_unsupported_sampling_is_refused_before_a_request() -> None:
    async def talk(conversation: Conversation) -> None:
        for sampling in (Sampling(min_p=0.5), Sampling(regex="a")):
            with pytest.raises(BadOption, match="a chat API does not support it"):
                await conversation.generate(sampling=sampling)
        await conversation.generate()

    async with serving("Yes") as api:
        await played(talking(talk), asking(api))
        assert len(api.bodies) == 1


# --- agent programs


async def test_an_agent_program_can_be_evaluated_on_an_api() -> None:
    from tests.endpoint.serving import openai_client

    class Served(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            async with self.episode.serve(train=True) as endpoint, openai_client(endpoint) as client:
                said = await client.chat.completions.create(
                    model=endpoint.model, messages=[{"role": "user", "content": "Hello?"}]
                )
                assert said.choices[0].message.content == "Yes"
                assert said.usage is not None
                assert (said.usage.prompt_tokens, said.usage.completion_tokens) == (7, 3)

    async with serving("Yes") as api:
        (trajectory,) = await played(Served, asking(api))
    assert not trajectory.trained
    assert trajectory.reward == 1.0


async def test_continuing_a_cut_turn_is_refused_and_a_new_message_works() -> None:
    import openai

    from tests.endpoint.serving import openai_client

    hello: Any = {"role": "user", "content": "Hello?"}

    class Served(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            async with self.episode.serve(train=True) as endpoint, openai_client(endpoint) as client:
                create = client.chat.completions.create
                (cut,) = (await create(model="any", messages=[hello], max_tokens=3)).choices
                assert cut.finish_reason == "length"
                said: Any = {"role": "assistant", "content": cut.message.content}
                with pytest.raises(openai.BadRequestError, match="add a user message"):
                    await create(model="any", messages=[hello, said])
                await create(model="any", messages=[hello, said, {"role": "user", "content": "Continue."}])

    async with endpoint_of(lambda _: "A long answer.") as api:
        (trajectory,) = await played(Served, asking_endpoint(api))
    assert (trajectory.reward, len(trajectory.turns)) == (1.0, 2)
