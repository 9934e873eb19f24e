"""Messages and tool calls in the form of OpenAI's API, as people and chat templates read them."""

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
    "is_json_object",
    "note_of",
]

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
"""Speaker of a message."""


class FunctionCall(TypedDict):
    """The function part of a tool call inside a message."""

    name: str
    """Name of the tool."""
    arguments: Mapping[str, Any]
    """Arguments as an object, not as JSON text."""


class ToolCallMessage(TypedDict):
    """A tool call inside an assistant message."""

    id: str
    """Id to which the tool message refers in its `tool_call_id`."""
    type: Literal["function"]
    """Always "function"."""
    function: FunctionCall
    """Name and arguments of the call."""


class Message(TypedDict, total=False):
    """One message, a plain dict in OpenAI's shape."""

    role: Required[Role]
    """Speaker: system, user, assistant or tool."""
    content: Required[str]
    """Text; "" for an assistant that only calls tools."""
    reasoning_content: str
    """Reasoning of an assistant, separate from its content."""
    tool_calls: Sequence[ToolCallMessage]
    """Calls of an assistant, in order."""
    tool_call_id: str
    """Id of the call that a tool message answers."""
    name: str
    """Name of the tool that a tool message comes from."""


Prompt: TypeAlias = str | Message | Sequence[Message]
"""Input for a model: a message, several messages, or a string, which becomes a user message."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model made in a turn."""

    id: str
    """Id by which results refer to the call, unique within its turn; the model's own id if it wrote one."""
    name: str
    """Name of the tool as the model wrote it; "" if it could not be read."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments as the model wrote them, before validation."""
    error: str | None = None
    """Parsing error of a malformed call, which is answered without running a tool; None if the call was parsed."""
    failed: bool = False
    """True if `call_tools` answered it with an error: wrong arguments, no such tool, `ToolError`, or too slow."""

    def as_message(self) -> ToolCallMessage:
        """Return the call in the form of an assistant message."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


def as_messages(prompt: Prompt) -> list[Message]:
    """Convert a prompt to messages. Every content becomes a string; text parts are joined.

    Raises:
        BadMessage: `prompt` is not a string, a message or a sequence of messages, or a message has a wrong form or
            content that is not text.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, Mapping):
        return [_checked(0, prompt)]
    if isinstance(prompt, Sequence):
        return [_checked(index, message) for index, message in enumerate(prompt)]
    raise BadMessage(f"expected a string, a message or a list of messages, got {type(prompt).__name__}: {prompt!r:.80}")


def check_answers(new: Sequence[Message], *before: Sequence[Message], first: int = 0) -> None:
    """Check that every tool message in `new` answers a call of an earlier assistant message in `new` or `before`.

    Error texts number the messages of `new` from `first`.

    Raises:
        BadMessage: a tool message answers no call.
    """
    ahead = (each for part in reversed(before) for each in reversed(part) if each["role"] == "assistant")
    latest: Message | None = None  # the previous assistant message
    known = set[str]()  # the ids of all calls so far
    for index, message in enumerate(new, first):
        if message["role"] == "assistant":
            latest = message
            known.update(_call_ids(message))
        if message["role"] != "tool":
            continue
        if latest is None:
            latest = next(ahead, _SILENT)
            known.update(_call_ids(latest))
        answered = message.get("tool_call_id")
        while answered is not None and answered not in known and (earlier := next(ahead, None)) is not None:
            known.update(_call_ids(earlier))
        # Without an id, the message answers the previous assistant message.
        if not (latest.get("tool_calls") if answered is None else answered in known):
            raise BadMessage(
                f"message {index} (tool) answers no call: no assistant message before it has a tool call of the id "
                f"{answered!r}. Put the message with the call before it, or send it as a user message."
            )


_SILENT: Message = {"role": "assistant", "content": ""}


def _call_ids(message: Message) -> list[str]:
    return [call["id"] for call in message.get("tool_calls") or ()]


class CallIndex(NamedTuple):
    """Position of a call in a history. It identifies the call, since some libraries use an id several times."""

    message: int
    call: int
    """Number of the call in the message."""


class AnsweredCalls:
    """Matching of the tool messages of a history with the calls that they answer.

    A result without an id answers the next unanswered call of the last turn with calls.
    """

    def __init__(self) -> None:
        self._unanswered: dict[int, tuple[str, CallIndex]] = {}  # the calls by their number, in order
        self._numbers: dict[str, list[int]] = {}  # numbers of the calls with each id; the last is answered next
        self._latest: dict[str, CallIndex] = {}  # the latest call with each id; clients may reuse ids in every turn

    def copied(self) -> AnsweredCalls:
        """Return a copy that can be continued separately."""
        other = AnsweredCalls()
        other._unanswered, other._latest = dict(self._unanswered), dict(self._latest)
        other._numbers = {call_id: list(numbers) for call_id, numbers in self._numbers.items()}
        return other

    def by(self, index: int, message: Message) -> CallIndex | None:
        """Return the call that the next message answers; None if the message is not a tool message, or answers no call.

        Args:
            index: index of the message in the history.
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
        """Return the number of the next unanswered call with this id. The id None matches any call."""
        if call_id is None:
            return next(iter(self._unanswered), None)
        return next(reversed(self._numbers.get(call_id, ())), None)


def note_of(part: Mapping[str, Any]) -> str:
    """Return the text that replaces a content part that is not text, such as an image or a web search.

    A part that contains a text is replaced by this text. Other parts are replaced by their type and short fields; data,
    signatures and encrypted content are omitted.
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
    shown = canonical_json(_shortened(said, MAX_NOTE_DEPTH))
    if len(shown) > MAX_NOTE_LENGTH:
        shown = shown[:MAX_NOTE_LENGTH] + "..."
    return f"[{kind}: not text, left out]" if shown in ("{}", "null") else f"[{kind}: {shown}]"


MAX_NOTE_LENGTH = 2_000
"""Maximum number of characters of fields in a note."""

MAX_NOTE_STRING = 500
"""Maximum number of characters of a string in a note; longer strings are usually data."""

MAX_NOTE_DEPTH = 6
"""Maximum nesting depth of the fields in a note."""

_DATA = frozenset({"data", "encrypted_content", "encrypted_index", "signature", "file_data", "image_url", "source"})


def _shortened(value: Any, depth: int) -> Any:
    """Return a JSON value without data and empty values; None or an empty value if nothing remains."""
    if isinstance(value, str):
        return value if len(value) <= MAX_NOTE_STRING and not value.startswith("data:") else None
    if isinstance(value, Mapping):
        inner = {} if depth == 0 else {k: _shortened(v, depth - 1) for k, v in value.items() if k not in _DATA}
        # The keys are sorted, since a client may send the same part with its keys in another order.
        ordered = sorted(inner.items(), key=lambda field: str(field[0]))
        return {name: each for name, each in ordered if each not in (None, "", [], {})}
    if isinstance(value, list | tuple):
        return [] if depth == 0 else [each for v in value if (each := _shortened(v, depth - 1)) not in (None, [], {})]
    return value


def canonical_json(value: Any) -> str:
    """Return `value` as JSON for models and hashes: keys are not sorted, and non-ASCII characters are not escaped."""
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS, default=str).decode()
    except orjson.JSONEncodeError:  # models write integers of more than 64 bits, which orjson rejects
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


def is_json_object(text: str) -> bool:
    """Return True if a text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)  # orjson rejects unpaired surrogates
    except (ValueError, RecursionError):
        return False


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
    """Return content as text; None becomes "", parts are joined without separator, as chat templates write them."""
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
    raise BadMessage(f"{where} is {what}: only text is supported; give {{'type': 'text', 'text': '...'}}")


def _with_object_arguments(index: int, call: Any) -> Any:
    """Return a call whose arguments are an object; OpenAI's clients send JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if (
        not isinstance(function, Mapping)
        or not isinstance(function.get("name"), str)
        or not isinstance(call.get("id"), str)
    ):
        raise BadMessage(
            f"message {index} (assistant): a tool call is {call!r:.60}: give it an id and a function with name and "
            "arguments"
        )
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
