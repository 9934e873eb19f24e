"""Requests in the format of Anthropic's Messages: accepted fields, refused fields, and turns that return unchanged."""

from __future__ import annotations

import json
from contextlib import suppress
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner import BadInput, Sampling
from runner.chat_requests import ChatCall
from runner.endpoint.refusals import Refused
from runner.endpoint.wire_form import WireRequest
from runner.episode.client_messages import MessageReader, joined
from runner.tools.external_tools import tools_of
from runner.turn_events import TurnProgress
from tests.endpoint.anthropic_turns import FORM, HANDLE, PARTS, rebuilt, said, streamed, whole

RUN: Any = {
    "name": "run",
    "description": "Run a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    "cache_control": {"type": "ephemeral"},
}
TASK: Any = {"role": "user", "content": "Mend it."}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def body(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 100, "messages": list(messages) or [TASK], **fields}


def read(given: dict[str, Any], **headers: str) -> WireRequest:
    return FORM.read(given, {name.replace("_", "-"): value for name, value in headers.items()})


def asked(*messages: Any, **fields: Any) -> ChatCall:
    return read(body(*messages, **fields)).chat_call


def refusal(given: dict[str, Any]) -> str:
    with pytest.raises(Refused) as raised:
        read(given)
    assert raised.value.reason.status == 400
    return raised.value.message


# --- the history


def test_a_history_of_blocks_becomes_messages_of_texts() -> None:
    call = {"type": "tool_use", "id": f"{HANDLE}_0", "name": "run", "input": {"command": "ls"}}
    thought = {"type": "thinking", "thinking": "I look first.", "signature": HANDLE}
    found = asked(
        {"role": "user", "content": [text("It is broken."), text("Mend it.")]},
        {"role": "assistant", "content": [thought, text("I will"), text(" look."), call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"{HANDLE}_0", "content": "three"}]},
        {"role": "system", "content": [text("Five tools are left.")]},
        system=[text("You mend"), text("programs.")],
    )
    function = {"name": "run", "arguments": {"command": "ls"}}
    assert found.messages == [
        {"role": "system", "content": "You mend\nprograms."},
        {"role": "user", "content": "It is broken.\nMend it."},
        {
            "role": "assistant",
            "content": "I will look.",
            "reasoning_content": "I look first.",
            "tool_calls": [{"id": f"{HANDLE}_0", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": f"{HANDLE}_0", "content": "three"},
        {"role": "system", "content": "Five tools are left."},
    ]
    assert found.handles == [HANDLE]
    assert (found.form, found.system_as_user) == ("anthropic", False)


@pytest.mark.parametrize(
    ("content", "text_sent"), [("ok", "ok"), (None, ""), ([], ""), ([text("o"), text("k")], "o\nk"), ("", "")]
)
def test_the_result_of_a_tool_is_a_text_whatever_it_came_as(content: Any, text_sent: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": content}
    assert asked({"role": "user", "content": [result]}).messages == [
        {"role": "tool", "tool_call_id": "a", "content": text_sent}
    ]


def test_results_come_after_their_calls_and_before_user_text() -> None:
    first, second = ({"type": "tool_result", "tool_use_id": each, "content": each} for each in "ab")
    (*results, user) = asked({"role": "user", "content": [first, text("Look"), second, text("here.")]}).messages
    assert [(each["role"], each["content"]) for each in results] == [("tool", "a"), ("tool", "b")]
    assert user == {"role": "user", "content": "Look\nhere."}


def test_changing_billing_line_is_separate() -> None:
    systems = [
        asked(system=[text(f"x-anthropic-billing-header: cch={cch};"), text("You mend.", **mark)]).messages[:1]
        for cch, mark in (("a1", {}), ("b2", {"cache_control": {"type": "ephemeral"}}))
    ]
    (one,), (other,) = map(MessageReader().read, systems)
    assert one.message == other.message == {"role": "system", "content": "You mend."}
    assert (one.volatile, other.volatile) == (1, 1)
    assert {each.value for each in other.tolerated - one.tolerated} == {"cache_marks"}


def test_fields_that_the_model_does_not_see_are_noted_or_ignored() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": "no", "is_error": True, "cache_control": {"t": 1}}
    (read_result,) = MessageReader().read(asked({"role": "user", "content": [result]}).messages)
    assert {each.value for each in read_result.tolerated} == {"extra_keys", "cache_marks"}
    hidden = {"type": "redacted_thinking", "data": "AAAA"}
    (found,) = asked({"role": "assistant", "content": [hidden, text("So.", citations=None)]}).messages
    assert found == {"role": "assistant", "content": "So."}
    assert asked(later="field", messages=[{**TASK, "id": 3}]).messages == [TASK]


def test_previous_message_is_named_by_cache_diagnostics() -> None:
    found = asked(diagnostics={"previous_message_id": HANDLE.replace("call_", "msg_")})
    assert found.handles == [HANDLE]


@given(parts=PARTS)
def test_answer_sent_back_is_read_as_the_message_of_its_turn(parts: list[TurnProgress]) -> None:
    sample = said(parts)
    wanted = sample.turn.as_message()
    for answer in (whole(sample), rebuilt(streamed(sample, range(len(sample.progress))))):
        found = asked(TASK, {"role": "assistant", "content": answer["content"]})
        given = found.messages[-1]
        assert (given["content"], given.get("reasoning_content", "")) == (wanted["content"], sample.turn.reasoning)
        assert given.get("tool_calls", []) == json.loads(json.dumps(wanted.get("tool_calls", [])))
        assert found.handles == ([HANDLE] * len(found.handles) if sample.turn.reasoning else [])
        assert bool(found.handles) == bool(sample.turn.reasoning)
        # One turn may also return as one message for each of its blocks.
        apart = asked(TASK, *({"role": "assistant", "content": [block]} for block in answer["content"])).messages[1:]
        if apart:
            together = joined(MessageReader().read(apart)).message
            assert (together["content"], together.get("reasoning_content", "")) == (
                wanted["content"],
                sample.turn.reasoning,
            )


# --- tools, sampling and the rest


def test_tools_are_functions_and_those_of_the_api_itself_are_left_out() -> None:
    server = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    found = asked(
        tools=[RUN, server, {"type": "bash_20250124", "name": "bash"}, {**RUN, "name": "b", "type": "custom"}]
    )
    assert [each["function"]["name"] for each in found.tools] == ["run", "bash", "b"]
    function = {"name": "run", "description": "Run a command.", "parameters": RUN["input_schema"]}
    assert found.tools[0] == {"type": "function", "function": function}
    assert found.not_granted == {"tools": ["web_search"]}
    assert [tool.name for tool in tools_of(found.tools)] == ["run", "bash", "b"]


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        (None, None),
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "run"}, "run"),
    ],
)
def test_tool_choice_of_each_type_is_read(given: Any, choice: str | None) -> None:
    assert asked(tools=[RUN], tool_choice=given).tool_choice == choice


def test_sampling_is_read_and_what_is_not_granted_is_recorded() -> None:
    found = asked(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        stop_sequences=["END"],
        thinking={"type": "adaptive"},
        output_config={"effort": "high", "format": None},
        context_management={"edits": [{"type": "clear_thinking_20251015"}]},
        service_tier="auto",
        speed="fast",
        tools=[RUN],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )
    assert found.sampling == Sampling(max_tokens=7, temperature=0.5, top_p=0.9, top_k=3, stop=("END",))
    assert found.not_granted == {
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        "speed": "fast",
        "disable_parallel_tool_use": True,
    }


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_a_schema_is_read_and_not_granted_where_tools_may_be_called(field: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    fields: Any = {field: {"format": form} if field == "output_config" else form}
    assert asked(**fields).sampling == Sampling(max_tokens=100, schema=schema)
    called = asked(**fields, tools=[RUN])
    assert called.sampling == Sampling(max_tokens=100)
    assert list(called.not_granted) == ["response_format"]


def test_a_count_needs_no_most_tokens() -> None:
    given = body(stream=True)
    del given["max_tokens"]
    counted = FORM.read_to_count(given, {})
    assert (counted.messages, counted.sampling) == ([TASK], None)
    assert refusal(given).startswith("max_tokens: ")


def test_stream_ids_logprobs_and_client_name_are_read() -> None:
    assert not read(body()).stream
    found = read(body(stream=True, return_token_ids=True, logprobs=True), user_agent="claude-cli/2")
    assert (found.stream, found.ids, found.logprobs, found.chat_call.client) == (True, True, True, "claude-cli/2")


@pytest.mark.parametrize(
    ("user", "label"),
    [
        ("user_0f_account_1-2_session_3-4", "3-4"),
        ('{"device_id": "d", "session_id": "3-4"}', "3-4"),
        ("user_7", ""),
        ("[1]", ""),
        ('{"session_id": 3}', ""),
        (7, ""),
        (None, ""),
    ],
)
def test_session_in_the_user_id_is_a_label_without_header(user: Any, label: str) -> None:
    given = body(metadata={"user_id": user})
    assert read(given).chat_call.label == label
    assert read(given, x_claude_code_agent_id="a", x_claude_code_session_id="s").chat_call.label == "a"
    assert read(given).chat_call.not_granted == {}


# --- refusals


def image(where: list[Any]) -> Any:
    where.append({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}})
    return where


@pytest.mark.parametrize(
    ("changed", "begin"),
    [
        ({"messages": []}, "messages: give at least one"),
        ({"messages": None}, "messages: give at least one"),
        ({"messages": "Hi"}, "messages: give a list"),
        ({"messages": ["Hi"]}, "messages[0]: give an object"),
        ({"messages": [TASK, {"role": "tool", "content": "x"}]}, "messages[1].role: give user, assistant or system"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: give a string or a list of blocks"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]: give a block"),
        ({"messages": [{"role": "user", "content": image([])}]}, "messages[0].content[0]: a block of type 'image'"),
        (
            {"messages": [{"role": "user", "content": [text("a"), {"type": "document"}]}]},
            "messages[0].content[1]: a block of type 'document'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id: give a string",
        ),
        ({"system": [{"type": "image"}]}, "system[0]: a block of type 'image'"),
        ({"system": 3}, "system: give a string or a list of blocks"),
        ({"max_tokens": 0}, "max_tokens: give 1 or more"),
        ({"max_tokens": 2.5}, "max_tokens: give a whole number"),
        ({"temperature": "hot"}, "temperature: give a number"),
        ({"stop_sequences": [""]}, "stop_sequences: give"),
        ({"stream": 1}, "stream: give true or false"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema: give a JSON schema"),
        ({"tools": [RUN, {"input_schema": {}}]}, "tools[1].name: give the tool's name"),
        ({"tools": [{**RUN, "description": 3}]}, "tools[0].description: give a string"),
        ({"tool_choice": {"type": "tool", "name": "walk"}}, "tool_choice.name: 'walk' is not one of the tools"),
        ({"tool_choice": {"type": []}}, "tool_choice.type: give auto, any, tool or none"),
        ({"tool_choice": "any"}, "tool_choice: give an object"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format: give the type"),
        ({"output_config": {"format": "json"}}, "output_config.format: give an object"),
        ({"mcp_servers": [{"url": "http://there"}]}, "mcp_servers: "),
        ({"container": "box"}, "container: "),
        ({"thread": {"type": "create"}}, "thread: "),
        ({"compaction": {"type": "enabled"}}, "compaction: "),
    ],
)
def test_unusable_field_is_refused_by_its_name(changed: dict[str, Any], begin: str) -> None:
    message = refusal({**body(), **changed})
    assert message.startswith(begin)


def test_fields_that_ask_for_nothing_are_not_refused() -> None:
    nothing = dict.fromkeys(("mcp_servers", "container", "thread", "system", "tools", "tool_choice", "stream"))
    assert asked(**{**nothing, "mcp_servers": []}).messages == [TASK]


RICH: Any = body(
    {"role": "user", "content": [text("Mend it.", cache_control={"type": "ephemeral"})]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "So.", "signature": HANDLE},
            text("I look."),
            {"type": "tool_use", "id": "a", "name": "run", "input": {"command": "ls"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [text("ok")], "is_error": False},
            text("So?"),
        ],
    },
    {"role": "system", "content": "Be brief."},
    system=[text("x-anthropic-billing-header: a"), text("You mend.")],
    tools=[RUN, {"type": "web_search_20250305", "name": "web_search"}],
    tool_choice={"type": "tool", "name": "run"},
    stop_sequences=["END"],
    temperature=1,
    top_k=5,
    metadata={"user_id": "user_a_session_b"},
    output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    output_format={"type": "json_schema", "schema": {"type": "object"}},
    thinking={"type": "enabled", "budget_tokens": 1024},
    diagnostics={"previous_message_id": "msg_a"},
    stream=True,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(each for key, other in inner for each in places(other, (*path, key)))][not path :]


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["text", "tool"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@pytest.mark.slow
@given(changes=st.lists(st.tuples(st.sampled_from(places(RICH)), JSON), min_size=1, max_size=3))
def test_altered_body_is_read_or_refused(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    given = deepcopy(RICH)
    for (*path, last), value in changes:
        inside = given
        for key in path:
            inside = inside[key] if isinstance(inside, dict | list) and len(inside) > 0 and has(inside, key) else {}
        if isinstance(inside, dict | list) and has(inside, last):
            inside[last] = value
    with suppress(Refused, BadInput):
        found = FORM.read(given, {}).chat_call
        MessageReader().read(found.messages)
        tools_of(found.tools)


def has(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else isinstance(key, int) and key < len(holder)
