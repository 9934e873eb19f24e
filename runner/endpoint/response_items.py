"""Messages from the items of OpenAI's Responses. Several items of one turn become one message.

An item identifies its turn in one of three ways. Its id has the digits of the turn's handle after `rs_`, `msg_`, `fc_`
or `ctc_`; the id of its call begins with the handle; or the encrypted content of its reasoning is the handle. An item
that is a reference has only an id.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any, Final

from runner.chat_requests import UnknownReference
from runner.endpoint.refusals import refusal_of
from runner.endpoint.request_body import bad
from runner.endpoint.wire_form import arguments_text
from runner.history_cache import HistoryCache
from runner.messages import is_json_object, note_of

__all__ = [
    "CUSTOM_PARAMETERS",
    "ReadItems",
    "custom_arguments",
    "custom_call",
    "flat_name",
    "item_id",
    "minted",
    "read_items",
]

_NAMED: Final = re.compile(r"(?:call|rs|msg|fc|ctc)_([0-9a-f]{12})(?:_\d+j?)?")
"""An id that names a turn; the group is the part of its handle after `call_`."""

_TEXTS: Final = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
"""Name of the field with the text, by the type of a part."""

_ROLES: Final = {"user": "user", "system": "system", "developer": "system"}


def item_id(prefix: str, handle: str, number: int = 0) -> str:
    """Return the id of an item, which names its turn. Further items of the same kind have a number at the end."""
    name = f"{prefix}_{handle.removeprefix('call_')}"
    return f"{name}_{number}" if number else name


def flat_name(name: str, namespace: str) -> str:
    """Return the single name by which a model calls a tool of a namespace."""
    return f"{namespace.rstrip('_')}__{name.lstrip('_')}" if namespace else name


# The argument of a custom tool is a text, so a model calls it as a function with one text argument. If the model wrote
# other arguments, the text is the JSON of these arguments, and the id of the call has a mark. Clients send the id back,
# so that the arguments can be restored. Without the mark, a text that the model did not write would replace them.

CUSTOM_PARAMETERS: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""Schema of the arguments with which a model calls a custom tool."""

_OTHER: Final = "j"


def custom_call(call_id: str, arguments: Mapping[str, Any]) -> tuple[str, str]:
    """Return the id and the text of a custom tool's call for a client."""
    text = arguments.get("input")
    if len(arguments) == 1 and isinstance(text, str):
        return call_id, text
    return call_id + _OTHER, arguments_text(arguments)


def custom_arguments(call_id: str, text: str) -> str:
    """Return the arguments of a custom tool's call, as JSON."""
    if minted(call_id) != call_id and is_json_object(text):
        return text
    return arguments_text({"input": text})


def minted(call_id: str) -> str:
    """Return the id of a call without the mark that `custom_call` adds for arguments that are not a text."""
    own = call_id.removesuffix(_OTHER)
    return own if _NAMED.fullmatch(own) else call_id


@dataclass(slots=True)
class ReadItems:
    """The messages that were read from items."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """The messages."""
    handles: list[str] = field(default_factory=list)
    """Handles of turns among the items, in order."""
    is_complete: bool = True
    """True if no further item belongs to the last turn."""


class _ItemKind(enum.IntEnum):
    """Kind of an item of a turn, in the order in which a turn has them."""

    REASONING = 0
    MESSAGE = 1
    CALL = 2


@dataclass(slots=True)
class _TurnItems:
    """The items of one turn."""

    handle: str
    """Handle of the turn; "" if the items have none."""
    last: _ItemKind
    """Kind of the last item."""
    reasoning: list[str] = field(default_factory=list)
    """Texts of the reasoning."""
    texts: list[str] = field(default_factory=list)
    """Texts of the messages."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """The calls, in OpenAI's chat form."""
    refers: str = ""
    """Id of an item that the client only refers to; it stands for the whole turn."""
    not_text: bool = False
    """True if a note replaces content that is not text."""

    def takes(self, handle: str, kind: _ItemKind) -> bool:
        """Return True if a further item belongs to this turn.

        If this is wrong and a turn is split, the history tree joins its parts.
        """
        if handle or self.handle:
            return handle == self.handle
        return kind > self.last or kind == self.last != _ItemKind.MESSAGE

    def as_message(self) -> dict[str, Any] | None:
        """Return the message of the turn; None if the turn has only encrypted reasoning."""
        reasoning = "".join(self.reasoning)
        if not (self.texts or self.calls or reasoning or self.refers):
            return None
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.texts)}
        if self.handle and not self.calls:  # if there are calls, their ids name the turn
            message["handle"] = self.handle
        if self.refers:
            message["refers"] = self.refers
        if self.not_text:
            message["not_text"] = True
        if reasoning:
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def read_items(items: Sequence[Mapping[str, Any]], seen: HistoryCache[ReadItems]) -> ReadItems:
    """Return the messages of these items.

    Args:
        items: the items.
        seen: cache of histories that were read for earlier requests.

    Raises:
        Refused: an item cannot be used in a prompt; the message has its index.
    """
    reader, last = _ItemReader(), len(items) - 1
    read = seen.read_on(items[:-1], reader.read, attrgetter("is_complete"))
    read += [reader.read(last, items[last], is_last=True), reader.end()] if items else []
    return ReadItems(
        list(chain.from_iterable(map(attrgetter("messages"), read))),
        list(dict.fromkeys(chain.from_iterable(map(attrgetter("handles"), read)))),
    )


class _ItemReader:
    def __init__(self) -> None:
        self._read = ReadItems()
        self._said: _TurnItems | None = None

    def end(self) -> ReadItems:
        """Finish the last turn, and return its message."""
        self._read = ReadItems()
        self._finish_turn()
        return self._read

    def read(self, index: int, item: Mapping[str, Any], *, is_last: bool = False) -> ReadItems:
        """Read an item, and return the messages that this item completes."""
        self._read = ReadItems()
        self._read_item(item, f"input[{index}]", is_last=is_last)
        self._read.is_complete = self._said is None
        return self._read

    def _read_item(self, item: Mapping[str, Any], where: str, *, is_last: bool) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        match kind:
            case "message":
                self._message(item, where, is_last=is_last)
            case "reasoning":
                texts = _text_of(item.get("content"), f"{where}.content")[0]
                texts = texts or _text_of(item.get("summary"), f"{where}.summary")[0]
                self._of_turn(item, _ItemKind.REASONING).reasoning.append(texts)
            case "function_call":
                self._call(item, where, _arguments(item, where))
            case "custom_tool_call":
                text = _string(item, "input", where)
                self._call(item, where, custom_arguments(_string(item, "call_id", where), text))
            case "function_call_output" | "custom_tool_call_output":
                self._finish_turn()
                content, has_notes = _text_of(item.get("output"), f"{where}.output")
                answered = minted(_string(item, "call_id", where))
                self._add({"role": "tool", "tool_call_id": answered, "content": content}, not_text=has_notes)
            case "item_reference":
                self._reference(_string(item, "id", where))
            case str() if not is_last:
                self._note(kind, item)
            case _:
                bad(f"{where}: an item of the type {kind!r:.60} cannot be in a prompt: leave it out.")

    def _reference(self, given: str) -> None:
        """Read a reference: an item with only an id, which names its turn. Raise Refused for an id of another form."""
        if _handle_of({"id": given}) == "":
            raise refusal_of(UnknownReference(given, is_item=True))
        prefix = given.partition("_")[0]
        kind = {"rs": _ItemKind.REASONING, "msg": _ItemKind.MESSAGE}.get(prefix, _ItemKind.CALL)
        self._of_turn({"id": given}, kind).refers = given

    def _note(self, kind: str, item: Mapping[str, Any]) -> None:
        """Add a note for an earlier item that is not text, such as a web search or the output of an unknown tool."""
        if kind.endswith(("_output", "_response")):
            self._finish_turn()
            self._add({"role": "user", "content": note_of(item)}, not_text=True)
            return
        turn_items = self._of_turn({}, _ItemKind.MESSAGE)
        turn_items.texts.append(note_of(item))
        turn_items.not_text = True

    def _add(self, message: dict[str, Any], *, not_text: bool) -> None:
        self._read.messages.append({**message, "not_text": True} if not_text else message)

    def _message(self, item: Mapping[str, Any], where: str, *, is_last: bool) -> None:
        role = item.get("role")
        # Content that is not text is refused only in the new part of the input. Clients send their whole history with
        # every request, so a refusal in an earlier part would fail every later request. There, a note replaces it.
        strict = is_last and role != "assistant"
        content, has_notes = _text_of(item.get("content"), f"{where}.content", strict=strict)
        if role == "assistant":
            turn_items = self._of_turn(item, _ItemKind.MESSAGE)
            turn_items.texts.append(content)
            turn_items.not_text |= has_notes
            return
        if not isinstance(role, str) or role not in _ROLES:
            bad(f"{where}.role: give user, assistant, system or developer, not {role!r:.60}.")
        self._finish_turn()
        self._add({"role": _ROLES[role], "content": content}, not_text=has_notes)

    def _call(self, item: Mapping[str, Any], where: str, arguments: str) -> None:
        namespace = item.get("namespace")
        name = flat_name(_string(item, "name", where), namespace if isinstance(namespace, str) else "")
        call_id = minted(_string(item, "call_id", where))
        function = {"name": name, "arguments": arguments}
        turn_items = self._of_turn(item, _ItemKind.CALL)
        turn_items.calls.append({"id": call_id, "type": "function", "function": function})

    def _of_turn(self, item: Mapping[str, Any], kind: _ItemKind) -> _TurnItems:
        """Return the collected items of this item's turn; a new collection if the item begins a turn."""
        handle = _handle_of(item)
        if handle:
            self._read.handles.append(handle)
        if self._said is None or not self._said.takes(handle, kind):
            self._finish_turn()
            self._said = _TurnItems(handle, kind)
        self._said.last = kind
        return self._said

    def _finish_turn(self) -> None:
        message = None if self._said is None else self._said.as_message()
        if message is not None:
            self._read.messages.append(message)
        self._said = None


def _handle_of(item: Mapping[str, Any]) -> str:
    """Return the handle of an item's turn, or ""."""
    for name in ("id", "call_id", "encrypted_content"):
        value = item.get(name)
        named = _NAMED.fullmatch(value) if isinstance(value, str) else None
        if named is not None:
            return f"call_{named[1]}"
    return ""


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or (name != "input" and not value):
        bad(f"{where}.{name}: give a string, not {value!r:.60}.")
    return value


def _arguments(item: Mapping[str, Any], where: str) -> str:
    text = item.get("arguments")
    if not isinstance(text, str):
        bad(f"{where}.arguments: give a JSON object as a string, not {text!r:.60}.")
    return text if text.strip() else "{}"


def _text_of(content: Any, where: str, *, strict: bool = False) -> tuple[str, bool]:
    """Return the text of a content, and True if a note replaces a part of it. A missing content is an empty text."""
    if content is None or isinstance(content, str):
        return content or "", False
    if not isinstance(content, list):
        bad(f"{where}: give a string or a list of parts, not {content!r:.60}.")
    read = [_text_of_part(part, f"{where}[{number}]", strict=strict) for number, part in enumerate(content)]
    return "".join(text for text, _ in read), any(is_note for _, is_note in read)


def _text_of_part(part: Any, where: str, *, strict: bool) -> tuple[str, bool]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        bad(f"{where} is {part!r:.60}: give {{'type': 'input_text', 'text': '...'}}.")
    text = part.get(_TEXTS.get(kind, ""))
    if isinstance(text, str):
        return text, False
    if strict or kind in _TEXTS:
        what = f"{part!r:.60}" if kind in _TEXTS else f"of the type {kind!r:.60}"
        bad(f"{where} is {what}: only text can be in a prompt: give {{'type': 'input_text', 'text': '...'}}.")
    return note_of(part), True
