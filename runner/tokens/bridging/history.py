"""Histories that arrive as messages: where they depart from the stored one, and what that makes of them.

A client sends the whole conversation at every turn, re-serialised by its own libraries. Two forms are told apart.
`normalize` gives a message as it may be put before a model. Comparing tolerates more than that: what no client keeps
(white space at the ends, reasoning, call ids) makes no difference, so that the stored message and its ids stay.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from runner.messages import Message, Role

__all__ = ["Alignment", "AlignmentKind", "MessageIndex", "compare", "normalize", "same_tools"]


class AlignmentKind(enum.StrEnum):
    """What an incoming history is to the stored one."""

    SAME = "same"
    """Nothing new."""
    APPEND = "append"
    """New messages after everything that is stored, none of them the assistant's."""
    RETRY = "retry"
    """One step back: all that is stored before the last assistant turn, and nothing else."""
    INSERTED = "inserted"
    """Everything that is stored, and an assistant turn that nobody sampled among the new messages."""
    EDITED = "edited"
    """A stored message is another one."""
    SHRUNK = "shrunk"
    """A part of what is stored from the start, and not one step back."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """An incoming history against the stored one: stored[:index] and `appended` are what came in.

    Attributes:
        kind: what became of it.
        index: the first message where the two differ, counted from 0; the shorter one's length where none does.
        appended: the incoming messages from `index` on as they may be put before a model, their tool results
            answering the stored calls by the stored ids.
        explanation: for people, such as "message 3 (tool) was edited: its content ..."; messages count from 0.
    """

    kind: AlignmentKind
    index: int
    appended: tuple[Message, ...]
    explanation: str


def normalize(message: Mapping[str, Any]) -> Message:
    """A message of a client as it may be put before a model; the given one is left as it is.

    - `content`: None or nothing is "". A list of text parts is joined by newlines, as vLLM's server does.
    - `role`: "developer" is OpenAI's newer word for "system".
    - `tool_calls`: none, None and [] are the same. Arguments in JSON text become the object; "" and None are no
      arguments; text that is no JSON object stays text.
    - `reasoning_content`, or `reasoning`, as vLLM and others call it; left out where it is empty.
    - Keys that are not in `Message`, or not of this role, are dropped.

    Raises:
        TypeError: it is no message, or has parts that are not text.
    """
    if not isinstance(message, Mapping):
        raise TypeError(f"a message is a dict with role and content, got {type(message).__name__}: {message!r:.80}")
    role = _role(message.get("role"))
    normal: Message = {"role": role, "content": _text(message.get("content"))}
    name = message.get("name")
    if name:
        normal["name"] = str(name)
    if role == "tool" and message.get("tool_call_id"):
        normal["tool_call_id"] = str(message["tool_call_id"])
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning:
            normal["reasoning_content"] = _text(reasoning)
        calls = message.get("tool_calls")
        if calls:
            normal["tool_calls"] = [_call(call) for call in _listed(calls, "tool_calls")]
    return normal


def compare(stored: Iterable[Mapping[str, Any]], incoming: Sequence[Mapping[str, Any]]) -> Alignment:
    """`incoming` against `stored`, both from scratch; a `MessageIndex` keeps what it knows of the stored ones.

    Raises:
        TypeError: one of the messages is none.
    """
    history = MessageIndex()
    history.append(*stored)
    return history.compare(incoming)


def same_tools(stored: Sequence[Mapping[str, Any]] | None, incoming: Sequence[Mapping[str, Any]] | None) -> bool:
    """The same tools are offered, in any order: the same names, descriptions and parameters.

    None and [] are both no tools, an empty description or empty parameters are the same as none, and the order of
    keys does not matter. Other keys (`strict`, ...) are not the model's to read.

    Raises:
        TypeError: one is no tool in OpenAI's form.
    """
    return _tools(stored) == _tools(incoming)


class MessageIndex:
    """The messages of a conversation, digested once each, so that comparing costs one digest per incoming message."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._digests: list[_Digest] = []
        self._calls = _Calls()

    def __len__(self) -> int:
        return len(self._messages)

    def append(self, *messages: Mapping[str, Any]) -> None:
        """Store what was put before the model, or said by it.

        Raises:
            TypeError: one is no message; nothing of it is stored.
        """
        for message in [normalize(message) for message in messages]:
            place = self._calls.see(len(self._messages), message)
            self._digests.append(_digest(message, place))
            self._messages.append(message)

    def truncate(self, length: int) -> None:
        """Forget the messages from `length` on, after one step back."""
        del self._messages[length:]
        del self._digests[length:]
        self._calls = _Calls()
        for index, message in enumerate(self._messages):
            self._calls.see(index, message)

    def compare(self, incoming: Sequence[Mapping[str, Any]]) -> Alignment:
        """What `incoming`, a whole history, is to this one. Neither changes.

        Raises:
            TypeError: one of the messages is none.
        """
        messages = [normalize(message) for message in incoming]
        calls = _Calls()
        places = [calls.see(index, message) for index, message in enumerate(messages)]
        index = 0
        for digest, message, place in zip(self._digests, messages, places, strict=False):
            if not digest.tolerates(_digest(message, place)):
                break
            index += 1
        # Up to there both have the same calls, so that the place of a call says which stored one is meant.
        appended = [
            self._answering(message, place, index)
            for message, place in zip(messages[index:], places[index:], strict=True)
        ]
        kind = self._kind(index, messages)
        return Alignment(kind, index, tuple(appended), self._explanation(kind, index, messages, places))

    def _kind(self, index: int, incoming: Sequence[Message]) -> AlignmentKind:
        if index < min(len(self), len(incoming)):
            return AlignmentKind.EDITED
        if index < len(self):
            return AlignmentKind.RETRY if incoming and index == self._last_turn() else AlignmentKind.SHRUNK
        if index == len(incoming):
            return AlignmentKind.SAME
        spoken = any(message["role"] == "assistant" for message in incoming[index:])
        return AlignmentKind.INSERTED if spoken else AlignmentKind.APPEND

    def _last_turn(self) -> int | None:
        """Where the last assistant message stands."""
        roles = [message["role"] for message in self._messages]
        return len(roles) - 1 - roles[::-1].index("assistant") if "assistant" in roles else None

    def _answering(self, message: Message, place: _Place | None, known: int) -> Message:
        """The same message, with the stored id of the call that it answers."""
        if place is None or place.message >= known:
            return message
        return {**message, "tool_call_id": self._messages[place.message]["tool_calls"][place.call]["id"]}

    def _explanation(
        self, kind: AlignmentKind, index: int, incoming: Sequence[Message], places: Sequence[_Place | None]
    ) -> str:
        new, gone = len(incoming) - index, len(self) - index
        match kind:
            case AlignmentKind.SAME:
                return f"nothing was added to the {index} messages"
            case AlignmentKind.APPEND:
                return (
                    f"{_counted(new)} added after message {index - 1}" if index else f"the first {_counted(new)} added"
                )
            case AlignmentKind.RETRY:
                return f"the assistant turn of message {index} is asked for again; {_counted(gone)} dropped"
            case AlignmentKind.SHRUNK:
                role = self._messages[index]["role"]
                return f"the history ends before message {index} ({role}); {_counted(gone)} left out"
            case AlignmentKind.INSERTED:
                at = next(at for at in range(index, len(incoming)) if incoming[at]["role"] == "assistant")
                return f"message {at} (assistant) was inserted: nobody sampled it here"
            case AlignmentKind.EDITED:
                before, after = self._messages[index], incoming[index]
                difference = _difference(before, after) or "it answers another call"
                return f"message {index} ({before['role']}) was edited: {difference}"


class _Place(NamedTuple):
    """A call, by where it stands: the message, and its number in it."""

    message: int
    call: int
    name: str


class _Calls:
    """Which call each tool result answers, whatever ids a client gave them."""

    def __init__(self) -> None:
        self._open: list[tuple[str, _Place]] = []  # of the last message with calls, those without a result yet
        self._places: dict[str, _Place] = {}  # the last call of each id

    def see(self, index: int, message: Message) -> _Place | None:
        """Take the next message in; the call it answers, or None where it answers none that is known."""
        calls = message.get("tool_calls")
        if calls:
            places = [_Place(index, number, call["function"]["name"]) for number, call in enumerate(calls)]
            self._open = [(call["id"], place) for call, place in zip(calls, places, strict=True)]
            self._places.update(self._open)
        return self._answered(message.get("tool_call_id")) if message["role"] == "tool" else None

    def _answered(self, call_id: str | None) -> _Place | None:
        """By the id; results without one answer the calls in their order."""
        at = next((at for at, (known, _) in enumerate(self._open) if call_id in (known, None)), None)
        if at is None:
            return self._places.get(call_id or "")
        return self._open.pop(at)[1]


class _Digest(NamedTuple):
    """A hash of what counts in a message; the reasoning apart, since a client may leave it out."""

    body: bytes
    reasoning: bytes | None

    def tolerates(self, incoming: _Digest) -> bool:
        return self.body == incoming.body and incoming.reasoning in (None, self.reasoning)


def _digest(message: Message, place: _Place | None) -> _Digest:
    reasoning = message.get("reasoning_content", "").strip()
    return _Digest(_hash(_counting(message, place)), _hash(reasoning) if reasoning else None)


def _counting(message: Message, place: _Place | None) -> list[Any]:
    """What counts in a message. A call is known by its place, and a result has the name of the call it answers."""
    name = message.get("name")
    answers = list(place[:2]) if place else message.get("tool_call_id")
    if place and name is None:
        name = place.name
    calls = [
        [call["function"]["name"], _canonical(call["function"]["arguments"])] for call in message.get("tool_calls", ())
    ]
    return [message["role"], message["content"].strip(), name, answers, calls]


def _canonical(value: Any) -> str:
    """JSON with its keys in order, and whole numbers as integers: 1.0 is 1 once a browser has seen it."""
    try:
        plain = json.loads(json.dumps(value, default=str), parse_float=_number)
        return json.dumps(plain, sort_keys=True)
    except (RecursionError, ValueError):  # too deep, or it holds itself
        return repr(value)


def _number(text: str) -> float | int:
    number = float(text)
    return int(number) if number.is_integer() and abs(number) <= _EXACT_INTEGERS else number


_EXACT_INTEGERS = 2.0**53


def _hash(value: Any) -> bytes:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).digest()


def _role(role: Any) -> Role:
    if role == "developer":
        return "system"
    if role not in ("system", "user", "assistant", "tool"):
        raise TypeError(f"a message's role is system, developer, user, assistant or tool, got {role!r}")
    return cast("Role", role)


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(_part(part) for part in _listed(content, "content"))


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return cast("str", part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise TypeError(f"a content part of type {kind!r} cannot be put before the model: send text parts only")


def _listed(value: Any, key: str) -> Sequence[Any]:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return value
    raise TypeError(f"a message's {key} is a list, or a string for content, got {type(value).__name__}")


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TypeError(f"a tool call is a dict with a function and its name, got {call!r:.80}")
    arguments = _arguments(function.get("arguments"))
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _arguments(arguments: Any) -> Any:
    if arguments in (None, ""):
        return {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    if not isinstance(arguments, Mapping):
        raise TypeError(f"a call's arguments are an object or its JSON text, got {type(arguments).__name__}")
    return arguments


def _tools(tools: Sequence[Mapping[str, Any]] | None) -> list[str]:
    return sorted(_canonical(_tool(tool)) for tool in tools or ())


def _tool(tool: Any) -> list[Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        raise TypeError(f"a tool is a dict with a function, got {tool!r:.80}")
    return [function.get(key) or None for key in ("name", "description", "parameters")]


def _difference(before: Message, after: Message) -> str | None:
    """What a reader sees first of what differs."""
    return next(_differences(before, after), None)


def _differences(before: Message, after: Message) -> Iterator[str]:
    if before["role"] != after["role"]:
        yield f"its role is {after['role']!r}"
    if before["content"].strip() != after["content"].strip():
        yield f"its content {_changed(before['content'].strip(), after['content'].strip())}"
    yield from _differing_calls(before.get("tool_calls", ()), after.get("tool_calls", ()))
    was, now = before.get("reasoning_content", "").strip(), after.get("reasoning_content", "").strip()
    if now and was != now:
        yield f"its reasoning {_changed(was, now)}"
    if before.get("name") != after.get("name") and (after["role"] != "tool" or after.get("name")):
        yield f"its name was {before.get('name')!r} and is {after.get('name')!r}"


def _differing_calls(before: Sequence[Any], after: Sequence[Any]) -> Iterator[str]:
    if len(before) != len(after):
        yield f"it made {len(before)} tool calls and has {len(after)}"
    for number, (was, now) in enumerate(zip(before, after, strict=False)):
        one, other = was["function"], now["function"]
        if one["name"] != other["name"]:
            yield f"its call {number} was of {one['name']!r} and is of {other['name']!r}"
        old, new = _canonical(one["arguments"]), _canonical(other["arguments"])
        if old != new:
            yield f"the arguments of its call {number} {_changed(old, new)}"


def _changed(before: str, after: str) -> str:
    """Where two texts part, and what each says there."""
    shorter = min(len(before), len(after))
    at = next((at for at in range(shorter) if before[at] != after[at]), shorter)
    begin = max(0, at - 10)
    return f"changed at character {at}, from {before[begin : at + 20]!r} to {after[begin : at + 20]!r}"


def _counted(number: int) -> str:
    return "1 message was" if number == 1 else f"{number} messages were"
