"""Writer of calls, in exactly the form of a template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from runner.parsing.notations import members_in_order, type_of
from runner.parsing.turn_format import CallFormat, LiteralText, Piece, Slot, TaggedArguments

__all__ = ["Unwritable", "WrittenCall", "id_for", "write_calls"]


class WrittenCall(NamedTuple):
    """A call to write."""

    name: str
    arguments: Mapping[str, Any]
    id: str


class Unwritable(ValueError):
    """Calls that the format cannot write; the message is a clause with the reason."""


def write_calls(form: CallFormat, calls: Sequence[WrittenCall]) -> str:
    """Return the text of `calls`, with the texts before the first call and after the last call.

    Raises:
        Unwritable: the format cannot write the calls.
    """
    if len(calls) > 1 and form.between is None:
        raise Unwritable("the format allows only one call in a turn")
    written = ("".join(_piece(form, piece, call, number) for piece in form.call) for number, call in enumerate(calls))
    return form.begin + (form.between or "").join(written) + form.close


def id_for(form: CallFormat, name: str, number: int) -> str:
    """Return a generated id for a call of the tool `name`.

    The id contains `number`, such as the number of the call in its conversation.
    """
    if form.id_pieces is None:
        return form.ids.format(number=number)
    call = WrittenCall(name, {}, "")
    return "".join(_piece(form, piece, call, number) for piece in form.id_pieces)


def _piece(form: CallFormat, piece: Piece, call: WrittenCall, number: int) -> str:
    match piece:
        case LiteralText(text):
            return text
        case Slot.NAME:
            return call.name
        case Slot.ID:
            return call.id
        case Slot.INDEX:
            return str(number)
        case Slot.ARGUMENTS:
            return _arguments(form, call.arguments)


def _arguments(form: CallFormat, arguments: Mapping[str, Any]) -> str:
    style = form.arguments
    if not isinstance(style, TaggedArguments):
        return style.notation.encode(arguments)
    if not arguments:
        if style.none is None:
            raise Unwritable("a call without arguments cannot be written")
        return style.none
    members = members_in_order(arguments, sorted_keys=style.sorted_keys)
    return style.head + style.separator.join(_member(style, *member) for member in members) + style.tail


def _member(form: TaggedArguments, key: str, value: Any) -> str:
    style = form.styles.get(type_of(value))
    if style is None:
        raise Unwritable(f"a value of type {type_of(value)} cannot be written")
    return f"{key}{style.open}{style.notation.encode(value)}{style.close}"
