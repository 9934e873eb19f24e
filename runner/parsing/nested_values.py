"""Reads values in a notation of a template's own: lists, objects and words as learnt, strings between marks."""

from __future__ import annotations

from typing import Any

from runner.parsing.literals import DEEPEST, Unreadable, behind_space, read_literal
from runner.parsing.notations import Nested

__all__ = ["read_nested"]


def read_nested(notation: Nested, text: str, at: int, depth: int = 0) -> tuple[Any, int]:
    """The value that is written at `at`, and where the text goes on behind it.

    Raises:
        Unreadable: there is none.
    """
    at = behind_space(text, at)
    if depth > DEEPEST:
        raise Unreadable("it is nested too deeply")
    if text.startswith(notation.open_string, at):
        return _string(notation, text, at + len(notation.open_string))
    if text.startswith(notation.open_object, at):
        return _object(notation, text, at + len(notation.open_object), depth)
    if text.startswith(notation.open_list, at):
        return _list(notation, text, at + len(notation.open_list), depth)
    for word, value in ((notation.true, True), (notation.false, False), (notation.null, None)):
        if text.startswith(word, at):
            return value, at + len(word)
    return read_literal(text, at)


def _string(notation: Nested, text: str, at: int) -> tuple[str, int]:
    end = text.find(notation.close_string, at)
    if end < 0:
        raise Unreadable("a string is not closed")
    return text[at:end], end + len(notation.close_string)


def _object(notation: Nested, text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    members: dict[str, Any] = {}
    at = behind_space(text, at)
    while not text.startswith(notation.close_object, at):
        at = _expect(text, notation.open_key, at)
        colon = text.find(notation.close_key + notation.colon, at)
        if colon < 0:
            raise Unreadable("an object is not closed")
        key = text[at:colon].strip()
        members[key], at = read_nested(notation, text, colon + len(notation.close_key + notation.colon), depth + 1)
        at = _more(text, notation.member, notation.close_object, at)
    return members, at + len(notation.close_object)


def _list(notation: Nested, text: str, at: int, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    at = behind_space(text, at)
    while not text.startswith(notation.close_list, at):
        item, at = read_nested(notation, text, at, depth + 1)
        items.append(item)
        at = _more(text, notation.item, notation.close_list, at)
    return items, at + len(notation.close_list)


def _more(text: str, separator: str, close: str, at: int) -> int:
    at = behind_space(text, at)
    return at if text.startswith(close, at) else behind_space(text, _expect(text, separator.strip() or separator, at))


def _expect(text: str, sign: str, at: int) -> int:
    if not text.startswith(sign, at):
        raise Unreadable(f"{sign!r} is missing before {text[at : at + 10]!r}")
    return at + len(sign)
