"""Positions among messages of which only the first and the last are known, and what `loop` says at each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jinja2

from runner.tokens.lookback.values import Loop, Past, PastMessage, Position, Unknown, Value

__all__ = [
    "backwards_head_loop",
    "backwards_loop",
    "head_loop",
    "item_of_past",
    "known_loop",
    "mapped",
    "moved",
    "positions",
    "slice_of_past",
    "told_by_least",
]


# Positions are compared and subtracted within one root only: how many messages another one stands for is not known.


def moved(sign: str, one: Value, other: Value) -> Value | None:
    """A position moved by a number, or the distance of two."""
    if isinstance(one, Position) and type(other) is int:
        return Position(one.root, one.offset + (other if sign == "+" else -other))
    if isinstance(other, Position) and type(one) is int and sign == "+":
        return Position(other.root, other.offset + one)
    if isinstance(one, Position) and isinstance(other, Position) and sign == "-" and one.root is other.root:
        return one.offset - other.offset
    return None


def told_by_least(sign: str, least: int, number: int) -> bool | Unknown:
    """What a number of at least `least` says beside `number`."""
    if least > number:
        return sign in ("gt", "gteq", "ne")
    if least == number and sign in ("gteq", "lt"):
        return sign == "gteq"
    return Unknown()


def item_of_past(past: Past, key: Value) -> Value:
    between = PastMessage(null_content=True) if past.messages else Unknown(ends=True)
    if isinstance(key, Position) and key.root is past.root and not past.backwards:
        position = key.offset - past.offset
        if position >= len(past.items):
            return jinja2.Undefined(name="item")
        return past.items[position] if position >= 0 else between if key.least >= 0 else Unknown(ends=True)
    if type(key) is not int:
        return Unknown(ends=True)
    if past.backwards:
        key = -1 - key
    if key < 0:
        known = -key <= len(past.items)
        return past.items[key] if known else between if -key <= len(past.items) + past.least else Unknown(ends=True)
    if key < len(past.heads):
        return past.heads[key]
    return between if key < past.least else Unknown(ends=True)


def slice_of_past(past: Past, start: Value, stop: Value, step: Value) -> Value:
    if (start, stop, step) == (None, None, -1):
        return dataclasses.replace(past, backwards=not past.backwards)
    if step not in (None, 1) or past.backwards:
        return Unknown(ends=True)
    first, last = _bound(past, start, 0), _bound(past, stop, len(past.items))
    if last is None or last < 0 or first is None:
        return Unknown(ends=True)
    if first >= 0 and not (start is None or (type(start) is int and start >= 0)):
        return list(past.items[first:last])
    skipped = start or 0
    if type(skipped) is not int or not 0 <= skipped <= past.least:
        return Unknown(ends=True)
    return Past(past.items[:last], past.root, past.offset - skipped, past.heads[skipped:], past.messages)


def _bound(past: Past, bound: Value, default: int) -> int | None:
    """The position of a slice's bound among the items; less than 0 where it stands before them, None for no idea."""
    if bound is None:
        return default
    if isinstance(bound, Position) and bound.root is past.root:
        return bound.offset - past.offset
    if type(bound) is int:
        return max(-1, len(past.items) + bound) if bound < 0 else -1
    return None


def mapped(value: Past | list[Value], change: Callable[[Value], Value]) -> Value:
    if isinstance(value, Past):
        return Past(tuple(map(change, value.items)), value.root, value.offset, (), False, value.backwards)
    return list(map(change, value))


def positions(bounds: Sequence[Value]) -> Value:
    """The positions between two, or before one; None where that cannot be told."""
    first, last = (0, *bounds) if len(bounds) == 1 else bounds[:2]
    if len(bounds) > 2 or not isinstance(last, Position):
        return None
    if isinstance(first, Position) and first.root is last.root:
        return [Position(first.root, offset) for offset in range(first.offset, last.offset)]
    if first == 0 and last.root.least + last.offset > 0:
        return Past((Position(last.root, last.offset - 1),), last.root, last.offset - 1, (), messages=False)
    return None


def known_loop(values: Sequence[Value], number: int, first: int | Position, whole: Past | None) -> Loop:
    """`loop` at one of the known items, the first of which stands at position `first`."""
    count = len(values)
    before = _neighbour(values, number - 1, "previtem")
    is_first: Value = number == 0
    if whole is not None and number == 0:
        before = PastMessage(null_content=True) if whole.messages and whole.least else Unknown(ends=True)
        is_first = False if whole.least else Unknown()
    ends = (is_first, number == count - 1)
    neighbours = (before, _neighbour(values, number + 1, "nextitem"))
    return _loop(_plus(first, number), _plus(first, count), ends, neighbours, count - 1 - number)


def head_loop(whole: Past, number: int) -> Loop:
    """`loop` at one of the first messages."""
    heads = whole.heads
    inner = number + 1 < len(heads)
    ends = (number == 0, False if inner or _more_than_heads(whole) else Unknown())
    after = heads[number + 1] if inner else Unknown(ends=True)
    return _loop(number, whole.length, ends, (_neighbour(heads, number - 1, "previtem"), after))


def backwards_loop(values: Sequence[Value], number: int, whole: Past) -> Loop:
    """`loop` at one of the known items, where the list is read from its end."""
    inner = number + 1 < len(values)
    ends = (number == 0, False if inner or whole.least else Unknown())
    after = values[number + 1] if inner else Unknown(ends=True)
    neighbours = (_neighbour(values, number - 1, "previtem"), after)
    return _loop(number, whole.length, ends, neighbours, _plus(whole.length, -number - 1))


def backwards_head_loop(whole: Past, number: int) -> Loop:
    """`loop` at one of the first messages, where the list is read from its end."""
    inner = number + 1 < len(whole.heads)
    ends = (False if inner or _more_than_heads(whole) else Unknown(), number == 0)
    neighbours = (Unknown(ends=True), _neighbour(whole.heads, number - 1, "nextitem"))
    return _loop(_plus(whole.length, -number - 1), whole.length, ends, neighbours, number)


def _loop(
    index: int | Position,
    length: int | Position,
    ends: tuple[Value, Value],
    neighbours: tuple[Value, Value],
    left: int | Position | None = None,
) -> Loop:
    """`loop` at an index, with so many items `left` behind that one where that is known."""
    values: dict[str, Value] = dict(zip(("first", "last", "previtem", "nextitem"), (*ends, *neighbours), strict=True))
    values |= {"index0": index, "index": _plus(index, 1), "length": length, "depth": Unknown()}
    if left is not None:
        values |= {"revindex0": left, "revindex": _plus(left, 1)}
    return Loop(values)


def _neighbour(values: Sequence[Value], number: int, name: str) -> Value:
    return values[number] if 0 <= number < len(values) else jinja2.Undefined(name=name)


def _plus(position: int | Position, number: int) -> int | Position:
    return Position(position.root, position.offset + number) if isinstance(position, Position) else position + number


def _more_than_heads(whole: Past) -> bool:
    """Something follows the first messages for certain."""
    return bool(whole.items) or whole.least > len(whole.heads)
