"""OpenAI's Chat Completions: the content that OpenAI's own client reads, and the trained ids."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from runner import BadOption, Endpoint, Outcome, RunFile, Sampling, Trajectory
from runner.chat_requests import Delivery, Verdict
from runner.endpoint.chat_completions import ChatCompletions
from runner.endpoint.refusals import Reason, Refused
from runner.engines.scripted.script import Reply
from runner.testing import ScriptedEngine, call
from tests.endpoint.serving import RUN, chat_body, events_of, http, openai_client, served, user
from tests.verifying import verify

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone]


async def with_untrained(loop: Any, engine: ScriptedEngine, folder: Path, **options: Any) -> list[Trajectory]:
    """All trajectories of an episode, including untrained ones."""
    await served(loop, engine, file=folder / "run.db", **options)
    with RunFile(folder / "run.db") as stored:
        return [stored.trajectory(row) for row in stored.rows(trained=None)]


CALLS = [call("run", command="ls"), call("run", command="pwd"), "Done."]


async def tool_loop(endpoint: Endpoint, *, stream: bool, **further: Any) -> list[str]:
    """Play a loop of OpenAI's client that runs tools until there are no more calls. Return the replies to it."""
    async with openai_client(endpoint) as client:
        return [said async for said in _said(client, stream=stream, **further)]


async def _said(client: openai.AsyncOpenAI, *, stream: bool, **further: Any) -> AsyncIterator[str]:
    messages: list[Any] = [{"role": "system", "content": "You mend programs."}, user("Mend it.")]
    calls: Any = True
    completion: ChatCompletion
    while calls:
        if stream:
            async with client.chat.completions.stream(model="any", messages=messages, tools=[RUN], **further) as events:
                completion = await events.get_final_completion()
        else:
            completion = await client.chat.completions.create(model="any", messages=messages, tools=[RUN], **further)
        message = completion.choices[0].message
        calls = message.tool_calls or []
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        for number, made in enumerate(calls):
            messages.append({"role": "tool", "tool_call_id": made.id, "content": f"result {number}"})
        yield message.content or ""


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_loop_of_openais_client_continues_the_sampled_ids(stream: bool, tmp_path: Any) -> None:
    said: list[str] = []

    async def loop(endpoint: Endpoint) -> None:
        said.extend(await tool_loop(endpoint, stream=stream))

    file = tmp_path / "run.db"
    (trajectory,) = await served(loop, CALLS, file=file)
    assert said == ["", "", "Done."]
    assert trajectory.agent == "main"
    assert [request.verdict for request in trajectory.requests] == ["new", "append", "append"]
    assert {request.delivery for request in trajectory.requests} == {Delivery.DELIVERED}
    assert {request.form for request in trajectory.requests} == {"chat"}
    assert "OpenAI" in trajectory.requests[0].client
    assert [segment.cause for segment in trajectory.segments] == ["start"]
    assert verify(file).exit_code == 0
    with RunFile(file) as stored:
        assert [each.client for each in stored.trajectory("t0#0").requests] == [
            each.client for each in trajectory.requests
        ]


@pytest.mark.parametrize("chunks", [1, 2, 5, None])
async def test_token_ids_of_the_chunks_joined_are_the_turns_ids(chunks: Any) -> None:
    seen: list[list[int]] = []
    prompts: list[list[int]] = []
    texts: list[str] = []

    async def loop(endpoint: Endpoint) -> None:
        body = chat_body(
            [user("Continue.")], tools=[RUN], stream=True, return_token_ids=True, logprobs=True, top_logprobs=2
        )
        async with http(endpoint) as client:
            events = events_of((await client.post("/chat/completions", json=body)).text)
        for event in events:
            ChatCompletionChunk.model_validate(event, strict=True)
        choices = [choice for event in events for choice in event["choices"]]
        seen.append([token_id for choice in choices for token_id in choice.get("token_ids", ())])
        prompts.append(events[0]["prompt_token_ids"])
        texts.append("".join(choice["delta"].get("content") or "" for choice in choices))
        rows = [each for choice in choices if choice.get("logprobs") for each in choice["logprobs"]["content"]]
        assert len(rows) == len(seen[-1])
        assert all(math.isfinite(each["logprob"]) and len(each["top_logprobs"]) == 2 for each in rows)

    engine = ScriptedEngine([Reply("Let me see: ä€.", calls=[call("run", command="ls")])], chunks=chunks)
    (trajectory,) = await served(loop, engine)
    (turn,) = trajectory.turns
    assert seen == [list(turn.token_ids)]
    assert prompts == [list(turn.prompt_ids)]
    assert texts == [turn.text]


async def test_whole_answer_has_ids_logprobs_and_usage_of_the_turn() -> None:
    answers: list[Any] = []

    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            body = chat_body([user("One.")], return_token_ids=True, logprobs=True)
            answers.append((await client.post("/chat/completions", json=body)).json())

    (trajectory,) = await served(loop, ["Done."], serve={"train": True})
    (turn,) = trajectory.turns
    answer = ChatCompletion.model_validate(answers[0], strict=True)
    assert answer.choices[0].message.content == "Done."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (turn.start, turn.end - turn.start)
    assert answers[0]["choices"][0]["token_ids"] == list(turn.token_ids)
    assert answers[0]["prompt_token_ids"] == list(turn.prompt_ids)
    rows = answers[0]["choices"][0]["logprobs"]["content"]
    assert [each["logprob"] for each in rows] == pytest.approx(list(turn.logprobs))


async def test_finish_reason_shows_why_a_turn_ended() -> None:
    ended: list[str] = []

    async def loop(endpoint: Endpoint) -> None:
        async with openai_client(endpoint) as client:
            ways: dict[str, Any] = {
                "plain": {},
                "short": {"max_tokens": 3},
                "stops": {"stop": ["o"]},
                "calls": {"tools": [RUN]},
            }
            for word, further in ways.items():
                made = await client.chat.completions.create(model="any", messages=[user(word)], **further)
                ended.append(f"{made.choices[0].finish_reason} {made.choices[0].message.content}")

    says = {"plain": "Done.", "short": "A long answer.", "stops": "Up to here", "calls": call("run", command="ls")}

    def said(model_call: Any) -> Any:
        return next(reply for word, reply in says.items() if word in model_call.prompt[-80:])

    await served(loop, ScriptedEngine(said), serve={"train": True})
    assert ended == ["stop Done.", "length A l", "stop Up t", "tool_calls None"]


async def test_trained_thread_uses_the_sampling_of_the_run() -> None:
    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            body = chat_body([user("One.")], temperature=0, max_tokens=4000, stop="xyz", seed=3, reasoning_effort="low")
            await client.post("/chat/completions", json=body)

    (trajectory,) = await served(
        loop, ["Done."], serve={"train": True}, sampling=Sampling(temperature=0.7, max_tokens=50)
    )
    (turn,) = trajectory.turns
    assert turn.sampling is not None
    assert (turn.sampling.temperature, turn.sampling.max_tokens, turn.sampling.stop) == (0.7, 50, ("xyz",))
    assert trajectory.requests[0].not_granted == {"temperature": 0, "seed": 3, "reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("choice", "meant"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "function": {"name": "run"}}, "run"),
        (None, None),
    ],
)
def test_tool_choice_is_read(choice: Any, meant: Any) -> None:
    request = ChatCompletions().read(chat_body([user("x")], tools=[RUN], tool_choice=choice), {})
    assert request.chat_call.tool_choice == meant


def test_schema_is_enforced_in_turns_without_tools() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    free = ChatCompletions().read(chat_body([user("x")], response_format=form), {})
    assert free.chat_call.sampling is not None
    assert free.chat_call.sampling.schema == schema
    calling = ChatCompletions().read(chat_body([user("x")], response_format=form, tools=[RUN]), {})
    assert calling.chat_call.sampling is None
    assert "response_format" in calling.chat_call.not_granted


@pytest.mark.parametrize(
    ("further", "named"),
    [
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"n": 2}, "n:"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "^temperature=-1: give"),
        ({"max_tokens": 0}, "^max_tokens=0: give"),
        ({"tools": {}}, "tools"),
        ({"tools": ["run"]}, r"tools\[0\]"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"stop": [1]}, "stop"),
        ({"stop": ""}, None),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"top_logprobs": 50}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"a_field_of_tomorrow": {"x": 1}}, None),
    ],
)
def test_invalid_field_is_refused_by_name_and_an_unknown_one_accepted(further: Any, named: str | None) -> None:
    body = {**chat_body([user("x")]), **further}
    if named is None:
        ChatCompletions().read(body, {})
        return
    with pytest.raises(Refused, match=named) as refused:
        ChatCompletions().read(body, {})
    assert refused.value.reason is Reason.INVALID


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [
    *("messages", "tools", "tool_choice", "temperature", "top_p", "stop", "n", "stream", "stream_options"),
    *("response_format", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "return_token_ids"),
    *("parallel_tool_calls", "functions", "min_tokens", "presence_penalty"),
]


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(body=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=8))
def test_any_body_is_read_or_refused_by_name(body: dict[str, Any]) -> None:
    refused = Refused(Reason.INVALID, "it was read")
    try:
        ChatCompletions().read(body, {})
    except Refused as error:
        refused = error
    assert refused.reason is Reason.INVALID
    assert refused.message


async def test_image_is_refused_by_its_place_and_the_episode_continues() -> None:
    responses: list[Any] = []

    async def loop(endpoint: Endpoint) -> None:
        image = {"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}
        async with http(endpoint) as client:
            for content in ([image], [{"type": "text", "text": "Words."}]):
                body = chat_body([{"role": "user", "content": content}])
                responses.append(await client.post("/chat/completions", json=body))

    await served(loop, ["Done."], serve={"train": True})
    assert responses[0].status_code == 400
    assert "message 0 (user)" in responses[0].json()["error"]["message"]
    assert "image_url" in responses[0].json()["error"]["message"]
    assert responses[0].headers["x-should-retry"] == "false"
    assert responses[1].status_code == 200


async def test_history_that_does_not_fit_is_refused_in_known_words() -> None:
    async def loop(endpoint: Endpoint) -> None:
        async with openai_client(endpoint) as client:
            with pytest.raises(openai.BadRequestError, match=r"maximum context length is 300 tokens") as refused:
                await client.chat.completions.create(model="any", messages=[user("word " * 200)])
            assert refused.value.code == "context_length_exceeded"
            made = await client.chat.completions.create(model="any", messages=[user("Short.")])
            assert made.choices[0].message.content == "Done."

    (trajectory,) = await served(loop, ScriptedEngine(["Done."], context=300), serve={"train": True})
    assert [request.delivery for request in trajectory.requests] == [Delivery.REFUSED, Delivery.DELIVERED]


async def test_history_that_does_not_fit_may_end_the_episode() -> None:
    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            first = await client.post("/chat/completions", json=chat_body([user("Short.")]))
            assert first.status_code == 200
            long = await client.post("/chat/completions", json=chat_body([user("word " * 200)]))
            assert long.json()["error"]["code"] in ("context_length_exceeded", "episode_over")

    (trajectory,) = await served(
        loop,
        ScriptedEngine(["Done."], context=300),
        serve={"train": True, "overflow": "end"},
        outcome=Outcome.CONTEXT_LIMIT,
    )
    assert trajectory.turns


@pytest.mark.parametrize("wrong", [{"train": 3}, {"overflow": "compact"}])
async def test_options_of_serve_are_checked(wrong: Any) -> None:
    async def loop(endpoint: Endpoint) -> None:
        raise AssertionError("it was served")

    with pytest.raises((BadOption, AssertionError)) as raised:
        await served(loop, ["Done."], serve=wrong)
    assert f"serve({next(iter(wrong))}=" in str(raised.value)


async def test_requests_without_tools_are_not_trained_and_not_main(tmp_path: Path) -> None:
    async def loop(endpoint: Endpoint) -> None:
        async with openai_client(endpoint) as client:
            await client.chat.completions.create(model="any", messages=[user("A title for: Mend it.")])
            await tool_loop(endpoint, stream=True)

    def said(model_call: Any) -> Any:
        return "A title" if "A title for" in model_call.prompt else CALLS[model_call.prompt.count("result 0")]

    main, title = await with_untrained(loop, ScriptedEngine(said), tmp_path)
    assert (main.agent, main.trained, len(main.turns)) == ("main", True, 3)
    assert (title.agent, title.trained, len(title.turns)) == ("main-1", False, 1)
    assert title.requests[0].verdict is Verdict.NEW


async def test_a_function_decides_which_threads_are_trained(tmp_path: Path) -> None:
    seen: list[tuple[str, list[str]]] = []

    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            for label, tools in (("one", [RUN]), ("two", [])):
                body = chat_body([user(label)], tools=tools)
                await client.post("/chat/completions", json=body, headers={"x-session-id": label})
        assert [(thread.label, thread.trained) for thread in endpoint.threads] == [("one", False), ("two", True)]

    def trained(thread: Any) -> bool:
        seen.append((thread.label, list(thread.tools)))
        return bool(thread.label == "two")

    trajectories = await with_untrained(loop, ScriptedEngine(lambda _: "Done."), tmp_path, serve={"train": trained})
    assert seen == [("one", ["run"]), ("two", [])]
    assert {trajectory.trained for trajectory in trajectories} == {True, False}


@pytest.mark.parametrize("history", ["append", "client"])
async def test_prompt_has_the_sampled_or_the_sent_reply_by_option(history: str, tmp_path: Path) -> None:
    """The client leaves out the reasoning, as many clients do."""

    async def loop(endpoint: Endpoint) -> None:
        messages: list[Any] = [user("Mend it.")]
        async with http(endpoint) as client:
            for _ in range(3):
                body = chat_body(messages, tools=[RUN])
                message = (await client.post("/chat/completions", json=body)).json()["choices"][0]["message"]
                assert message.pop("reasoning_content") == message.pop("reasoning") == "Hidden words."
                messages += [message]
                messages += [
                    {"role": "tool", "tool_call_id": each["id"], "content": "two"} for each in message["tool_calls"]
                ]

    says = "<think>Hidden words.</think>\n[run(command='ls')]"
    file = tmp_path / "run.db"
    engine = ScriptedEngine(lambda _: says, record=True)
    (trajectory,) = await served(loop, engine, serve={"history": history}, file=file)
    assert verify(file).exit_code == 0
    assert [request.verdict for request in trajectory.requests] == ["new", "append", "append"]
    last = engine.tokenizer.decode(trajectory.turns[-1].prompt_ids)
    assert last.count("Hidden words.") == (2 if history == "append" else 0)
    causes = {"append": ["start"], "client": ["start", "client", "client"]}
    assert [segment.cause for segment in trajectory.segments] == causes[history]
