"""Comparison of a whole history from an author with the stored one, and the result for the conversation.

`Conversation.replace` takes a conversation that may have been saved, edited or written again by another library. The
comparison tolerates changes without meaning: white space at the ends, missing reasoning, call ids. Then the stored
messages and their ids stay.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from runner.messages import AnsweredCalls, CallIndex, Message

__all__ = ["Alignment", "AlignmentKind", "canonical", "compare", "normalize", "same_tools"]

_Answered: TypeAlias = tuple[CallIndex, str]
"""A call that is answered, and the name of its tool."""


class AlignmentKind(enum.StrEnum):
    """The relation of an incoming history to the stored one."""

    SAME = "same"
    APPEND = "append"
    """New messages follow all stored ones, and none of them is the assistant's."""
    RETRY = "retry"
    """One step back: exactly the stored messages before the last assistant turn."""
    INSERTED = "inserted"
    """New messages follow all stored ones, with an assistant turn among them that was not sampled."""
    EDITED = "edited"
    """A stored message differs."""
    SHRUNK = "shrunk"
    """The last stored messages are missing, more or fewer of them than a retry leaves out."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """An incoming history compared with the stored one: it is stored[:index] and `appended`."""

    kind: AlignmentKind
    """The relation of the two."""
    index: int
    """The first message where the two differ, counted from 0; the shorter one's length if none does."""
    appended: tuple[Message, ...]
    """The incoming messages from `index` on, normalised; their tool results answer the stored calls by their ids."""


def compare(stored: Sequence[Message], incoming: Sequence[Message]) -> Alignment:
    """Compare `incoming`, a whole history as `as_messages` returns it, with `stored`."""
    before, after = [normalize(message) for message in stored], [normalize(message) for message in incoming]
    answered_before, answered_after = _answered(before), _answered(after)
    index = 0
    while index < min(len(before), len(after)) and _tolerated(
        before[index], answered_before[index], after[index], answered_after[index]
    ):
        index += 1
    # Up to here both have the same calls, so the position of a call identifies the stored one.
    appended: list[Message] = [
        message
        if answered is None or answered[0].message >= index
        else {**message, "tool_call_id": before[answered[0].message]["tool_calls"][answered[0].call]["id"]}
        for message, answered in zip(after[index:], answered_after[index:], strict=True)
    ]
    return Alignment(_kind(before, after, index), index, tuple(appended))


def normalize(message: Message) -> Message:
    """Return a message in the form for a model; the argument is not changed.

    No calls, an empty name and empty reasoning are left out. `reasoning` is another word for `reasoning_content`, as in
    vLLM. Keys that are not in `Message`, or not of this role, are dropped.

    Raises:
        TypeError: the reasoning is not text.
    """
    given: Mapping[str, Any] = message
    role = message["role"]
    normal: Message = {"role": role, "content": message["content"]}
    name = given.get("name")
    if name:
        normal["name"] = str(name)
    if role == "tool" and given.get("tool_call_id"):
        normal["tool_call_id"] = str(given["tool_call_id"])
    if role == "assistant":
        reasoning = given.get("reasoning_content") or given.get("reasoning")
        if reasoning and not isinstance(reasoning, str):
            raise TypeError(f"a message's reasoning_content is a string, got {type(reasoning).__name__}")
        if reasoning:
            normal["reasoning_content"] = reasoning
        calls = given.get("tool_calls")
        if calls:
            normal["tool_calls"] = [_call(call) for call in calls]
    return normal


def same_tools(stored: Sequence[Mapping[str, Any]] | None, incoming: Sequence[Mapping[str, Any]] | None) -> bool:
    """True if the same tools are offered, in any order: the same names, descriptions and parameters.

    None and [] both mean no tools, an empty description or empty parameters equal missing ones, and the order of keys
    does not matter. Other keys (`strict`, ...) are not shown to the model.
    """
    return stored == incoming or _tools(stored) == _tools(incoming)


def _kind(stored: Sequence[Message], incoming: Sequence[Message], index: int) -> AlignmentKind:
    if index < min(len(stored), len(incoming)):
        return AlignmentKind.EDITED
    if index < len(stored):
        roles = [message["role"] for message in stored]
        one_step_back = "assistant" in roles and index == len(roles) - 1 - roles[::-1].index("assistant")
        return AlignmentKind.RETRY if incoming and one_step_back else AlignmentKind.SHRUNK
    if index == len(incoming):
        return AlignmentKind.SAME
    spoken = any(message["role"] == "assistant" for message in incoming[index:])
    return AlignmentKind.INSERTED if spoken else AlignmentKind.APPEND


def _answered(messages: Sequence[Message]) -> list[_Answered | None]:
    """For each message the call that it answers, or None if it answers no known call."""
    calls = AnsweredCalls()
    answered = [calls.by(index, message) for index, message in enumerate(messages)]
    return [
        None if call is None else (call, messages[call.message]["tool_calls"][call.call]["function"]["name"])
        for call in answered
    ]


def _tolerated(
    stored: Message, stored_answers: _Answered | None, incoming: Message, incoming_answers: _Answered | None
) -> bool:
    """True if the incoming message equals the stored one; it may lack the reasoning, since clients leave that out."""
    reasoning = incoming.get("reasoning_content", "").strip()
    if reasoning and reasoning != stored.get("reasoning_content", "").strip():
        return False
    return _counting(stored, stored_answers) == _counting(incoming, incoming_answers)


def _counting(message: Message, answers: _Answered | None) -> list[Any]:
    """The parts of a message that are compared, except the reasoning. A result has the name of its call."""
    name = message.get("name")
    if answers and name is None:
        name = answers[1]
    which = answers[0] if answers else message.get("tool_call_id")
    calls = [
        [call["function"]["name"], canonical(call["function"]["arguments"])] for call in message.get("tool_calls", ())
    ]
    return [message["role"], message["content"].strip(), name, which, calls]


def canonical(value: Any) -> str:
    """JSON with its keys in order, and whole numbers as integers: 1.0 is 1 once a browser has seen it."""
    try:
        plain = json.loads(json.dumps(value, default=str), parse_float=_number)
        return json.dumps(plain, sort_keys=True)
    except (RecursionError, ValueError):  # too deep, or it contains itself
        return repr(value)


def _number(text: str) -> float | int:
    number = float(text)
    return int(number) if number.is_integer() and abs(number) <= _MAX_EXACT_INTEGER else number


_MAX_EXACT_INTEGER = 2.0**53


def _call(call: Any) -> Any:
    function = call["function"]
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": function["arguments"]},
    }


def _tools(tools: Sequence[Mapping[str, Any]] | None) -> list[str]:
    keys = ("name", "description", "parameters")
    return sorted(canonical([tool["function"].get(key) or None for key in keys]) for tool in tools or ())
