"""A reader of messages as clients send them: it normalises each message, and records tolerated differences."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import orjson

from runner.chat_requests import Tolerated
from runner.errors import BadMessage
from runner.history_cache import HistoryCache
from runner.messages import Message, Role, as_messages, canonical_json, is_json_object, note_of
from runner.tokens.bridging.history import canonical, normalize
from runner.tokens.system_support import SystemSupport

__all__ = [
    "UNPARSED",
    "MessageReader",
    "ReadMessage",
    "as_taken",
    "has_references",
    "joined",
    "several_systems",
    "thought_of",
    "with_thought_apart",
]

VOLATILE: Final = ("x-anthropic-billing-header:",)
"""Beginnings of lines in a system message that differ between requests and are not instructions."""

_THOUGHT: Final = re.compile(r"\s*<(think|thinking|thought|reasoning)>(?P<thought>.*?)</\1>\s*", re.DOTALL)
"""Reasoning inside a content, between the tags that clients use."""

_KEYS: Final = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "cache_control"}
    | {"handle", "not_text"}  # the parsers of other wire forms add these fields
)
_CALL_KEYS: Final = frozenset({"id", "type", "function"})
_THOUGHTS: Final = frozenset({"thinking", "redacted_thinking", "reasoning"})
"""Types of parts that hold reasoning instead of text."""

_MINTED: Final = re.compile(r"call_[0-9a-f]{12}_\d+(?![0-9A-Za-z])")
"""Call id as clients receive it. Some clients send it back inside further text, such as the id of an item."""

UNPARSED: Final = "unparsed"
"""Name of the argument that holds the arguments of an earlier call, if they are not a JSON object."""


@dataclass(frozen=True, slots=True)
class ReadMessage:
    """A message of a request."""

    message: Message
    """The message as a model may receive it."""
    key: Hashable
    """Role, content, name and calls in a form for comparison, without reasoning and ids."""
    size: int = 0
    """Size of the message as JSON, in bytes."""
    tolerated: frozenset[Tolerated] = frozenset()
    """The tolerated differences that were found in the message so far."""
    volatile: int = 0
    """Number of volatile lines that were removed from the message."""
    # The next three fields are computed once, since every match of a history reads them.
    role: str = field(init=False)
    call_ids: tuple[str, ...] = field(init=False)
    handles: tuple[str, ...] = field(init=False)
    """Possible handles of the message's turn: its call ids without the number of the call, and `handle`."""
    handle: str = ""
    """A further handle of the message's turn, such as the id of an item; "" if missing."""

    def __post_init__(self) -> None:
        message, set_it = self.message, object.__setattr__
        answered = message.get("tool_call_id")
        ids = tuple(call["id"] for call in message.get("tool_calls", ()))
        named = tuple(each.rpartition("_")[0] for each in (ids if answered is None else (answered,)))
        set_it(self, "role", message["role"])
        set_it(self, "call_ids", ids)
        set_it(self, "handles", (*named, self.handle) if self.handle else named)


class MessageReader:
    """A reader that caches messages, since clients send their whole history with every request."""

    def __init__(self) -> None:
        self._known: dict[bytes, ReadMessage] = {}
        self._recent = HistoryCache[ReadMessage]()

    def read(self, messages: Sequence[Mapping[str, Any]]) -> list[ReadMessage]:
        """Read the messages of a request.

        Raises:
            BadMessage: the history is not a list, an item is not a message, or the last message is a user message with
                content that is not text. An error about a message contains its index.
        """
        if isinstance(messages, Mapping) or not isinstance(messages, Sequence):
            raise BadMessage(f"expected a list of messages, the whole history, got {type(messages).__name__}.")
        read = self._recent.read(messages, self._read)
        if read and read[-1].role == "user" and Tolerated.NOT_TEXT in read[-1].tolerated:
            # The last message is new, so its content must be text. In earlier messages, a note replaces other content.
            _strictly(len(read) - 1, messages[-1])
        return read

    def read_ahead(self, messages: Sequence[Any]) -> Iterator[object]:
        """Read uncached messages one by one, so that other tasks can run in between.

        Raises:
            BadMessage: an item is not a message; the error contains its index.
        """
        return self._recent.steps(messages, self._read)

    def read_one(self, message: Mapping[str, Any]) -> ReadMessage:
        """Read one message that this episode created; its history is not needed."""
        return self._read(0, message)

    def _read(self, index: int, message: Mapping[str, Any]) -> ReadMessage:
        try:
            raw = orjson.dumps(message, option=orjson.OPT_NON_STR_KEYS, default=str)
        except orjson.JSONEncodeError:  # orjson refuses integers of more than 64 bits
            raw = canonical_json(message).encode("utf-8", "surrogatepass")
        # The key is the whole JSON: computing a digest would release the interpreter lock, and could wait for threads.
        known = self._known.get(raw)
        if known is None:
            known = self._known[raw] = _read(index, message, len(raw))
        return known


def has_references(messages: Sequence[Any]) -> bool:
    """Return True if one of the messages is a reference: it has the id of its turn and no content."""
    return any(map(operator.contains, filter(dict.__instancecheck__, messages), itertools.repeat("refers")))


def _read(index: int, given: Any, size: int) -> ReadMessage:
    if not isinstance(given, Mapping):
        raise BadMessage(f"message {index}: a message is a dict with role and content, got {type(given).__name__}")
    found = set[Tolerated]()
    message = _strictly(index, _softened(given, found))
    _unwrap_ids(message)
    found.update(_differences(given))
    role, handle = message["role"], given.get("handle")
    if role in ("assistant", "tool"):
        message.pop("name", None)  # a tool message is identified by the id of its call
    volatile = 0
    if role == "system" and any(mark in message["content"] for mark in VOLATILE):
        lines = message["content"].splitlines(keepends=True)
        kept = [line for line in lines if not line.startswith(VOLATILE)]
        volatile = len(lines) - len(kept)
        message["content"] = "".join(kept)
    if volatile:
        found.add(Tolerated.VOLATILE_LINES)
    handle = handle if isinstance(handle, str) and role == "assistant" else ""
    return ReadMessage(message, key_of(message), size, frozenset(found), volatile, handle)


def _strictly(index: int, given: Mapping[str, Any]) -> Message:
    """Return a client's message, checked and normalised. Unlike `_softened`, this replaces nothing by a note.

    Raises:
        BadMessage: the message has a wrong shape, or content that is not text.
    """
    role = "system" if given.get("role") == "developer" else given.get("role")
    try:
        (checked,) = as_messages([{"content": None, **given, "role": role}])  # type: ignore[typeddict-item]  # checked there
        return normalize(checked)
    except TypeError as error:
        raise BadMessage(str(error).replace("message 0", f"message {index}", 1)) from None


def _softened(given: Mapping[str, Any], found: set[Tolerated]) -> Mapping[str, Any]:
    """Return a message with a note in place of each part that is not text, and with arguments that are objects.

    Clients send their whole history with every request. If one such part were refused, every later request would fail.
    """
    content, calls = given.get("content"), given.get("tool_calls")
    soft = dict(given)
    if isinstance(content, list | tuple):
        soft["content"] = [_softened_part(part, found) for part in content]
    if isinstance(calls, list | tuple):
        soft["tool_calls"] = [_softened_call(call, found) for call in calls]
    return soft


def _softened_part(part: Any, found: set[Tolerated]) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or (kind == "text" and isinstance(part.get("text"), str)):
        return part
    found.add(Tolerated.NOT_TEXT)
    return "" if kind in _THOUGHTS else note_of(part)


def _softened_call(call: Any, found: set[Tolerated]) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        return call
    text = arguments if isinstance(arguments, str) else canonical_json(arguments or {})
    if not text.strip():
        return {**call, "function": {**function, "arguments": {}}}
    if is_json_object(text):
        return call
    found.add(Tolerated.ARGUMENTS_CUT)
    return {**call, "function": {**function, "arguments": {UNPARSED: text}}}


def _unwrap_ids(message: Message) -> None:
    """Remove the text that a client put around our call ids."""
    answered = message.get("tool_call_id", "")
    if (minted := _MINTED.search(answered)) is not None:
        message["tool_call_id"] = minted[0]
    for call in message.get("tool_calls", ()):
        if (minted := _MINTED.search(call["id"])) is not None:
            call["id"] = minted[0]


def key_of(message: Message) -> Hashable:
    made = message.get("tool_calls", ())
    calls = tuple((call["function"]["name"], canonical(call["function"]["arguments"])) for call in made)
    return message["role"], message["content"].strip(), message.get("name"), calls


def said_by_user(read: ReadMessage) -> ReadMessage:
    """Return a system message as a user message, and any other message unchanged."""
    if read.role != "system":
        return read
    message: Message = {**read.message, "role": "user"}
    return replace(read, message=message, key=key_of(message), tolerated=read.tolerated | {Tolerated.SYSTEM_AS_USER})


def thought_of(message: Message) -> str:
    """Return the reasoning between tags at the beginning of a content, as some clients write it; "" if missing."""
    found = _THOUGHT.match(message["content"])
    return "" if found is None else found["thought"].strip()


def with_thought_apart(read: ReadMessage) -> ReadMessage:
    """Return a message with the reasoning at the beginning of its content moved to its own field."""
    found = _THOUGHT.match(read.message["content"])
    if found is None:
        return read
    content = read.message["content"][found.end() :]
    message: Message = {**read.message, "content": content, "reasoning_content": found["thought"].strip()}
    tolerated = read.tolerated | {Tolerated.REASONING_IN_CONTENT}
    return replace(read, message=message, key=key_of(message), tolerated=tolerated)


def several_systems(messages: Sequence[ReadMessage]) -> bool:
    """Return True if a history begins with more than one system message."""
    return [each.role for each in messages[:2]] == ["system", "system"]


def as_taken(messages: Sequence[ReadMessage], takes: SystemSupport, *, system_as_user: bool) -> list[ReadMessage]:
    """Return a history with system messages that the template supports.

    System messages at the beginning are joined if the template takes only one. With `system_as_user`, later system
    messages become user messages; if the template takes no system message, all system messages do. If the template does
    not take two user messages in a row, each new user message is merged with the user message next to it.
    """
    begin = next((index for index, each in enumerate(messages) if each.role != "system"), len(messages))
    first, rest = list(messages[:begin]), list(messages[begin:])
    if len(first) > 1 and not takes.several:
        first = [_as_one(first, Tolerated.SYSTEM_JOINED, "system")]
    if not system_as_user:
        return [*first, *rest]
    if not takes.one:
        first = [said_by_user(each) for each in first]
    made = [*first, *map(said_by_user, rest)]
    return made if takes.user_rows else _without_rows(made)


def _without_rows(messages: Sequence[ReadMessage]) -> list[ReadMessage]:
    """Return the history with each former system message merged into the user message next to it."""
    made: list[ReadMessage] = []
    for message in messages:
        before = made[-1] if made else None
        spoke = [each for each in (before, message) if each is not None and each.role == "user"]
        if before is not None and len(spoke) == 2 and any(Tolerated.SYSTEM_AS_USER in each.tolerated for each in spoke):
            made[-1] = _as_one([before, message], Tolerated.SYSTEM_AS_USER, "user")
        else:
            made.append(message)
    return made


def _as_one(messages: Sequence[ReadMessage], named: Tolerated, role: Role) -> ReadMessage:
    message: Message = {
        "role": role,
        "content": "\n\n".join(each.message["content"] for each in messages if each.message["content"].strip()),
    }
    found = frozenset[Tolerated]().union(*(each.tolerated for each in messages))
    size, volatile = sum(each.size for each in messages), sum(each.volatile for each in messages)
    return ReadMessage(message, key_of(message), size, found | {named}, volatile)


def joined(messages: Sequence[ReadMessage]) -> ReadMessage:
    """Join several assistant messages that belong to one turn."""
    if len(messages) == 1:
        return messages[0]
    parts = [each.message for each in messages]
    message: Message = {"role": "assistant", "content": "".join(part["content"] for part in parts)}
    reasoning = "".join(part.get("reasoning_content", "") for part in parts)
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = [call for part in parts for call in part.get("tool_calls", ())]
    if calls:
        message["tool_calls"] = calls
    found = frozenset().union(*(each.tolerated for each in messages))
    size, handles = sum(each.size for each in messages), [each.handle for each in messages if each.handle]
    return ReadMessage(
        message, key_of(message), size, found | {Tolerated.JOINED}, handle=handles[-1] if handles else ""
    )


def _differences(given: Mapping[str, Any]) -> list[Tolerated]:
    """Return the differences in form between a client's message and the messages of this project.

    The messages of this project have text contents, and objects as arguments.
    """
    found, content, calls = [], given.get("content"), given.get("tool_calls") or ()
    parts = content if isinstance(content, list | tuple) else ()
    if content is None and given.get("role") == "assistant":
        found.append(Tolerated.CONTENT_NULL)
    if isinstance(content, list | tuple):
        found.append(Tolerated.CONTENT_PARTS)
    if given.get("not_text"):
        found.append(Tolerated.NOT_TEXT)
    if "cache_control" in given or any(isinstance(part, Mapping) and "cache_control" in part for part in parts):
        found.append(Tolerated.CACHE_MARKS)
    extra = [key for key, value in given.items() if key not in _KEYS and value not in (None, [], {})]
    extra += [key for call in calls if isinstance(call, Mapping) for key in call if key not in _CALL_KEYS]
    if extra or (given.get("role") == "assistant" and given.get("name")):
        found.append(Tolerated.EXTRA_KEYS)
    functions = [call["function"] for call in calls if isinstance(call, Mapping) and "function" in call]
    texts = [each["arguments"] for each in functions if isinstance(each.get("arguments"), str)]
    if any(text != _own_spelling(text) for text in texts):
        found.append(Tolerated.ARGUMENTS_RESPELT)
    return found


def _own_spelling(text: str) -> str:
    try:
        return canonical_json(orjson.loads(text))
    except orjson.JSONDecodeError:
        return text
