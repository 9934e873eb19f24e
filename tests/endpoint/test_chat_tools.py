"""Custom tools, allowed tools and refusals in Chat Completions, as OpenAI's own client sends and reads them."""

from __future__ import annotations

from typing import Any

import pytest

from runner import Endpoint
from runner.endpoint.chat_completions import ChatCompletions
from runner.endpoint.refusals import Refused
from runner.testing import Reply, call
from tests.endpoint.serving import RUN, chat_body, http, openai_client, served, user
from tests.playing import recording

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone, pytest.mark.sample_functions(2)]

GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"+'}}
PATCH: Any = {"type": "custom", "custom": {"name": "patch", "description": "Change files.", "format": GRAMMAR}}


def read(**fields: Any) -> Any:
    return ChatCompletions().read(chat_body([user("One.")], **fields), {}).chat_call


def test_custom_tool_is_shown_as_a_function_of_one_text() -> None:
    (tool,) = read(tools=[PATCH]).tools
    function = tool["function"]
    assert (tool["type"], function["name"]) == ("function", "patch")
    assert function["parameters"]["required"] == ["input"]
    assert function["description"].startswith("Change files.")
    assert 'lark grammar:\nstart: "a"+' in function["description"]


@pytest.mark.parametrize("form", [None, {}, {"type": "text"}])
def test_a_custom_tool_of_any_text_has_its_description_alone(form: Any) -> None:
    (tool,) = read(tools=[{"type": "custom", "custom": {"name": "patch", "description": "Say.", "format": form}}]).tools
    assert tool["function"]["description"] == "Say."


@pytest.mark.parametrize("custom", [None, {}, {"name": ""}, {"name": 1}, "patch", {"name": "a", "format": "text"}])
def test_a_custom_tool_that_cannot_be_read_is_refused_by_its_index(custom: Any) -> None:
    with pytest.raises(Refused, match=r"tools\[1\]"):
        read(tools=[RUN, {"type": "custom", "custom": custom}])


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "input_text"),
    [({"input": "aaa\n"}, "aaa\n"), ({"input": ""}, ""), ({"text": "b"}, '{"text":"b"}'), ({}, "{}")],
    ids=["text", "empty", "another argument", "none"],
)
async def test_custom_call_is_text_and_its_result_finds_the_turn(
    stream: bool, said: dict[str, Any], input_text: str
) -> None:
    async def loop(endpoint: Endpoint) -> None:
        messages: list[Any] = [user("One.")]
        asked: Any = {"model": "any", "messages": messages, "tools": [PATCH, RUN]}
        async with openai_client(endpoint) as client:
            for _ in range(2):
                if stream:
                    message: Any = {"role": "assistant", "content": None}
                    async for chunk in await client.chat.completions.create(**asked, stream=True):
                        for made in chunk.choices[0].delta.tool_calls or ():
                            given = {**made.model_dump(exclude_none=True)}
                            del given["index"]
                            message.setdefault("tool_calls", []).append(given)
                else:
                    answer = (await client.chat.completions.create(**asked)).choices[0]
                    assert answer.finish_reason == "tool_calls"
                    message = answer.message.model_dump(exclude_none=True)
                first, second = message["tool_calls"]
                assert (first["type"], first["custom"]) == ("custom", {"name": "patch", "input": input_text})
                assert (second["type"], second["function"]["name"]) == ("function", "run")
                messages.append(message)
                messages += [
                    {"role": "tool", "tool_call_id": each["id"], "content": "done"} for each in message["tool_calls"]
                ]

    reply = Reply("", calls=[call("patch", **said), call("run", command="ls")])
    (trajectory,) = await served(loop, recording([reply, reply], template="hermes"))
    assert [each.verdict for each in trajectory.requests] == ["new", "append"]
    assert len(trajectory.segments) == 1
    assert not {"arguments_respelt", "call_ids"} & {
        each for request in trajectory.requests for each in request.tolerated
    }


@pytest.mark.parametrize(
    ("choice", "meant", "noted"),
    [
        ({"type": "custom", "custom": {"name": "patch"}}, "patch", None),
        ({"type": "function", "function": {"name": "run"}}, "run", None),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [RUN]}}, "auto", ["run"]),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [RUN]}}, "run", None),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [PATCH]}}, "patch", None),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [RUN, PATCH]}},
            "required",
            ["run", "patch"],
        ),
    ],
)
def test_a_choice_between_tools_is_read(choice: Any, meant: str, noted: Any) -> None:
    asked = read(tools=[RUN, PATCH], tool_choice=choice)
    assert asked.tool_choice == meant
    assert asked.not_granted == ({} if noted is None else {"allowed_tools": noted})


@pytest.mark.parametrize(
    "choice",
    [
        "always",
        1,
        [],
        {"type": "custom"},
        {"type": "custom", "custom": {"name": ""}},
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": []}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": "run"}},
    ],
)
def test_invalid_tool_choice_is_refused_by_name(choice: Any) -> None:
    with pytest.raises(Refused, match=r"^tool_choice"):
        read(tools=[RUN], tool_choice=choice)


async def test_a_refusal_in_the_history_is_what_the_assistant_said() -> None:
    async def loop(endpoint: Endpoint) -> None:
        for refused in ({"content": None, "refusal": "I cannot."}, {"content": "", "refusal": "I cannot."}):
            messages = [user("One."), {"role": "assistant", **refused}, user("Then another.")]
            async with http(endpoint) as client:
                answer = await client.post("/chat/completions", json=chat_body(messages, tools=[RUN]))
            assert answer.status_code == 200, answer.text

    (trajectory,) = await served(loop, recording(["Done.", "Done."], template="hermes"))
    assert [message["content"] for message in trajectory.segments[0].messages[:2]] == ["One.", "I cannot."]


async def test_a_turn_whose_refusal_is_null_is_known() -> None:
    async def loop(endpoint: Endpoint) -> None:
        messages: list[Any] = [user("One.")]
        async with http(endpoint) as client:
            for _ in range(2):
                answer = await client.post("/chat/completions", json=chat_body(messages, tools=[RUN]))
                message = answer.json()["choices"][0]["message"]
                assert message["refusal"] is None
                messages += [message, user("Continue.")]

    (trajectory,) = await served(loop, recording(["Done.", "Done."], template="hermes"))
    assert [each.verdict for each in trajectory.requests] == ["new", "append"]


def test_tool_without_a_type_is_read_as_a_function() -> None:
    assert read(tools=[{"function": RUN["function"]}, {"type": None, "function": RUN["function"]}]).tools == [RUN, RUN]


def test_a_tool_that_a_provider_would_run_is_left_out_and_noted() -> None:
    asked = read(tools=[{"type": "web_search", "web_search": {}}, RUN, {"type": "browser_search"}])
    assert (asked.tools, asked.not_granted) == ([RUN], {"tools": ["web_search", "browser_search"]})


@pytest.mark.parametrize(
    ("given", "read_as"),
    [
        ({"effort": "low"}, None),
        (7, None),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, {}, 1], "ab"),
        ([], None),
    ],
)
@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_in_the_history_that_is_not_a_text_refuses_nothing(name: str, given: Any, read_as: Any) -> None:
    message = {"role": "assistant", "content": "Done.", name: given}
    asked = ChatCompletions().read(chat_body([user("One."), message, user("Two.")]), {}).chat_call
    assert asked.messages[1] == {**message, name: read_as}
