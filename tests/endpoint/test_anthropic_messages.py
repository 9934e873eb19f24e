"""Anthropic's Messages as an endpoint writes them: its own client rebuilds them from events in any division."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from runner import ContentPiece, ReasoningPiece, ToolCalled
from runner.endpoint.refusals import Reason, Refused
from runner.endpoint.wire_form import Answered, Restarted
from runner.engines.base import FinishReason
from runner.messages import ToolCall
from runner.turn_events import TurnAdmitted, TurnProgress, TurnRestarted
from tests.endpoint.anthropic_turns import (
    ASKED,
    FORM,
    HANDLE,
    ORDERED,
    PARTS,
    PROMPT,
    client,
    events,
    rebuilt,
    said,
    streamed,
    whole,
    writer,
)


def joined(content: Sequence[dict[str, Any]], kind: str, name: str) -> str:
    return "".join(block[name] for block in content if block["type"] == kind)


# --- any turn, in any division


EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@given(parts=PARTS, data=st.data())
def test_the_deltas_are_the_whole_however_the_progress_is_cut(parts: list[TurnProgress], data: st.DataObject) -> None:
    sample = said(parts)
    cuts = data.draw(st.lists(st.integers(0, len(sample.progress)), max_size=6))
    written = streamed(sample, cuts, ids=True, logprobs=True)
    for event in events(written):
        EVENT.validate_python(event)
    message, answer = rebuilt(written), whole(sample, ids=True, logprobs=True)
    Message.model_validate(answer)
    for kind, name in (("text", "text"), ("thinking", "thinking")):
        assert joined(message["content"], kind, name) == joined(answer["content"], kind, name)
    calls = [[block for block in each["content"] if block["type"] == "tool_use"] for each in (message, answer)]
    assert calls[0] == calls[1]
    rest: Any = {"content": [], "token_ids": [], "logprobs": []}
    assert {**message, **rest} == {**answer, **rest}
    sampled = [each for event in events(written) for each in event.get("token_ids", ())]
    assert sampled == answer["token_ids"] == list(sample.turn.token_ids)
    assert answer["prompt_token_ids"] == message["prompt_token_ids"] == PROMPT
    logprobs = [each for event in events(written) for each in event.get("logprobs", ())]
    assert logprobs == answer["logprobs"]
    assert [math.nan if each is None else each for each in logprobs] == pytest.approx(
        list(sample.turn.logprobs), nan_ok=True
    )


def test_events_make_the_same_message_as_a_whole_answer() -> None:
    sample = said(ORDERED)
    assert rebuilt(streamed(sample, range(len(sample.progress)))) == whole(sample)
    with client(json.dumps(whole(sample)).encode()) as api:
        assert api.messages.create(**ASKED).to_dict() == whole(sample)


def test_turn_without_streamed_progress_is_written_at_its_end() -> None:
    sample = said(ORDERED)
    written = writer(ids=True).end(Answered.of(sample.turn))
    message = rebuilt(written)
    assert message.pop("prompt_token_ids") == PROMPT
    assert message == whole(sample)
    assert [each for event in events(written) for each in event.get("token_ids", ())] == list(sample.turn.token_ids)


def test_blocks_are_in_order_and_text_after_a_call_is_new() -> None:
    sample = said([*ORDERED, ContentPiece("\nAnd"), ReasoningPiece("so")])
    starts = [event for event in events(streamed(sample)) if event["type"] == "content_block_start"]
    assert [event["content_block"]["type"] for event in starts] == [
        *("thinking", "text", "tool_use", "tool_use", "text", "thinking"),
    ]
    open_block = None
    for event in events(streamed(sample)):
        match event["type"]:
            case "content_block_start":
                assert open_block is None
                open_block = event["index"]
            case "content_block_delta":
                assert event["index"] == open_block
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
    assert [event["index"] for event in starts] == list(range(6))
    assert events(streamed(sample))[-1] == {"type": "message_stop"}


def test_token_ids_and_logprobs_are_sent_only_on_request() -> None:
    assert b"token_ids" not in streamed(said(ORDERED))
    assert b"logprobs" not in streamed(said(ORDERED), ids=True)
    assert b"token_ids" not in streamed(said(ORDERED), logprobs=True)
    assert not {"token_ids", "prompt_token_ids", "logprobs"} & whole(said(ORDERED)).keys()


def test_a_call_that_cannot_be_read_is_none_and_the_ids_name_the_turn() -> None:
    content = rebuilt(streamed(said(ORDERED)))["content"]
    assert [block["id"] for block in content if block["type"] == "tool_use"] == [f"{HANDLE}_0", f"{HANDLE}_2"]
    assert [block["signature"] for block in content if block["type"] == "thinking"] == [HANDLE]
    assert rebuilt(streamed(said(ORDERED)))["id"] == "msg_0123456789ab"


@pytest.mark.parametrize(
    ("settings", "asked", "reason"),
    [
        ({}, {}, ("end_turn", None)),
        ({"finish": FinishReason.LENGTH, "stop": "max_tokens"}, {}, ("max_tokens", None)),
        ({"finish": FinishReason.CONTEXT, "stop": "context"}, {}, ("max_tokens", None)),
        ({"stop": "END"}, {"stop": ("END", "so")}, ("stop_sequence", "END")),
        ({"stop": "END"}, {}, ("end_turn", None)),  # a stop of the run, which the client did not set
        ({"tool_calls": [ToolCall("t0", "run", {})]}, {"stop": ("END",)}, ("tool_use", None)),
        ({"tool_calls": [ToolCall("t0", "", {}, "it cannot be read")]}, {}, ("end_turn", None)),
    ],
)
def test_stop_reason_and_stop_sequence_show_why_a_turn_ended(
    settings: dict[str, Any], asked: dict[str, Any], reason: tuple[str, str | None]
) -> None:
    calls = settings.pop("tool_calls", ())
    sample = said([ContentPiece("so"), *map(ToolCalled, calls)], **settings)
    for answer in (rebuilt(streamed(sample, **asked)), whole(sample, **asked)):
        assert (answer["stop_reason"], answer.get("stop_sequence")) == reason


def test_the_input_is_what_no_cache_held() -> None:
    usage = {"input_tokens": 2, "cache_read_input_tokens": 1, "cache_creation_input_tokens": 0, "output_tokens": 2}
    sample = said([ContentPiece("so")])
    assert whole(sample)["usage"] == rebuilt(streamed(sample))["usage"] == usage
    assert events(streamed(sample))[0]["message"]["usage"] == {**usage, "input_tokens": 3} | {
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
    }


def test_lone_surrogate_is_a_question_mark_and_large_number_stays() -> None:
    sample = said([ContentPiece("half \ud83d"), ToolCalled(ToolCall("t0", "run", {"much": 2**70, "half": "\ud83d"}))])
    for answer in (rebuilt(streamed(sample)), whole(sample, logprobs=True)):
        assert answer["content"][0]["text"] == "half ?"
        assert answer["content"][1]["input"] == {"much": 2**70, "half": "?"}


def test_pings_keep_a_stream_alive_and_change_no_message() -> None:
    sample = said(ORDERED)
    alive = writer().keep_alive
    assert rebuilt(alive + alive + streamed(sample)) == whole(sample)
    assert events(alive) == [{"type": "ping"}]


def test_restarted_turn_is_not_streamed_further() -> None:
    writes = writer()
    writes.write([TurnAdmitted(HANDLE, PROMPT), ContentPiece("so")])
    with pytest.raises(Restarted):
        writes.write([TurnRestarted()])


def test_continuation_of_a_cut_turn_sends_only_its_new_text() -> None:
    cut, on = said([ContentPiece("I will ")]).turn, said([ContentPiece("I will "), ContentPiece("look.")]).turn
    answer = json.loads(writer().whole(Answered.of(on, cut)))
    assert answer["content"] == [{"type": "text", "text": "look."}]


# --- refusals


@pytest.mark.parametrize("reason", Reason)
def test_a_refusal_is_of_the_type_that_its_status_has(reason: Reason) -> None:
    body = FORM.refusal(Refused(reason, "because"))
    if reason is not Reason.TOO_LARGE:  # an error type of the API that its own library lacks
        ErrorResponse.model_validate(body)
    answer = json.dumps(body).encode()
    with client(answer, status=reason.status) as api, pytest.raises(anthropic.APIStatusError) as raised:
        api.messages.create(**ASKED)
    assert raised.value.status_code == reason.status
    assert raised.value.type == body["error"]["type"]
    assert "because" in str(raised.value)


def test_each_refusal_has_its_error_type() -> None:
    types = {reason: FORM.refusal(Refused(reason, ""))["error"]["type"] for reason in Reason}
    assert types == {
        Reason.INVALID: "invalid_request_error",
        Reason.OVERFLOW: "invalid_request_error",
        Reason.OVER: "invalid_request_error",
        Reason.UNAUTHORIZED: "authentication_error",
        Reason.FORBIDDEN: "permission_error",
        Reason.NO_REWARD: "permission_error",
        Reason.NOT_FOUND: "not_found_error",
        Reason.NO_ITEM: "not_found_error",
        Reason.NO_RESPONSE: "invalid_request_error",
        Reason.METHOD: "invalid_request_error",
        Reason.TOO_LARGE: "request_too_large",
        Reason.SLOW: "timeout_error",
        Reason.BUSY: "rate_limit_error",
        Reason.FAILED: "api_error",
    }


def test_prompt_that_is_too_long_is_named_in_known_words() -> None:
    refused = Refused(Reason.OVERFLOW, "it does not fit", prompt=220_000, context=200_000)
    assert FORM.refusal(refused)["error"]["message"] == "prompt is too long: 220000 tokens > 200000 maximum"


def test_refusal_after_the_end_begins_with_code_episode_over() -> None:
    message = FORM.refusal(Refused(Reason.OVER, "a limit was reached"))["error"]["message"]
    assert message == "episode_over: a limit was reached"


def test_a_refusal_in_mid_stream_is_an_error_to_the_client() -> None:
    sample = said(ORDERED)
    writes = writer()
    written = writes.write(sample.progress[:4]) + writes.write_refusal(Refused(Reason.FAILED, "the engine died"))
    with pytest.raises(anthropic.APIStatusError) as raised:
        rebuilt(written)
    assert raised.value.type == "api_error"
    assert "the engine died" in str(raised.value)


def test_count_is_read_by_the_client() -> None:
    assert MessageTokensCount.model_validate(FORM.count(7)).input_tokens == 7
