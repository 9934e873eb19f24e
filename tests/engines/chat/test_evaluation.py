"""Runs whose agents speak by an API of messages: to evaluate it, to judge, to play a user; never to train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from typer.testing import CliRunner

from runner import (
    BadBatch,
    BadOption,
    Concurrency,
    ConfigurationChanged,
    ContentPiece,
    Conversation,
    Environment,
    Limits,
    Outcome,
    ReasoningPiece,
    Run,
    RunFile,
    Sampling,
    Task,
    ToolCalled,
    Trajectory,
    Usage,
    reward,
    tool,
)
from runner.cli.app import app
from runner.engines.base import FinishReason
from runner.testing import ScriptedEngine, call, play, play_many_async
from runner.training.batch import TrainingBatch
from tests.engines.chat.api import Says, asking, serving
from tests.engines.chat.served import asking_endpoint, endpoint_of
from tests.playing import Plain, assert_nothing_open, talking, tasks
from tests.verifying import change, verify

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Adding(Environment):
    """A sum, with a tool for it."""

    system_prompt = "Use the tool."

    def tasks(self) -> list[Task]:
        return [Task(id=f"t{number}", prompt=f"{number} + 1?", answer=str(number + 1)) for number in range(4)]

    @tool
    def add(self, a: int, b: int) -> int:
        """Add."""
        return a + b

    @reward
    def correct(self) -> bool:
        return self.task.answer in self.episode.text


def adds(body: dict[str, Any]) -> Says:
    """Calls the tool, and then says what came of it."""
    last = body["messages"][-1]
    if last["role"] == "tool":
        return Says(f"It is {last['content']}.", reasoning="Easy.")
    number = last["content"].partition(" ")[0]
    return Says(reasoning="A sum.", calls=(("add", json.dumps({"a": int(number), "b": 1})),))


async def played(environment: Any, engine: Any, **options: Any) -> list[Trajectory]:
    got = await play_many_async(environment, engine, **options)
    for trajectory in got:
        assert trajectory.outcome.scored, trajectory.error
    return got


async def all_agents(file: Path, environment: Any, engine: Any, **options: Any) -> list[Trajectory]:
    """What all agents of a run said, those included that a run does not tell of."""
    await played(environment, engine, file=file, **options)
    with RunFile(file) as run_file:
        return [run_file.trajectory(row) for row in run_file.rows(trained=None)]


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
    # By its own count, which is that of the ids that were sampled there.
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


# --- what counts for whom


async def test_the_run_s_sampling_and_limits_are_meant_for_what_is_evaluated() -> None:
    class Talking(Plain):
        def step(self, turn: Any) -> str:
            return "Go on."

    async with serving("Yes") as api:
        run = {"sampling": Sampling(temperature=0.2, max_tokens=5), "limits": Limits(turns=3)}
        (trajectory,) = await played(Talking, asking(api), **run)
        assert (trajectory.outcome, trajectory.limit) == (Outcome.TURN_LIMIT, "turns")
        assert len(trajectory.turns) == 3
        assert [(body["temperature"], body["max_tokens"]) for body in api.bodies] == [(0.2, 5)] * 3


async def test_the_limit_on_tokens_counts_as_the_server_counts() -> None:
    class Talking(Plain):
        def step(self, turn: Any) -> str:
            return "Go on."

    said = Says("Yes", usage={"prompt_tokens": 10, "completion_tokens": 4})
    async with serving(said) as api:
        (trajectory,) = await played(Talking, asking(api), limits=Limits(tokens=10))
    assert (trajectory.outcome, trajectory.limit) == (Outcome.TOKEN_LIMIT, "tokens")
    assert [body["max_tokens"] for body in api.bodies] == [10, 6, 2]


async def test_a_turn_that_is_cut_at_its_limit_ends_the_episode_by_that_limit() -> None:
    async with serving(Says("Yes", finish="length")) as api:
        (trajectory,) = await played(Plain, asking(api))
    assert (trajectory.outcome, trajectory.limit) == (Outcome.TOKEN_LIMIT, "max_tokens")


async def test_the_context_limit_holds_as_the_server_counts() -> None:
    class Talking(Plain):
        def step(self, turn: Any) -> str:
            return "Go on."

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


async def test_a_conversation_by_an_api_that_is_to_be_trained_is_refused_by_name() -> None:
    class Trains(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            with pytest.raises(BadOption, match="agent 'other' speaks by a ChatEngine, which gives no token ids"):
                self.episode.conversation("other", train=True)
            with pytest.raises(BadOption, match="agent 'branch' speaks by a ChatEngine"):
                conversation.branch("branch")
            await conversation.generate()

    async with serving("Yes") as api:
        await played(Trains, asking(api))


async def test_a_batch_for_training_refuses_what_an_api_said() -> None:
    async with serving(adds) as api:
        trajectories = await played(Adding, asking(api))
    with pytest.raises(BadBatch, match="'t0#0' of agent 'main' was played on an engine of messages"):
        TrainingBatch.padded(trajectories, pad_id=0)


async def test_options_of_chat_templates_are_refused_where_there_is_none() -> None:
    async with serving("Yes") as api:
        for options, words in (
            ({"template_options": {"enable_thinking": False}}, "template_options"),
            ({"tool_format": "vllm:hermes"}, "tool_format"),
            ({"max_version_lag": 1}, "max_version_lag=1: ChatEngine has no weights of ours"),
            ({"sampling": Sampling(top_k=5)}, r"Sampling\(top_k=5\)"),
        ):
            with pytest.raises(BadOption, match=words):
                await played(Plain, asking(api), **options)
        assert not api.bodies


async def test_sampling_that_cannot_be_asked_for_is_refused_before_anything_is() -> None:
    async def talk(conversation: Conversation) -> None:
        for sampling in (Sampling(min_p=0.5), Sampling(regex="a")):
            with pytest.raises(BadOption, match="cannot be asked for it"):
                await conversation.generate(sampling=sampling)
        await conversation.generate()

    async with serving("Yes") as api:
        await played(talking(talk), asking(api))
        assert len(api.bodies) == 1


# --- conversations


async def test_what_is_said_is_heard_while_it_is_sampled() -> None:
    heard: list[Any] = []

    async def talk(conversation: Conversation) -> None:
        async with conversation.stream() as said:
            async for event in said:
                heard.append(event)
                if heard == [ContentPiece("A lo"), ContentPiece("ng a")]:
                    api.go_on.set()
        assert said.turn.text == "A long answer"

    async with serving(Says("A long answer", hold_after=3)) as api:
        await played(talking(talk), asking(api))
    assert "".join(event.text for event in heard) == "A long answer"


async def test_reasoning_and_calls_are_heard_too() -> None:
    heard: list[Any] = []

    class Heard(Adding):
        async def rollout(self, conversation: Conversation) -> None:
            async with conversation.stream() as said:
                heard.extend([event async for event in said])

    async with serving(adds) as api:
        await played(Heard, asking(api), tasks=1)
    assert "".join(event.text for event in heard if isinstance(event, ReasoningPiece)) == "A sum."
    assert [event.call.name for event in heard if isinstance(event, ToolCalled)] == ["add"]


async def test_leaving_a_streamed_turn_cuts_it_there() -> None:
    async def talk(conversation: Conversation) -> None:
        async with conversation.stream() as said:
            async for _ in said:
                break
        assert (said.turn.text, said.turn.finish) == ("A lo", FinishReason.ABORT)
        conversation.add("Again?")
        api.go_on.set()
        await conversation.generate()

    async with serving(Says("A long answer", hold_after=2)) as api:
        await played(talking(talk), asking(api))
    assert [message["content"] for message in api.bodies[1]["messages"]] == ["Question 0?", "A lo", "Again?"]


async def test_a_malformed_call_is_answered_as_on_any_engine() -> None:
    def says(body: dict[str, Any]) -> Says:
        return Says("Sorry.") if len(body["messages"]) > 3 else Says(calls=(("add", '{"a": 1'),))

    async with serving(says) as api:
        (trajectory,) = await played(Adding, asking(api), tasks=1)
    assert [bool(made.error) for made in trajectory.turns[0].tool_calls] == [True]
    assert "could not be read" in trajectory.messages[-2]["content"]
    assert trajectory.messages[-1]["content"] == "Sorry."


async def test_a_schema_and_tool_choice_are_asked_for_and_recorded() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}

    async def talk(conversation: Conversation) -> None:
        turn = await conversation.generate(sampling=Sampling(schema=schema))
        assert turn.constraint is not None
        assert json.loads(turn.constraint.value) == schema

    async with serving('{"a": 1}') as api:
        await played(talking(talk), asking(api))
        assert api.bodies[0]["response_format"]["json_schema"]["schema"] == schema

        class Forced(Adding):
            tool_choice = "add"

        async with serving(adds) as other:
            await played(Forced, asking(other), tasks=1, limits=Limits(turns=1))
            assert other.bodies[0]["tool_choice"] == {"type": "function", "function": {"name": "add"}}


async def test_histories_that_are_rewritten_branched_and_tried_are_what_the_server_is_sent(tmp_path: Path) -> None:
    async def talk(conversation: Conversation) -> None:
        first = await conversation.generate()
        conversation.add("More?")
        await conversation.generate()
        branch = conversation.branch("branch", turn=first, train=False)
        branch.add("Less?")
        await branch.generate()
        conversation.replace("Anew?")
        await conversation.generate()
        conversation.add("Which?")
        tried = await conversation.tries(2)
        conversation.keep(tried[1])
        assert tried[0].left_out
        conversation.add("And?")
        await conversation.generate()

    async with serving(lambda body: Says(f"{len(body['messages'])}!")) as api:
        main, branch = await all_agents(tmp_path / "run.db", talking(talk), asking(api))
    asked = [[message["content"] for message in body["messages"]] for body in api.bodies]
    assert asked[1] == ["Question 0?", "1!", "More?"]
    assert asked[2] == ["Question 0?", "1!", "Less?"]
    assert asked[3] == ["Anew?"]
    assert asked[4] == asked[5] == ["Anew?", "1!", "Which?"]
    assert asked[6] == ["Anew?", "1!", "Which?", "3!", "And?"]
    assert [segment.cause for segment in main.segments] == ["start", "environment", "branch"]
    assert [message["content"] for message in branch.messages] == ["Question 0?", "1!", "Less?", "3!"]


async def test_asking_twice_for_nothing_new_is_refused_by_name() -> None:
    async def talk(conversation: Conversation) -> None:
        await conversation.generate()
        with pytest.raises(RuntimeError, match="nothing was added to conversation 'main'"):
            await conversation.generate()
        with pytest.raises(BadOption, match="counts them itself"):
            await conversation.remaining()

    async with serving("Yes") as api:
        await played(talking(talk), asking(api))


async def test_changing_tools_are_what_the_server_is_sent() -> None:
    async def talk(conversation: Conversation) -> None:
        await conversation.generate()
        conversation.replace(tools=[])
        conversation.add("And without?")
        await conversation.generate()

    class Changing(Adding):
        async def rollout(self, conversation: Conversation) -> None:
            await talk(conversation)

    async with serving("Yes") as api:
        (trajectory,) = await played(Changing, asking(api), tasks=1)
    assert ["tools" in body for body in api.bodies] == [True, False]
    assert len(api.bodies[1]["messages"]) == 4
    assert len(trajectory.segments) == 2


async def test_connections_are_used_again() -> None:
    peers: list[Any] = []

    async def note(request: Any) -> None:
        peers.append(request.transport.get_extra_info("peername"))

    async with serving("Yes", troubles=[note] * 5) as api:
        await played(Plain, asking(api), tasks=tasks(5), concurrency=Concurrency(episodes=1))
    assert len(set(peers)) == 1


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


# --- what is kept


async def test_a_run_file_has_what_was_said_and_what_it_took(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    async with serving(adds) as api:
        trajectories = await played(Adding, asking(api), file=file)
    with RunFile(file) as run_file:
        assert run_file.header.engine["kind"] == "chat"
        assert run_file.header.engine["server"] == api.url
        assert run_file.header.template == {}
        rows = list(run_file.rows(trained=None))
        assert len(run_file) == 0
        stored = {row.id: run_file.trajectory(row) for row in rows}
    for each in trajectories:
        again = stored[each.id]
        assert (again.messages, again.reward, again.trained) == (each.messages, each.reward, False)
        assert [turn.usage for turn in again.turns] == [turn.usage for turn in each.turns]
        assert [turn.text for turn in again.turns] == [turn.text for turn in each.turns]


async def test_a_run_is_gone_on_with_where_it_was_left(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    async with serving(adds) as api:
        async with Run(Adding, asking(api), file=file, concurrency=Concurrency(episodes=1)) as run:
            await anext(run)
        known = len(api.bodies)
        got = await played(Adding, asking(api, places=3), file=file)
        assert 1 <= len(got) <= 3
        assert len(api.bodies) - known <= 2 * len(got)
        with pytest.raises(ConfigurationChanged, match="extra_body"):
            await played(Adding, asking(api, extra_body={"reasoning_effort": "low"}), file=file)
    with RunFile(file) as run_file:
        assert run_file.complete
        assert len(list(run_file.rows(trained=None))) == 4


async def test_verify_says_what_it_can_of_messages_and_fails_what_is_not_in_them(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    async with serving(adds) as api:
        await played(Adding, asking(api), file=file)
    told = verify(file)
    assert told.exit_code == 0
    assert "4 trajectories are of servers that take messages" in told.output
    assert "follows from" not in told.output
    change(file, "UPDATE turns SET text = 'forged' WHERE episode = 1 AND number = 1")
    told = verify(file)
    assert told.exit_code == 7
    assert "in no message" in told.output


async def test_verify_looks_at_the_ids_of_the_others_too(tmp_path: Path) -> None:
    class Judged(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await conversation.generate()
            judge = self.episode.conversation("judge", prompt="Good?")
            await judge.generate()

    file = tmp_path / "run.db"
    async with serving("Yes") as api:
        await played(Judged, ScriptedEngine("It is 4."), engines={"judge": asking(api)}, file=file)
    told = verify(file)
    assert told.exit_code == 0
    assert "all of it follows from" in told.output
    assert "1 trajectories are of servers that take messages" in told.output


async def test_the_summary_adds_up_what_it_took_and_who_answered() -> None:
    told = {
        "prompt_tokens": 20,
        "completion_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 16},
        "completion_tokens_details": {"reasoning_tokens": 4},
        "cost": 0.25,
    }
    async with serving(Says("Yes", usage=told)) as api, Run(Plain, asking(api), tasks=tasks(3)) as run:
        async for _ in run:
            pass
    assert run.summary.as_dict()["usage"] == {
        "prompt": 60,
        "completion": 27,
        "cached": 48,
        "reasoning": 12,
        "cost": 0.75,
        "models": {"model-2026-01-01": 3},
    }
    assert run.summary.reward.mean == 1.0
    assert_nothing_open(run.engine)


def test_the_command_line_evaluates_an_api_and_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DELTARUNNER_API_KEY", "sk-secret-0123456789")
    told: dict[str, Any] = {}

    def on_a_thread(url: str) -> None:
        options = ["-n", "2", "--temperature", "0", "--file", "run.db", "--json"]
        result = CliRunner().invoke(app, ["run", "calculator", "--api-model", "some-model", "--api-url", url, *options])
        told["run"] = result
        told["show"] = CliRunner().invoke(app, ["show", "run.db"])
        told["one"] = CliRunner().invoke(app, ["show", "run.db", "calculator-0"])
        told["export"] = CliRunner().invoke(app, ["export", "run.db", "--format", "jsonl"])
        told["verify"] = CliRunner().invoke(app, ["verify", "run.db"])

    async def main() -> None:
        async with serving("I do not know.", key="sk-secret-0123456789") as api:
            await anyio.to_thread.run_sync(on_a_thread, api.url)

    anyio.run(main)
    assert told["run"].exit_code == 0, told["run"].output
    outcome = json.loads(told["run"].stdout.splitlines()[-1])
    assert (outcome["model"], outcome["summary"]["episodes"]) == ("some-model", 2)
    assert outcome["summary"]["usage"]["completion"] > 0
    assert "answered by" in told["show"].output
    assert "calculator-0#0" in told["show"].output
    assert "I do not know." in told["one"].output
    assert "tokens by the server's count" in told["one"].output
    assert told["export"].exit_code == 2
    assert "nothing to train on" in " ".join(told["export"].output.split())
    assert told["verify"].exit_code == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--api-url", "http://127.0.0.1:1/v1"], "give --api-model too"),
        (["--api-model", "m", "--server", "http://127.0.0.1:1"], "--server and --api-model"),
        (["--api-model", "m", "--template", "hermes"], "--template and --api-model"),
        (["--api-model", "m", "--engine-option", "max_num_seqs=4"], "--engine-option max_num_seqs"),
        (["--api-model", "m", "--api-url", "http://127.0.0.1:1/v1", "--top-k", "4"], "Sampling(top_k=4)"),
    ],
    ids=["no model", "a server too", "a template", "vLLM's option", "top-k"],
)
def test_what_does_not_go_with_an_api_is_refused_on_the_command_line(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["run", "calculator", *options])
    assert result.exit_code == 2
    assert words in " ".join(f"{result.output} {result.exception}".split())


def test_the_testing_kit_plays_on_an_api_too() -> None:
    async def main() -> None:
        async with serving("Yes") as api:
            await anyio.to_thread.run_sync(lambda: play(Plain, asking(api)))

    anyio.run(main)
