"""Reads the items of OpenAI's Responses as messages: what was said of one turn, which is several items, as one message.

Items name the turn that they are of: by their ids, which are its handle behind `rs_`, `msg_`, `fc_` or `ctc_`, by the
ids of calls, and by the encrypted content of reasoning, which holds nothing else.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from runner.endpoint.bodies import bad
from runner.endpoint.encoding import arguments_text

__all__ = ["CUSTOM_PARAMETERS", "ReadItems", "custom_call", "flat_name", "item_id", "read_items"]

_NAMED: Final = re.compile(r"(?:call|rs|msg|fc|ctc)_([0-9a-f]{12})(?:_\d+j?)?")
"""What names a turn, with what follows its handle's `call_`."""

_TEXTS: Final = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
"""Where each part has its text."""

_ROLES: Final = {"user": "user", "system": "system", "developer": "system"}


def item_id(prefix: str, handle: str, number: int = 0) -> str:
    """The id of an item, which names its turn; of further items of the kind it has a number."""
    name = f"{prefix}_{handle.removeprefix('call_')}"
    return f"{name}_{number}" if number else name


def flat_name(name: str, namespace: str) -> str:
    """The one name by which a model calls a tool of a namespace."""
    return f"{namespace.rstrip('_')}__{name.lstrip('_')}" if namespace else name


# A custom tool takes a text; a model calls it as a function whose only argument is that text. Where the model gave
# other arguments, the text is those as JSON, and the id of the call says so, which every client sends back: else they
# would come back as a text that nobody said.

CUSTOM_PARAMETERS: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""The schema of a custom tool as a model has it."""

_OTHER: Final = "j"


def custom_call(call_id: str, arguments: Mapping[str, Any]) -> tuple[str, str]:
    """The id and the text by which a client is told of a call of a custom tool."""
    text = arguments.get("input")
    if len(arguments) == 1 and isinstance(text, str):
        return call_id, text
    return call_id + _OTHER, arguments_text(arguments)


def _custom_arguments(call_id: str, text: str) -> str:
    """The arguments of such a call, as JSON."""
    if _minted(call_id) != call_id and _is_object(text):
        return text
    return arguments_text({"input": text})


def _minted(call_id: str) -> str:
    """The id of a call as it was before its text was told as another one."""
    own = call_id.removesuffix(_OTHER)
    return own if _NAMED.fullmatch(own) else call_id


@dataclass(slots=True)
class ReadItems:
    """A list of items as messages."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """The messages."""
    handles: list[str] = field(default_factory=list)
    """What names turns among the items, in order."""


class _ItemKind(enum.IntEnum):
    """What an item says of a turn, in the order in which a turn says it."""

    REASONING = 0
    MESSAGE = 1
    CALL = 2


@dataclass(slots=True)
class _SaidItems:
    """What was said of one turn, item by item."""

    handle: str
    """The name of the turn; "" where the items tell none."""
    last: _ItemKind
    """The kind of the item that was read last."""
    reasoning: list[str] = field(default_factory=list)
    """The texts of its reasoning."""
    texts: list[str] = field(default_factory=list)
    """The texts of its messages."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """The calls, in OpenAI's chat form."""

    def takes(self, handle: str, kind: _ItemKind) -> bool:
        """Whether a further item is of the same turn; one that is told apart wrongly is joined by whoever knows it."""
        if handle or self.handle:
            return handle == self.handle
        return kind > self.last or kind == self.last != _ItemKind.MESSAGE

    def as_message(self) -> dict[str, Any] | None:
        """The message; None of reasoning that is kept from us."""
        reasoning = "".join(self.reasoning)
        if not (self.texts or self.calls or reasoning):
            return None
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.texts)}
        if reasoning:
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def read_items(items: Sequence[Mapping[str, Any]]) -> ReadItems:
    """The messages that items stand for.

    Raises:
        Refused: one cannot be put before a model; named by its index.
    """
    reader = _ItemReader()
    for index, item in enumerate(items):
        reader.read(item, f"input[{index}]")
    return reader.end()


class _ItemReader:
    def __init__(self) -> None:
        self._read = ReadItems()
        self._said: _SaidItems | None = None
        self._handles: dict[str, None] = {}

    def end(self) -> ReadItems:
        self._finish_turn()
        self._read.handles = list(self._handles)
        return self._read

    def read(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        match kind:
            case "message":
                self._message(item, where)
            case "reasoning":
                texts = _text_of(item.get("content"), f"{where}.content")
                texts = texts or _text_of(item.get("summary"), f"{where}.summary")
                self._of_turn(item, _ItemKind.REASONING).reasoning.append(texts)
            case "function_call":
                self._call(item, where, _arguments(item, where))
            case "custom_tool_call":
                text = _string(item, "input", where)
                self._call(item, where, _custom_arguments(_string(item, "call_id", where), text))
            case "function_call_output" | "custom_tool_call_output":
                self._finish_turn()
                content = _text_of(item.get("output"), f"{where}.output")
                answered = _minted(_string(item, "call_id", where))
                self._read.messages.append({"role": "tool", "tool_call_id": answered, "content": content})
            case "item_reference":
                bad(f"{where}: an item_reference names an item that is not kept here: give the item itself.")
            case _:
                bad(f"{where}: an item of the type {kind!r:.60} cannot be put before a model: leave it out.")

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role, content = item.get("role"), _text_of(item.get("content"), f"{where}.content")
        if role == "assistant":
            self._of_turn(item, _ItemKind.MESSAGE).texts.append(content)
            return
        if not isinstance(role, str) or role not in _ROLES:
            bad(f"{where}.role: give user, assistant, system or developer, not {role!r:.60}.")
        self._finish_turn()
        self._read.messages.append({"role": _ROLES[role], "content": content})

    def _call(self, item: Mapping[str, Any], where: str, arguments: str) -> None:
        namespace = item.get("namespace")
        name = flat_name(_string(item, "name", where), namespace if isinstance(namespace, str) else "")
        call_id = _minted(_string(item, "call_id", where))
        function = {"name": name, "arguments": arguments}
        said = self._of_turn(item, _ItemKind.CALL)
        said.calls.append({"id": call_id, "type": "function", "function": function})

    def _of_turn(self, item: Mapping[str, Any], kind: _ItemKind) -> _SaidItems:
        """Where an item belongs that says something of a turn."""
        handle = _handle_of(item)
        if handle:
            self._handles[handle] = None
        if self._said is None or not self._said.takes(handle, kind):
            self._finish_turn()
            self._said = _SaidItems(handle, kind)
        self._said.last = kind
        return self._said

    def _finish_turn(self) -> None:
        message = None if self._said is None else self._said.as_message()
        if message is not None:
            self._read.messages.append(message)
        self._said = None


def _handle_of(item: Mapping[str, Any]) -> str:
    """What names the turn of an item, or ""."""
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
    if isinstance(text, str) and not text.strip():
        return "{}"
    if not isinstance(text, str) or not _is_object(text):
        bad(f"{where}.arguments: give a JSON object as a string, not {text!r:.60}.")
    return text


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)  # orjson takes no half of a surrogate pair
    except (ValueError, RecursionError):
        return False


def _text_of(content: Any, where: str) -> str:
    """A text, or parts of one; nothing is an empty text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        bad(f"{where}: give a string or a list of parts, not {content!r:.60}.")
    return "".join(_text_of_part(part, f"{where}[{number}]") for number, part in enumerate(content))


def _text_of_part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        bad(f"{where} is {part!r:.60}: give {{'type': 'input_text', 'text': '...'}}.")
    text = part.get(_TEXTS.get(kind, ""))
    if not isinstance(text, str):
        what = f"{part!r:.60}" if kind in _TEXTS else f"of the type {kind!r:.60}"
        bad(f"{where} is {what}: only text can be put before a model; give {{'type': 'input_text', 'text': '...'}}.")
    return text
