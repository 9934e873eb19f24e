"""OpenAI's Responses: requests made of items; answers in one piece or as events.

Each request has the whole history as its `input`, or continues an earlier response of the episode by its id. Items of
earlier responses may be referred to by their ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from runner.chat_requests import ChatCall
from runner.endpoint.chat_completions import openai_error
from runner.endpoint.refusals import Refused
from runner.endpoint.request_body import (
    SAMPLING_NUMBERS,
    bad,
    constraint_of,
    field_of,
    json_schema,
    label_of,
    listed,
    most_tokens,
    note_unread,
    purpose_of,
    sampling_of,
    stops,
    with_constraint,
)
from runner.endpoint.response_events import ResponseWriter
from runner.endpoint.response_items import ReadItems, read_items
from runner.endpoint.response_tools import read_tool_choice, read_tools
from runner.endpoint.wire_form import AnswerWriter, Headers, TokenText, WireForm, WireRequest
from runner.history_cache import HistoryCache
from runner.sampling_fields import MAX_LOGPROBS

__all__ = ["Responses"]

_NOT_KEPT: Final = {
    "conversation": "no conversation is kept here under a name: give the whole history as input, or the "
    "previous_response_id of the response that it continues.",
    "background": "an answer is sent on the same connection only: leave this out.",
    "prompt": "no prompt is kept here: give its text as instructions or input.",
}
_NOT_GRANTED: Final = ("service_tier", "max_tool_calls", "context_management", "moderation")
_KNOWN: Final = frozenset(
    (
        *SAMPLING_NUMBERS,
        *_NOT_KEPT,
        *_NOT_GRANTED,
        *("model", "input", "instructions", "tools", "tool_choice", "text", "max_output_tokens", "stop", "include"),
        *("stream", "return_token_ids", "top_logprobs", "parallel_tool_calls", "truncation", "reasoning", "store"),
        *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        # Fields that are accepted without an effect.
        *("user", "metadata", "safety_identifier", "stream_options", "background_options", "client_metadata"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_salt", "priority", "request_id"),
    )
)
_LOGPROBS: Final = "message.output_text.logprobs"
_GIVEN_ANYWAY: Final = "reasoning.encrypted_content"


class Responses(WireForm):
    """`POST /v1/responses`."""

    name = "responses"

    def read(self, body: Mapping[str, Any], headers: Headers, seen: HistoryCache[Any] | None = None) -> WireRequest:
        for name, fix in _NOT_KEPT.items():
            if body.get(name):
                bad(f"{name}: {fix}")
        offered = read_tools(listed(body, "tools"))
        read = _input(body, seen or HistoryCache())
        previous = field_of(body, "previous_response_id", str, "")
        not_granted = _not_granted(body)
        if offered.dropped:
            not_granted["tools"] = offered.dropped
        tool_choice = read_tool_choice(body.get("tool_choice"), not_granted)
        include = _include(body, not_granted)
        top = field_of(body, "top_logprobs", int, 0)
        if not 0 <= top <= MAX_LOGPROBS:
            bad(f"top_logprobs: give a whole number from 0 to {MAX_LOGPROBS}, not {top}.")
        schema = json_schema(field_of(_text(body), "format", dict, {}), "text.format")
        sampling = sampling_of(
            body,
            SAMPLING_NUMBERS,
            max_tokens=most_tokens(body, "max_output_tokens"),
            stop=stops(body, "stop"),
            logprobs=top or None,
            **with_constraint(constraint_of(body, schema), offered.tools, tool_choice, not_granted),
        )
        return WireRequest(
            chat_call=ChatCall(
                messages=read.messages or bad("input: give at least one message."),
                tools=offered.tools,
                sampling=sampling,
                tool_choice=tool_choice,
                label=label_of(headers),
                handles=read.handles,
                previous=previous,
                own_system=bool(field_of(body, "instructions", str, "")),
                form=self.name,
                client=headers.get("user-agent", ""),
                purpose=purpose_of(headers),
                not_granted=not_granted,
            ),
            stream=field_of(body, "stream", bool, False),
            ids=field_of(body, "return_token_ids", bool, False),
            logprobs=_LOGPROBS in include,
            top_logprobs=top,
            options={
                "tools": offered.by_name,
                "tool_choice": body.get("tool_choice") or "auto",
                "previous": previous or None,
                "store": field_of(body, "store", bool, True),
            },
        )

    def writer(self, request: WireRequest, model: str, text_of: TokenText) -> AnswerWriter:
        return ResponseWriter(request, model, text_of)

    def refusal(self, refused: Refused) -> Mapping[str, Any]:
        return openai_error(refused)


def _input(body: Mapping[str, Any], seen: HistoryCache[ReadItems]) -> ReadItems:
    given = body.get("input")
    if isinstance(given, str):
        read = ReadItems([{"role": "user", "content": given}])
    elif isinstance(given, list):
        read = read_items(listed(body, "input"), seen)
    else:
        bad(f"input: give a string or a list of items, not {given!r:.60}.")
    instructions = field_of(body, "instructions", str, "")
    if instructions:
        read.messages.insert(0, {"role": "system", "content": instructions})
    return read


def _text(body: Mapping[str, Any]) -> dict[str, Any]:
    return field_of(body, "text", dict, {})


def _not_granted(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the requested features that are not granted, apart from tools."""
    not_granted = {name: body[name] for name in _NOT_GRANTED if body.get(name) is not None}
    if field_of(body, "parallel_tool_calls", bool, True) is False:
        not_granted["parallel_tool_calls"] = False
    if body.get("truncation") not in (None, "disabled"):
        not_granted["truncation"] = body["truncation"]
    if _text(body).get("verbosity") is not None:
        not_granted["verbosity"] = _text(body)["verbosity"]
    reasoning = {name: value for name, value in field_of(body, "reasoning", dict, {}).items() if value is not None}
    if reasoning:
        not_granted["reasoning"] = reasoning
    note_unread(body, _KNOWN, not_granted)
    return not_granted


def _include(body: Mapping[str, Any], not_granted: dict[str, Any]) -> Sequence[Any]:
    include = field_of(body, "include", list, [])
    further = [each for each in include if each not in (_LOGPROBS, _GIVEN_ANYWAY)]
    if further:
        not_granted["include"] = further
    return include
