"""Search for a call in a render: its span, and its slots."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from runner.parsing.learning.probe_renders import ProbeCall
from runner.parsing.turn_format import Container, LiteralText, Piece, Slot, merged

__all__ = ["CallSpan", "find_object_call", "named"]

_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class CallSpan:
    """One call in a render."""

    start: int
    """Position of the start of the call's first slot, or of its object."""
    end: int
    """Position of the end of the call's last slot, or of its object."""
    pieces: tuple[Piece, ...]
    arguments: str
    before_arguments: str
    """Text of the render before the arguments."""
    container: Container | None
    """Object with name and arguments; None if they are separate."""


def find_object_call(text: str, said: ProbeCall, call_id: str, start: int = 0) -> CallSpan | None:
    """Find a call written as a JSON object that contains its name and its arguments; None if there is none."""
    for at, end, value in _objects(text, start):
        container = _container(value, said, call_id)
        arguments = container and _arguments(text, at + 1, end, said.arguments)
        if container and arguments:
            pieces = _pieces(text, at, end, arguments, said.name, call_id)
            return CallSpan(at, end, pieces, text[slice(*arguments)], text[: arguments[0]], container)
    return None


def named(text: str, said: ProbeCall, call_id: str, start: int = 0) -> CallSpan | None:
    """Find a call written as its name and an object of its arguments, in either order; None if there is none."""
    arguments = _arguments(text, start, len(text), said.arguments)
    if arguments is None:
        return None
    in_front = text.rfind(said.name, start, arguments[0])
    name = in_front if in_front >= 0 else text.find(said.name, arguments[1])
    if name < 0:
        return None
    first, last = min(name, arguments[0]), max(name + len(said.name), arguments[1])
    with_id = text.find(call_id, start)
    if with_id >= 0:
        first, last = min(first, with_id), max(last, with_id + len(call_id))
    pieces = _pieces(text, first, last, arguments, said.name, call_id)
    return CallSpan(first, last, pieces, text[slice(*arguments)], text[: arguments[0]], None)


def _objects(text: str, start: int) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    at = text.find("{", start)
    while at >= 0:
        try:
            value, end = _DECODER.raw_decode(text, at)
        except ValueError:
            pass
        else:
            yield at, end, value
        at = text.find("{", at + 1)


def _arguments(text: str, start: int, end: int, arguments: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the span of the arguments: an object of JSON or Python, or JSON inside a string. None if there is none."""
    for at, after, value in _objects(text, start):
        if value == arguments and after <= end:
            return at, after
    written = repr(dict(arguments))
    at = text.find(written, start, end)
    if at >= 0:
        return at, at + len(written)
    at = text.find('"', start, end)
    while 0 <= at < end:
        try:
            value, after = _DECODER.raw_decode(text, at)
            if json.loads(value) == arguments:
                return at, after
        except ValueError:
            pass
        at = text.find('"', at + 1, end)
    return None


def _container(value: Any, said: ProbeCall, call_id: str) -> Container | None:
    arguments = next(_paths(value, lambda each: each == said.arguments or _is_text_of(each, said.arguments)), None)
    if arguments is None:
        return None
    if arguments == (said.name,):
        return Container((), (), None)
    name = next(_paths(value, lambda each: each == said.name), None)
    if name is None:
        return None
    return Container(name, arguments, next(_paths(value, lambda each: each == call_id), None))


def _is_text_of(value: Any, arguments: Mapping[str, Any]) -> bool:
    try:
        return isinstance(value, str) and json.loads(value) == arguments
    except ValueError:
        return False


def _paths(value: Any, wanted: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if path and wanted(value):
        yield path
    elif isinstance(value, Mapping):
        for key, member in value.items():
            yield from _paths(member, wanted, (*path, key))


def _pieces(text: str, start: int, end: int, arguments: tuple[int, int], name: str, call_id: str) -> tuple[Piece, ...]:
    return merged(
        [
            *with_slots(text[start : arguments[0]], name, call_id),
            Slot.ARGUMENTS,
            *with_slots(text[arguments[1] : end], name, call_id),
        ]
    )


def with_slots(text: str, name: str, call_id: str) -> list[Piece]:
    """Return `text` with the name and the id of a call as slots."""
    pieces: list[Piece] = [LiteralText(text)]
    # The id is replaced first, since it may contain the name.
    for word, slot in ((call_id, Slot.ID), (name, Slot.NAME)):
        pieces = [
            part
            for piece in pieces
            for part in (_split(piece.text, word, slot) if isinstance(piece, LiteralText) else [piece])
        ]
    return pieces


def _split(text: str, word: str, slot: Slot) -> Iterator[Piece]:
    for number, part in enumerate(text.split(word)):
        if number:
            yield slot
        if part:
            yield LiteralText(part)
