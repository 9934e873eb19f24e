"""Comparison of a new whole history with the stored history.

`Conversation.replace` receives a conversation that another library may have saved, edited or rewritten. The comparison
tolerates changes without meaning: white space at the ends, missing reasoning, call ids. After such changes, the stored
messages and their ids are kept.
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
"""A call that a result answers, and the name of its tool."""


class AlignmentKind(enum.StrEnum):
    """The relation of an incoming history to the stored history."""

    SAME = "same"
    APPEND = "append"
    """New messages follow all stored messages, and no new message is an assistant message."""
    RETRY = "retry"
    """The history is one step back: the stored messages before the last assistant turn."""
    INSERTED = "inserted"
    """New messages follow all stored messages, and one of them is an assistant message that was not sampled."""
    EDITED = "edited"
    """A stored message differs."""
    SHRUNK = "shrunk"
    """The last stored messages are missing, but the history is not one step back."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """A new history compared with the stored history. The new history equals stored[:index] + `appended`."""

    kind: AlignmentKind
    """The relation between the two histories."""
    index: int
    """Index of the first message that differs; if no message differs, the length of the shorter history."""
    appended: tuple[Message, ...]
    """The new messages from `index` on, normalised. Their tool results answer the stored calls by id."""


def compare(stored: Sequence[Message], incoming: Sequence[Message]) -> Alignment:
    """Compare `incoming`, a whole history as `as_messages` returns it, with `stored`."""
    before, after = [normalize(message) for message in stored], [normalize(message) for message in incoming]
    answered_before, answered_after = _answered(before), _answered(after)
    index = 0
    while index < min(len(before), len(after)) and _tolerated(
        before[index], answered_before[index], after[index], answered_after[index]
    ):
        index += 1
    # Up to this index both histories have the same calls, so the position of a call identifies the stored call.
    appended: list[Message] = [
        message
        if answered is None or answered[0].message >= index
        else {**message, "tool_call_id": before[answered[0].message]["tool_calls"][answered[0].call]["id"]}
        for message, answered in zip(after[index:], answered_after[index:], strict=True)
    ]
    return Alignment(_kind(before, after, index), index, tuple(appended))


def normalize(message: Message) -> Message:
    """Return a message in the form for a model. The argument does not change.

    An empty list of calls, an empty name and empty reasoning are left out. `reasoning` is another name of
    `reasoning_content`, as in vLLM. Keys that are not in `Message`, or not of this role, are dropped.

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
            raise TypeError(f"a message's reasoning_content is {reasoning!r:.60}: give a string")
        if reasoning:
            normal["reasoning_content"] = reasoning
        calls = given.get("tool_calls")
        if calls:
            normal["tool_calls"] = [_call(call) for call in calls]
    return normal


def same_tools(stored: Sequence[Mapping[str, Any]] | None, incoming: Sequence[Mapping[str, Any]] | None) -> bool:
    """Return True if two lists offer the same tools, in any order: equal names, descriptions and parameters.

    None and [] both mean no tools. An empty description and empty parameters count as missing. The order of keys does
    not matter. Other keys, such as `strict`, are not compared, since the model does not see them.
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
    """Return the call that each message answers; None for a message that answers no known call."""
    calls = AnsweredCalls()
    answered = [calls.by(index, message) for index, message in enumerate(messages)]
    return [
        None if call is None else (call, messages[call.message]["tool_calls"][call.call]["function"]["name"])
        for call in answered
    ]


def _tolerated(
    stored: Message, stored_answers: _Answered | None, incoming: Message, incoming_answers: _Answered | None
) -> bool:
    """Return True if the new message equals the stored one. The new message may lack the reasoning: clients omit it."""
    reasoning = incoming.get("reasoning_content", "").strip()
    if reasoning and reasoning != stored.get("reasoning_content", "").strip():
        return False
    return _counting(stored, stored_answers) == _counting(incoming, incoming_answers)


def _counting(message: Message, answers: _Answered | None) -> list[Any]:
    """Return the compared parts of a message, without the reasoning.

    If a tool result has no name, the name of the called tool is used.
    """
    name = message.get("name")
    if answers and name is None:
        name = answers[1]
    which = answers[0] if answers else message.get("tool_call_id")
    calls = [
        [call["function"]["name"], canonical(call["function"]["arguments"])] for call in message.get("tool_calls", ())
    ]
    return [message["role"], message["content"].strip(), name, which, calls]


def canonical(value: Any) -> str:
    """Return a value as JSON with sorted keys, and with whole numbers as integers, since browsers turn 1.0 into 1."""
    try:
        plain = json.loads(json.dumps(value, default=str), parse_float=_number)
        return json.dumps(plain, sort_keys=True)
    except (RecursionError, ValueError):  # the value is too deep, or contains itself
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
