"""OpenAI's Responses: clients rebuild the answer from its events, and items that they send back are the turn."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response

from runner.endpoint.refusals import Reason, Refused
from runner.endpoint.responses import Responses
from runner.endpoint.wire_form import Answered, Restarted, WireRequest
from runner.engines.base import FinishReason
from runner.messages import ToolCall, as_messages
from runner.parsing.events import ContentPiece, ReasoningPiece
from runner.turn_events import IdsSampled, ToolCalled, TurnAdmitted, TurnRestarted
from tests.endpoint.response_building import (
    EVENT,
    HANDLE,
    PROMPT,
    TALKS,
    TOOLS,
    Part,
    TurnCase,
    as_codex_keeps,
    ask,
    asked,
    deltas,
    events_of,
    joined,
    stream_of,
    turn_cases,
    turn_of,
    writer,
)

# Versions of the client differ in the HTTP library that they use.
httpx: Any = sys.modules[openai.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0]]


def whole_of(case: TurnCase, request: WireRequest) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(writer(request).whole(Answered.of(case.turn)))
    return answer


def last_of(raw: bytes) -> dict[str, Any]:
    response: dict[str, Any] = events_of(raw)[-1]["response"]
    return response


def rebuilt(raw: bytes) -> dict[str, Any]:
    """Return the response that openai-python's stream helper builds from a stream."""

    def reply(request: Any) -> Any:
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=raw)

    line = httpx.Client(transport=httpx.MockTransport(reply))
    client = openai.OpenAI(api_key="x", base_url="http://endpoint/v1", http_client=line, max_retries=0)
    with client, client.responses.stream(model="m", input="Mend it.") as stream:
        *_, last = stream
    assert last.type in ("response.completed", "response.incomplete")
    response: dict[str, Any] = last.response.to_dict()
    return response


# --- writing


@given(turn_cases(), st.booleans(), st.booleans())
def test_every_event_is_one_of_openai_s(case: TurnCase, ids: bool, logprobs: bool) -> None:
    include = ["message.output_text.logprobs"] if logprobs else []
    request = ask(tools=TOOLS, return_token_ids=ids, include=include)
    events = events_of(stream_of(case, request))
    for event in events:
        EVENT.validate_python(event)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert [each for each in kinds if each in ("response.completed", "response.incomplete")] == [kinds[-1]]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")
    Response.model_validate(whole_of(case, request))


@given(turn_cases())
def test_joined_deltas_are_the_text_of_the_turn_and_its_items(case: TurnCase) -> None:
    events = events_of(stream_of(case, ask(tools=TOOLS)))
    assert deltas(events, "output_text") == case.turn.text
    assert deltas(events, "reasoning_text") == case.turn.reasoning
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert len({item["id"] for item in done}) == len(done)
    for index, item in enumerate(done):
        own = [event for event in events if event.get("output_index") == index]
        said = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert said == text_of(item)
        assert {event["item_id"] for event in own if "item_id" in event} == {item["id"]}


def text_of(item: Mapping[str, Any]) -> str:
    match item["type"]:
        case "function_call":
            text = item["arguments"]
        case "custom_tool_call":
            text = item["input"]
        case _:
            text = "".join(part["text"] for part in item["content"])
    assert isinstance(text, str)
    return text


@given(turn_cases())
def test_openai_s_own_reader_of_streams_rebuilds_the_whole_answer(case: TurnCase) -> None:
    request = ask(tools=TOOLS)
    raw, whole = stream_of(case, request), whole_of(case, request)
    read = rebuilt(raw)
    assert read["status"] == whole["status"]
    assert read["usage"] == whole["usage"]
    assert read["id"] == whole["id"]
    kinds = [isinstance(part, ToolCall) for part in case.parts]
    if kinds == sorted(kinds):  # text after a call is a second message in the stream
        assert as_codex_keeps(read["output"]) == as_codex_keeps(whole["output"])
    assert calls_of(read) == calls_of(whole)
    assert Response.model_validate(last_of(raw)).output_text == Response.model_validate(whole).output_text


def calls_of(response: Mapping[str, Any]) -> list[Any]:
    return [item for item in as_codex_keeps(response["output"]) if "call_id" in item]


@given(turn_cases())
def test_the_ids_beside_the_events_joined_are_those_of_the_turn(case: TurnCase) -> None:
    request = ask(tools=TOOLS, return_token_ids=True)
    events = events_of(stream_of(case, request))
    assert joined(events, "token_ids") == list(case.turn.token_ids)
    assert events[0]["prompt_token_ids"] == PROMPT
    whole = whole_of(case, request)
    assert (whole["token_ids"], whole["prompt_token_ids"]) == (list(case.turn.token_ids), PROMPT)
    assert not joined(events_of(stream_of(case, ask(tools=TOOLS))), "token_ids"), "the request does not ask for ids"


@given(turn_cases())
def test_logprob_of_each_id_is_sent_once(case: TurnCase) -> None:
    request = ask(tools=TOOLS, include=["message.output_text.logprobs"])
    events = events_of(stream_of(case, request))
    ids = [f"<{each}>" for each in case.turn.token_ids]
    texts = [event for event in events if event["type"] == "response.output_text.delta"]
    rows = [*joined(texts, "logprobs"), *events[-1].get("logprobs", ())]
    assert [row["token"] for row in rows] == ids
    assert [row["logprob"] for row in rows] == list(case.turn.logprobs)
    whole = whole_of(case, request)
    message = next((item for item in whole["output"] if item["type"] == "message"), None)
    rows = whole["logprobs"] if message is None else message["content"][0]["logprobs"]
    assert [row["token"] for row in rows] == ids


def test_a_text_comes_as_it_is_sampled_and_nothing_waits_for_the_end() -> None:
    made = writer()
    begin = events_of(made.write([TurnAdmitted(HANDLE, PROMPT), ReasoningPiece("H"), ReasoningPiece("m")]))
    assert begin[-1]["delta"] == "Hm"
    more = made.write([ContentPiece("I "), IdsSampled([1], None, None), ContentPiece("look")])
    assert more.count(b"response.output_text.delta") == 4, "in two events, each of which contains the text twice"
    called = made.write([ToolCalled(ToolCall("x", "shell", {"command": "ls"}))])
    assert called.count(b"event: response.output_item.done") == 2, "both the message and the call have ended"


def test_text_after_a_call_is_a_separate_message() -> None:
    made = writer()
    shell = ToolCall("x", "shell", {"command": "ls"})
    turn = turn_of([ContentPiece("I look."), shell, ContentPiece("\nAnd wait.")])
    admitted = TurnAdmitted(HANDLE, PROMPT)
    raw = made.write([admitted, ContentPiece("I look."), ToolCalled(shell), ContentPiece("\nAnd wait.")])
    output = last_of(raw + made.end(Answered.of(turn)))["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "message"]
    assert len({item["id"] for item in output}) == 3
    assert as_messages(asked(output).messages) == [turn.as_message()]


def test_turn_without_text_is_an_empty_message() -> None:
    nothing: list[list[Part]] = [[], [ReasoningPiece("Hm.")]]
    for parts in nothing:
        case = TurnCase(turn_of(parts), parts, [])
        output = last_of(stream_of(case, ask()))["output"]
        assert output[-1]["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.CONTEXT])
def test_a_turn_that_was_cut_is_incomplete(finish: FinishReason) -> None:
    case = TurnCase(turn_of(TALKS[:2], finish=finish), TALKS, [])
    events = events_of(stream_of(case, ask()))
    assert events[-1]["type"] == "response.incomplete"
    response = events[-1]["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]


def test_usage_counts_prompt_cached_and_sampled_ids() -> None:
    turn = turn_of(TALKS, [1, 2])
    turn.cached_tokens = 2
    assert last_of(stream_of(TurnCase(turn, TALKS, []), ask(tools=TOOLS)))["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 5,
    }


def test_continued_turn_streams_only_what_is_new() -> None:
    cut, turn = turn_of([ContentPiece("It was")]), turn_of([ContentPiece("It was long.")])
    answer = json.loads(writer().whole(Answered.of(turn, cut)))
    assert answer["output"][0]["content"][0]["text"] == " long."


def test_restarted_turn_ends_its_stream() -> None:
    made = writer()
    made.write([TurnAdmitted(HANDLE, PROMPT), ContentPiece("It")])
    with pytest.raises(Restarted):
        made.write([TurnRestarted()])


def test_half_of_a_surrogate_pair_comes_back_as_the_model_spelt_it() -> None:
    half = json.loads('"\\ud800"')
    turn = turn_of([ContentPiece(half), ToolCall("x", "shell", {"command": half})])
    raw = stream_of(TurnCase(turn, [], []), ask(tools=TOOLS))
    message, called = last_of(raw)["output"]
    assert message["content"][0]["text"] == "?"
    assert as_messages(asked([called]).messages)[0]["tool_calls"] == turn.as_message()["tool_calls"]


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (Reason.OVERFLOW, "context_length_exceeded"),  # Codex then shortens its history
        (Reason.OVER, "invalid_prompt"),  # clients do not repeat the request
        (Reason.INVALID, "invalid_prompt"),
        (Reason.BUSY, "rate_limit_exceeded"),
        (Reason.FAILED, "server_error"),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
def test_a_stream_without_an_answer_ends_with_why(reason: Reason, code: str, begun: bool) -> None:
    made = writer()
    raw = made.write([TurnAdmitted(HANDLE, PROMPT), ContentPiece("It")]) if begun else b""
    raw += made.write_refusal(Refused(reason, "it is so.", prompt=900, context=800))
    events = events_of(raw)
    assert events[0]["type"] == "response.created", "openai-python reads this field first"
    assert (events[-1]["type"], events[-1]["response"]["error"]["code"]) == ("response.failed", code)
    if reason is Reason.OVERFLOW:  # a code that the API has, but not its types
        events[-1]["response"]["error"]["code"] = "server_error"
    for event in events:
        EVENT.validate_python(event)


def test_history_that_does_not_fit_is_refused_in_openais_words() -> None:
    refused = Refused(Reason.OVERFLOW, "no room", prompt=900, context=800)
    error = Responses().refusal(refused)["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 800 tokens" in error["message"]


# --- reading back


@given(turn_cases(), st.sampled_from(["whole", "stream"]))
def test_answer_sent_back_is_read_as_the_message_of_its_turn(case: TurnCase, how: str) -> None:
    request = ask(tools=TOOLS)
    answer = whole_of(case, request) if how == "whole" else last_of(stream_of(case, request))
    read = asked([{"role": "user", "content": "Mend it."}, *answer["output"]])
    (message,) = as_messages(read.messages)[1:]
    # The ids of calls name the turn. If the turn has no calls, an item's id names it.
    assert message == {**case.turn.as_message(), **({} if "tool_calls" in message else {"handle": HANDLE})}
    assert read.handles == [HANDLE]


@given(turn_cases())
def test_codex_names_the_turn_though_it_keeps_the_thought_to_itself(case: TurnCase) -> None:
    items = as_codex_keeps(last_of(stream_of(case, ask(tools=TOOLS)))["output"])
    (message,) = as_messages(asked(items).messages)
    said = case.turn.as_message()
    said.pop("reasoning_content", None)
    assert message == {**said, **({} if "tool_calls" in said else {"handle": HANDLE})}
    assert asked(items).handles == [HANDLE]


def test_redacted_thought_names_its_turn() -> None:
    thought, said, _ = as_codex_keeps(
        last_of(stream_of(TurnCase(turn_of(TALKS), TALKS, []), ask()))["output"], ids=False
    )
    assert asked([thought, said]).handles == [HANDLE]
    assert asked([{"role": "user", "content": "Mend it."}, thought]).messages == [
        {"role": "user", "content": "Mend it."}
    ]


def test_items_of_two_turns_are_two_messages() -> None:
    first = {"type": "message", "role": "assistant", "id": "msg_aaaaaaaaaaaa", "content": "It was"}
    call = {"type": "function_call", "call_id": f"{HANDLE}_0", "name": "shell", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": f"{HANDLE}_0", "output": [{"type": "input_text", "text": "a"}]}
    read = asked([first, call, result])
    assert [message["role"] for message in read.messages] == ["assistant", "assistant", "tool"]
    assert read.messages[2] == {"role": "tool", "tool_call_id": f"{HANDLE}_0", "content": "a"}
    assert read.handles == ["call_aaaaaaaaaaaa", HANDLE]


def test_foreign_items_are_separated_by_their_order() -> None:
    thought = {"type": "reasoning", "id": "rs_68e2c0", "summary": [{"type": "summary_text", "text": "Hm."}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]}
    called = {"type": "function_call", "call_id": "call_Xy", "name": "shell", "arguments": ""}
    read = asked([thought, said, called, thought, said, said])
    assert [message["content"] for message in read.messages] == ["So.", "So.", "So."]
    assert [message.get("reasoning_content") for message in read.messages] == ["Hm.", "Hm.", None]
    assert read.messages[0]["tool_calls"] == [
        {"id": "call_Xy", "type": "function", "function": {"name": "shell", "arguments": "{}"}}
    ]
    assert read.handles == []


def test_custom_call_is_text_and_its_result_has_the_same_id() -> None:
    patch = ToolCall("x", "apply_patch", {"input": "*** Begin Patch"})
    wrong = ToolCall("x", "apply_patch", {"patch": "*** Begin Patch"})
    turn = turn_of([patch, wrong])
    right, other = last_of(stream_of(TurnCase(turn, [], []), ask(tools=TOOLS)))["output"]
    assert (right["type"], right["input"], right["call_id"]) == ("custom_tool_call", "*** Begin Patch", f"{HANDLE}_0")
    assert json.loads(other["input"]) == wrong.arguments
    results = [
        {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"} for item in (right, other)
    ]
    said, *answers = as_messages(asked([right, other, *results]).messages)
    assert said == turn.as_message()
    assert [answer["tool_call_id"] for answer in answers] == [call["id"] for call in said["tool_calls"]]


def test_a_text_for_a_custom_tool_that_is_json_comes_back_as_a_text() -> None:
    turn = turn_of([ToolCall("x", "apply_patch", {"input": '{"a": 1}'})])
    (item,) = last_of(stream_of(TurnCase(turn, [], []), ask(tools=TOOLS)))["output"]
    assert item["input"] == '{"a": 1}'
    assert as_messages(asked([item]).messages) == [turn.as_message()]


def test_namespace_and_tool_are_joined_by_two_underscores() -> None:
    tools = [{"type": "namespace", "name": "mcp__git_", "tools": [{"type": "function", "name": "_log"}]}]
    (tool,) = ask(tools=tools).chat_call.tools
    assert tool["function"]["name"] == "mcp__git__log"


def test_namespaced_tool_has_one_name_for_the_model() -> None:
    assert [tool["function"]["name"] for tool in ask(tools=TOOLS).chat_call.tools] == [
        "shell",
        "agents__spawn",
        "apply_patch",
    ]
    turn = turn_of([ToolCall("x", "agents__spawn", {})])
    (item,) = last_of(stream_of(TurnCase(turn, [], []), ask(tools=TOOLS)))["output"]
    assert (item["name"], item["namespace"]) == ("spawn", "agents")
