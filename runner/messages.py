"""Messages and tool calls in OpenAI's shape: the view of a conversation that people and templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Required, TypeAlias, TypedDict

import orjson

from runner.errors import BadMessage

__all__ = [
    "AnsweredCalls",
    "CallIndex",
    "FunctionCall",
    "Message",
    "Prompt",
    "Role",
    "ToolCall",
    "ToolCallMessage",
    "as_messages",
    "canonical_json",
    "check_answers",
    "note_of",
]

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
"""Who speaks in a message."""


class FunctionCall(TypedDict):
    """The function part of a tool call inside a message."""

    name: str
    """The tool's name."""
    arguments: Mapping[str, Any]
    """The arguments as an object, not as text that holds one."""


class ToolCallMessage(TypedDict):
    """A tool call inside an assistant message."""

    id: str
    """The id that the answering tool message names in its `tool_call_id`."""
    type: Literal["function"]
    """Always "function", as OpenAI's messages have it."""
    function: FunctionCall
    """The tool and its arguments."""


class Message(TypedDict, total=False):
    """One message, a plain dict in OpenAI's shape."""

    role: Required[Role]
    """The speaker: system, user, assistant or tool."""
    content: Required[str]
    """The text; "" for an assistant that only calls tools."""
    reasoning_content: str
    """The reasoning of an assistant, apart from what it said."""
    tool_calls: Sequence[ToolCallMessage]
    """The calls that an assistant made, in order."""
    tool_call_id: str
    """The id of the call that a tool message answers."""
    name: str
    """The name of the tool that a tool message comes from."""


Prompt: TypeAlias = str | Message | Sequence[Message]
"""What may be put before a model: a message, several, or a string, which is a user message."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model made in a turn."""

    id: str
    """The id by which results refer to the call, unique within its turn: the model's own where it wrote one."""
    name: str
    """The tool's name as the model wrote it; "" where it could not be read."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The arguments as the model gave them, before they are checked."""
    error: str | None = None
    """What was wrong with a call that does not parse, which is answered and not run; None where it parsed."""

    def as_message(self) -> ToolCallMessage:
        """The call as an assistant message holds it."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


def as_messages(prompt: Prompt) -> list[Message]:
    """The messages that `prompt` stands for; every content is a string, several parts of text are joined to one.

    Raises:
        BadMessage: it is neither a string, a message nor a sequence of messages, or one of them has a wrong shape, or
            holds what is no text.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, Mapping):
        return [_checked(0, prompt)]
    if isinstance(prompt, Sequence):
        return [_checked(index, message) for index, message in enumerate(prompt)]
    raise BadMessage(f"expected a string, a message or a list of messages, got {type(prompt).__name__}: {prompt!r:.80}")


def check_answers(new: Sequence[Message], *before: Sequence[Message]) -> None:
    """See that every tool message in `new` answers a call of an assistant message ahead of it, in `new` or `before`.

    Raises:
        BadMessage: one answers none.
    """
    spoken: list[Message] = []  # of the new ones, those of assistants
    known = set[str | None]()  # the ids of their calls
    for index, message in enumerate(new):
        if message["role"] == "assistant":
            spoken.append(message)
            known.update(call["id"] for call in message.get("tool_calls") or ())
        answered = message.get("tool_call_id")
        if message["role"] != "tool" or (answered is not None and answered in known):
            continue
        ahead = (each for part in (spoken, *reversed(before)) for each in reversed(part) if each["role"] == "assistant")
        calls = next(ahead, _SILENT).get("tool_calls") or ()
        # Without an id it is taken to answer the assistant message right ahead of it.
        if answered is None and calls:
            continue
        if not any(call["id"] == answered for call in calls) and not any(
            call["id"] == answered for each in ahead for call in each.get("tool_calls") or ()
        ):
            raise BadMessage(
                f"message {index} (tool) answers no call: no assistant message ahead of it has a tool call of the id "
                f"{answered!r}. Put that message before it, or say it as a user message."
            )
        known.add(answered)


_SILENT: Message = {"role": "assistant", "content": ""}


class CallIndex(NamedTuple):
    """A call, by where it stands, since libraries give calls other ids."""

    message: int
    """The index of the message that made the call."""
    call: int
    """The call's number in that message."""


class AnsweredCalls:
    """Tells of the messages of a history, one after the other, which calls they answer.

    A result without an id answers the next call of the last turn with calls that has no result yet.
    """

    def __init__(self) -> None:
        self._unanswered: dict[int, tuple[str, CallIndex]] = {}  # in their order
        self._numbers: dict[str, list[int]] = {}  # of those of an id; the next one last
        self._latest: dict[str, CallIndex] = {}  # ids may come again in every turn

    def copied(self) -> AnsweredCalls:
        """The same, to be gone on with."""
        other = AnsweredCalls()
        other._unanswered, other._latest = dict(self._unanswered), dict(self._latest)
        other._numbers = {call_id: list(numbers) for call_id, numbers in self._numbers.items()}
        return other

    def by(self, index: int, message: Message) -> CallIndex | None:
        """The call that the next message answers, or None where it answers none that is known.

        Args:
            index: where the message stands in the history, as the indices of its own calls have it.
            message: the message.
        """
        calls = message.get("tool_calls")
        if calls:
            self._unanswered = {number: (call["id"], CallIndex(index, number)) for number, call in enumerate(calls)}
            self._latest.update(self._unanswered.values())
            self._numbers = {}
            for number, call in reversed(list(enumerate(calls))):
                self._numbers.setdefault(call["id"], []).append(number)
        if message["role"] != "tool":
            return None
        call_id = message.get("tool_call_id")
        number = self._next_of(call_id)
        if number is None:
            return self._latest.get(call_id or "")
        answered, at = self._unanswered.pop(number)
        self._numbers[answered].remove(number)
        return at

    def _next_of(self, call_id: str | None) -> int | None:
        """The number of the next call of this id that has no result; None as an id stands for any."""
        if call_id is None:
            return next(iter(self._unanswered), None)
        return next(reversed(self._numbers.get(call_id, ())), None)


def note_of(part: Mapping[str, Any]) -> str:
    """The text that stands for a part of a past content that is not text, such as an image or a web search.

    It names the type and has the short fields; data, signatures and encrypted contents are left out.
    """
    kind = str(part.get("type"))
    text = part.get("text", part.get(kind))
    if isinstance(text, str):
        return text
    source = part.get("source")
    inner = source if kind == "document" and isinstance(source, Mapping) else {}
    if inner.get("type") == "text" and isinstance(inner.get("data"), str):
        return str(inner["data"])
    said = {name: value for name, value in part.items() if name not in ("type", "cache_control")}
    shown = canonical_json(_shortened(said, NOTE_DEPTH))
    if len(shown) > NOTE_LENGTH:
        shown = shown[:NOTE_LENGTH] + "..."
    return f"[{kind}: not text, left out]" if shown in ("{}", "null") else f"[{kind}: {shown}]"


NOTE_LENGTH = 2_000
"""The most characters of fields in a note."""

NOTE_STRING = 500
"""The most characters of a string in a note; a longer one is data more often than words."""

NOTE_DEPTH = 6
"""How deep the fields of a note may be nested."""

_DATA = frozenset({"data", "encrypted_content", "encrypted_index", "signature", "file_data", "image_url", "source"})


def _shortened(value: Any, depth: int) -> Any:
    """A value of JSON without data and without what says nothing; None where nothing is left."""
    if isinstance(value, str):
        return value if len(value) <= NOTE_STRING and not value.startswith("data:") else None
    if isinstance(value, Mapping):
        inner = {} if depth == 0 else {k: _shortened(v, depth - 1) for k, v in value.items() if k not in _DATA}
        return {name: each for name, each in inner.items() if each not in (None, "", [], {})}
    if isinstance(value, list | tuple):
        return [] if depth == 0 else [each for v in value if (each := _shortened(v, depth - 1)) not in (None, [], {})]
    return value


def canonical_json(value: Any) -> str:
    """`value` as JSON with its own key order, non-ASCII kept: what a model reads and what hashes are made of."""
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS, default=str).decode()
    except orjson.JSONEncodeError:  # models write integers past 64 bits, which orjson does not
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


def _checked(index: int, message: Any) -> Message:
    if not isinstance(message, Mapping):
        kind = type(message).__name__
        raise BadMessage(f"message {index}: a message is a dict with role and content, got {kind}: {message!r:.80}")
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "user", "assistant", "tool"):
        raise BadMessage(f"message {index}: a message's role is system, user, assistant or tool, got {role!r}")
    if not isinstance(content, str):
        content = _text_of(content, f"message {index} ({role})")
    checked = {**message, "content": content}
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list | tuple):
            raise BadMessage(f"message {index} ({role}): its tool_calls are a list, got {type(calls).__name__}")
        checked["tool_calls"] = [_with_object_arguments(index, call) for call in calls]
    return checked  # type: ignore[return-value]  # checked above


def _text_of(content: Any, where: str) -> str:
    """Nothing is an empty text; parts are joined with nothing between them, as chat templates write them."""
    if content is None:
        return ""
    if not isinstance(content, list | tuple):
        raise BadMessage(f"{where}: a message's content is a string, got {type(content).__name__}")
    return "".join(_text_of_part(part, f"{where}: part {number} of its content") for number, part in enumerate(content))


def _text_of_part(part: Any, where: str) -> str:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else ("text", part)
    if isinstance(text, str) and kind == "text":
        return text
    what = f"of type {kind!r}" if isinstance(kind, str) and kind != "text" else f"{part!r:.60}"
    raise BadMessage(f"{where} is {what}: only text can be put before a model; give {{'type': 'text', 'text': '...'}}")


def _with_object_arguments(index: int, call: Any) -> Any:
    """OpenAI's clients give arguments as JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadMessage(f"message {index} (assistant): a tool call has id and function, with name and arguments")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    if not isinstance(arguments, Mapping):
        given = function["arguments"]
        raise BadMessage(f"message {index} (assistant): the arguments of a call are a JSON object, got {given!r:.60}")
    return {**call, "function": {**function, "arguments": arguments}}
