"""Messages as clients send them back: what counts in each, and what they changed without meaning it."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

import orjson

from runner.chat_requests import Tolerated
from runner.errors import BadMessage
from runner.messages import Message, as_messages, canonical_json
from runner.tokens.bridging.history import canonical, normalize

__all__ = ["RECENT", "MessageReader", "ReadMessage", "joined", "said_by_user"]

RECENT: Final = 8
"""So many histories of an episode are kept as they were read and followed: one for each client that is at work."""

VOLATILE: Final = ("x-anthropic-billing-header:",)
"""What lines of a system message begin with that differ from request to request, and are no instruction."""

_KEYS: Final = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "cache_control"}
)
_CALL_KEYS: Final = frozenset({"id", "type", "function"})


@dataclass(frozen=True, slots=True)
class ReadMessage:
    """A message of a request."""

    message: Message
    """The message as it may be put before a model."""
    key: Hashable
    """What counts in it: not its reasoning, nor ids."""
    size: int = 0
    """How many bytes it has as JSON."""
    tolerated: frozenset[Tolerated] = frozenset()
    """What the client changed in any case."""
    volatile: int = 0
    """How many lines were taken out of it."""
    given: Mapping[str, Any] | None = None
    """The message as it came, where it is made of strings alone."""
    # Made once, and not at every look at a history.
    role: str = field(init=False)
    """Who speaks."""
    call_ids: tuple[str, ...] = field(init=False)
    """The ids of its calls."""
    handles: tuple[str, ...] = field(init=False)
    """What may name a turn in it: the ids of calls without their number."""

    def __post_init__(self) -> None:
        message, set_it = self.message, object.__setattr__
        answered = message.get("tool_call_id")
        ids = tuple(call["id"] for call in message.get("tool_calls", ()))
        set_it(self, "role", message["role"])
        set_it(self, "call_ids", ids)
        set_it(self, "handles", tuple(each.rpartition("_")[0] for each in (ids if answered is None else (answered,))))


class MessageReader:
    """Reads messages, and keeps what it read, since histories come again and again."""

    def __init__(self) -> None:
        self._known: dict[bytes, ReadMessage] = {}
        self._recent = deque[list[ReadMessage]](maxlen=RECENT)

    def read(self, messages: Sequence[Mapping[str, Any]]) -> list[ReadMessage]:
        """Read the messages of a request.

        Raises:
            BadMessage: one is no message, or holds what is no text; named by its index.
        """
        if isinstance(messages, Mapping) or not isinstance(messages, Sequence):
            raise BadMessage(f"expected a list of messages, the whole history, got {type(messages).__name__}.")
        # Comparing strings where they stood takes a fifth of the time of looking up their bytes.
        before = next((each for each in reversed(self._recent) if _goes_on(each, messages)), [])
        read = [
            known if known.given is not None and known.given == message else self._read(index, message)
            for index, (known, message) in enumerate(zip(before, messages, strict=False))
        ]
        read += [self._read(index, messages[index]) for index in range(len(before), len(messages))]
        self._recent.append(read)
        return read

    def _read(self, index: int, message: Mapping[str, Any]) -> ReadMessage:
        try:
            raw = orjson.dumps(message, option=orjson.OPT_NON_STR_KEYS, default=str)
        except orjson.JSONEncodeError:  # integers past 64 bits
            raw = canonical_json(message).encode("utf-8", "surrogatepass")
        # Not by a digest of them: making one lets other threads run, and may wait for them.
        known = self._known.get(raw)
        if known is None:
            known = self._known[raw] = _read(index, message, len(raw))
        return known


def _goes_on(before: Sequence[ReadMessage], messages: Sequence[Any]) -> bool:
    """Whether a history may be one that was read with more behind it: the last one of that tells nearly always."""
    length = len(before)
    return 0 < length <= len(messages) and before[-1].given is not None and before[-1].given == messages[length - 1]


class _NotOfStrings(Exception):
    """Something is not made of strings alone."""


def _copied(value: Any) -> Any:
    """A copy of what is made of strings alone, of which two that are equal are the same JSON."""
    if value is None or type(value) is str:
        return value
    if type(value) is list:
        return [_copied(each) for each in value]
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: _copied(each) for key, each in value.items()}
    raise _NotOfStrings


def _read(index: int, given: Any, size: int) -> ReadMessage:
    if not isinstance(given, Mapping):
        raise BadMessage(f"message {index}: a message is a dict with role and content, got {type(given).__name__}")
    role = "system" if given.get("role") == "developer" else given.get("role")
    try:
        (checked,) = as_messages([{"content": None, **given, "role": role}])  # type: ignore[typeddict-item]  # checked there
        message = normalize(checked)
    except TypeError as error:
        raise BadMessage(str(error).replace("message 0", f"message {index}", 1)) from None
    found = set(_differences(given))
    if role in ("assistant", "tool"):
        message.pop("name", None)  # of a tool it is that of the call which it answers
    volatile = 0
    if role == "system" and any(mark in message["content"] for mark in VOLATILE):
        lines = message["content"].splitlines(keepends=True)
        kept = [line for line in lines if not line.startswith(VOLATILE)]
        volatile = len(lines) - len(kept)
        message["content"] = "".join(kept)
    if volatile:
        found.add(Tolerated.VOLATILE_LINES)
    own: Mapping[str, Any] | None = None
    with suppress(_NotOfStrings):
        own = _copied(given)  # whoever gave it may change it
    return ReadMessage(message, key_of(message), size, frozenset(found), volatile, own)


def key_of(message: Message) -> Hashable:
    """What counts in a message as it may be put before a model."""
    made = message.get("tool_calls", ())
    calls = tuple((call["function"]["name"], canonical(call["function"]["arguments"])) for call in made)
    return message["role"], message["content"].strip(), message.get("name"), calls


def said_by_user(read: ReadMessage) -> ReadMessage:
    """A system message as a user's; any other one as it is."""
    if read.role != "system":
        return read
    message: Message = {**read.message, "role": "user"}
    return replace(
        read, message=message, given=None, key=key_of(message), tolerated=read.tolerated | {Tolerated.SYSTEM_AS_USER}
    )


def joined(messages: Sequence[ReadMessage]) -> ReadMessage:
    """Several assistant messages as the one turn that they are of."""
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
    return ReadMessage(message, key_of(message), sum(each.size for each in messages), found | {Tolerated.JOINED})


def _differences(given: Mapping[str, Any]) -> list[Tolerated]:
    """What a client changed, whatever it was given: we send texts, and arguments as objects."""
    found, content, calls = [], given.get("content"), given.get("tool_calls") or ()
    parts = content if isinstance(content, list | tuple) else ()
    if content is None and given.get("role") == "assistant":
        found.append(Tolerated.CONTENT_NULL)
    if isinstance(content, list | tuple):
        found.append(Tolerated.CONTENT_PARTS)
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
