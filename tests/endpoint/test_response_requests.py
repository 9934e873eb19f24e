"""Requests of OpenAI's Responses: accepted fields, and refusals that name the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.endpoint.refusals import Reason, Refused
from runner.endpoint.responses import Responses
from runner.episode.client_messages import MessageReader
from runner.options import Sampling
from tests.endpoint.response_building import (
    EVENT,
    HANDLE,
    TALKS,
    TOOLS,
    TurnCase,
    as_codex_keeps,
    ask,
    asked,
    events_of,
    stream_of,
    turn_of,
)


def test_string_input_is_a_user_message_after_instructions() -> None:
    assert ask(input="Mend it.", instructions="Be brief.").chat_call.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Mend it."},
    ]


def test_developers_speak_as_the_system() -> None:
    (message,) = asked(
        [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "So."}]}]
    ).messages
    assert message == {"role": "system", "content": "So."}


def test_tools_of_a_provider_are_named_as_not_granted() -> None:
    read = ask(tools=TOOLS).chat_call
    shell, _, patch = [tool["function"] for tool in read.tools]
    assert shell["parameters"] == TOOLS[0]["parameters"]
    assert "start: /.+/" in patch["description"]
    assert patch["parameters"]["required"] == ["input"]
    assert read.not_granted == {"tools": ["web_search"]}


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        (None, None),
        ({"type": "function", "name": "shell"}, "shell"),
        ({"type": "function", "name": "spawn", "namespace": "agents"}, "agents__spawn"),
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "shell"}]}, "shell"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "shell"}]}, "auto"),
    ],
)
def test_a_choice_of_tools_is_read(given: Any, choice: str | None) -> None:
    request = ask(tools=TOOLS, tool_choice=given)
    assert request.chat_call.tool_choice == choice
    case = TurnCase(turn_of(TALKS), TALKS, [])
    for event in events_of(stream_of(case, request)):
        EVENT.validate_python(event)


def test_allowed_tools_are_recorded_as_not_granted() -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "shell"}]}
    assert ask(tools=TOOLS[:1], tool_choice=allowed).chat_call.not_granted == {"allowed_tools": ["shell"]}


def test_the_sampling_of_a_request_is_read() -> None:
    schema = {"type": "object"}
    request = ask(
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=9,
        top_logprobs=2,
        text={"format": {"type": "json_schema", "name": "x", "schema": schema}},
    )
    assert request.chat_call.sampling == Sampling(temperature=0.5, top_p=0.9, max_tokens=9, logprobs=2, schema=schema)
    assert ask(top_logprobs=2).top_logprobs == 2
    assert ask().chat_call.sampling is None


def test_unsupported_fields_are_recorded_as_not_granted() -> None:
    body = {
        "store": True,
        "parallel_tool_calls": False,
        "truncation": "auto",
        "text": {"verbosity": "low"},
        "reasoning": {"effort": "high", "summary": None},
        "include": ["reasoning.encrypted_content", "file_search_call.results"],
        "service_tier": "flex",
    }
    assert ask(**body).chat_call.not_granted == {
        "parallel_tool_calls": False,
        "truncation": "auto",
        "verbosity": "low",
        "reasoning": {"effort": "high"},
        "include": ["file_search_call.results"],
        "service_tier": "flex",
    }
    assert ask(store=False, truncation="disabled", parallel_tool_calls=True).chat_call.not_granted == {}


def test_fields_that_change_nothing_are_left_alone() -> None:
    assert ask(prompt_cache_key="x", client_metadata={"a": "b"}, newest=None) == ask()


def test_unknown_field_is_recorded_as_not_granted() -> None:
    assert ask(newest=[1]).chat_call.not_granted == {"newest": [1]}


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        ("x-deltarunner-thread", "x-claude-code-agent-id"),
        ("x-claude-code-agent-id", "thread-id"),
        ("x-claude-code-agent-id", "x-claude-code-session-id"),
        ("thread-id", "x-session-id"),
        ("thread-id", "session-id"),
    ],
)
def test_an_agents_own_id_goes_before_that_of_its_session(narrow: str, wide: str) -> None:
    assert ask({wide: "session", narrow: "agent"}).chat_call.label == "agent"
    assert ask({wide: "session", narrow: ""}).chat_call.label == "session"


def test_metadata_of_codex_becomes_label_and_purpose() -> None:
    metadata = json.dumps({"thread_id": "t1", "agent_name": "main", "request_kind": "compaction"})
    read = ask({"x-codex-turn-metadata": metadata, "session-id": "s1", "user-agent": "codex"}).chat_call
    assert (read.label, read.purpose, read.client, read.form) == ("s1", "compaction", "codex", "responses")
    assert ask({"x-codex-turn-metadata": metadata}).chat_call.label == "t1"
    assert ask({"x-codex-turn-metadata": metadata, "thread-id": "t2"}).chat_call.label == "t2"
    for broken in ("{", "[]", '{"thread_id": 1}'):
        read = ask({"x-codex-turn-metadata": broken}).chat_call
        assert (read.label, read.purpose) == ("", "")


# --- refusals


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ["Mend it."]}, "input[0]"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "web_search_call"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input_file"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": 1}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"instructions": ["x"]}, "instructions"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 1}]}, "tools[0].parameters"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.mode"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens=0: give"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"stream": "yes"}, "stream"),
        ({"include": "all"}, "include"),
    ],
)
def test_unusable_field_is_refused_by_its_name(body: dict[str, Any], named: str) -> None:
    with pytest.raises(Refused) as refused:
        ask(**body)
    assert refused.value.reason is Reason.INVALID
    assert named in refused.value.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
CODEX: dict[str, Any] = {
    "model": "m",
    "instructions": "Be brief.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Mend it."}]},
        *as_codex_keeps(
            events_of(stream_of(TurnCase(turn_of(TALKS), TALKS, []), ask(tools=TOOLS)))[-1]["response"]["output"]
        ),
        {"type": "function_call_output", "call_id": f"{HANDLE}_0", "output": "three files"},
        {"type": "custom_tool_call", "call_id": f"{HANDLE}_1j", "name": "apply_patch", "input": "x"},
    ],
    "tools": TOOLS,
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "shell"}]},
    "parallel_tool_calls": True,
    "reasoning": {"effort": "high"},
    "text": {"verbosity": "low", "format": {"type": "json_schema", "schema": {}}},
    "include": ["reasoning.encrypted_content"],
    "store": False,
    "stream": True,
    "temperature": 1,
    "top_logprobs": 1,
}


def places(value: Any) -> list[tuple[Any, Any]]:
    """Yield every place in a value, as its container and its key there."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [place for key in keys for place in [(value, key), *places(value[key])]]


@given(st.data())
def test_a_malformed_request_is_refused_and_nothing_else_happens(data: st.DataObject) -> None:
    body = json.loads(json.dumps(CODEX))
    for _ in range(data.draw(st.integers(1, 3))):
        inside, key = data.draw(st.sampled_from(places(body)))
        inside[key] = data.draw(JSON)
    try:
        request = Responses().read(body, {})
    except Refused:
        return
    MessageReader().read(request.chat_call.messages)
    case = TurnCase(turn_of(TALKS), TALKS, [])
    assert events_of(stream_of(case, request))[-1]["type"] == "response.completed"
