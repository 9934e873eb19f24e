"""Positions in lists with a gap: their arithmetic, the item at a position, and the value of `loop` at a position.

Positions can be compared or subtracted only if they count from the same unknown number of messages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jinja2

from runner.tokens.lookback.values import (
    GappedList,
    Loop,
    PastMessage,
    Position,
    Symbol,
    Unknown,
    UnknownCount,
    Value,
)

__all__ = [
    "base_of",
    "compared_with_least",
    "item_of_gapped",
    "loop_after_gap",
    "loop_before_gap",
    "loop_of_list",
    "mapped",
    "moved",
    "range_of",
    "slice_of_gapped",
]


def base_of(value: Value) -> UnknownCount | None:
    """Return the base that a position among messages counts from; None if the value is not a position."""
    return value.base if isinstance(value, Position | Symbol) else None


def moved(sign: str, one: Value, other: Value) -> Position | int | None:
    """Return the sum or difference of a position and a number, or the distance of two positions; None otherwise."""
    match sign, one, other:
        case "+", Position(), int():
            return one + other
        case "+", int(), Position():
            return other + one
        case "-", Position(), int():
            return one - other
        case "-", Position(), Position() if one.base is other.base:
            return one.offset - other.offset
    return None


def compared_with_least(sign: str, least: int, number: int) -> bool | Unknown:
    """Compare an unknown number, whose minimum is `least`, with `number`. The result may be `Unknown`."""
    if least > number:
        return sign in ("gt", "gteq", "ne")
    if least == number and sign in ("gteq", "lt"):
        return sign == "gteq"
    return Unknown()


def range_of(bounds: Sequence[Value]) -> Value:
    """Return the numbers of jinja's `range`; None if they are not known, or if the last bound is not a position."""
    first, last = (0, *bounds) if len(bounds) == 1 else bounds[:2]
    if len(bounds) > 2 or not isinstance(last, Position):
        return None
    if isinstance(first, Position) and first.base is last.base:
        return [Position(first.base, offset) for offset in range(first.offset, last.offset)]
    if first == 0 and last.least > 0:
        return GappedList((last - 1,), last - 1, messages=False)
    return None


# --- lists with a gap


def item_of_gapped(values: GappedList, key: Value) -> Value:
    between = PastMessage(null_content=True) if values.messages else Unknown(may_end=True)
    if isinstance(key, Position) and key.base is values.start.base and not values.backwards:
        index = key.offset - values.start.offset
        if index >= len(values.last_items):
            return jinja2.Undefined(name="item")
        if index >= 0:
            return values.last_items[index]
        return between if key.least >= 0 else Unknown(may_end=True)
    if type(key) is not int:
        return Unknown(may_end=True)
    if values.backwards:
        key = -1 - key
    if key < 0:
        if -key <= len(values.last_items):
            return values.last_items[key]
        return between if -key <= values.least_length else Unknown(may_end=True)
    if key < len(values.first_items):
        return values.first_items[key]
    return between if key < values.least_before else Unknown(may_end=True)


def slice_of_gapped(values: GappedList, start: Value, stop: Value, step: Value) -> Value:
    if (start, stop, step) == (None, None, -1):
        return dataclasses.replace(values, backwards=not values.backwards)
    if step not in (None, 1) or values.backwards:
        return Unknown(may_end=True)
    first, last = _bound(values, start, 0), _bound(values, stop, len(values.last_items))
    if last is None or last < 0 or first is None:
        return Unknown(may_end=True)
    if first >= 0 and not (start is None or (type(start) is int and start >= 0)):
        return list(values.last_items[first:last])
    skipped = start or 0
    if type(skipped) is not int or not 0 <= skipped <= values.least_before:
        return Unknown(may_end=True)
    return GappedList(values.last_items[:last], values.start - skipped, values.first_items[skipped:], values.messages)


def _bound(values: GappedList, bound: Value, default: int) -> int | None:
    """Return a bound of a slice as an index into `values.last_items`; `default` if the slice lacks the bound.

    The result is negative if the bound may be before these items, and None if the position of the bound is not known.
    """
    if bound is None:
        return default
    if isinstance(bound, Position) and bound.base is values.start.base:
        return bound.offset - values.start.offset
    if type(bound) is int:
        return max(-1, len(values.last_items) + bound) if bound < 0 else -1
    return None


def mapped(values: GappedList | list[Value], change: Callable[[Value], Value]) -> Value:
    if isinstance(values, GappedList):
        items = tuple(map(change, values.last_items))
        return GappedList(items, values.start, messages=False, backwards=values.backwards)
    return list(map(change, values))


# --- the values of `loop`


def loop_of_list(values: Sequence[Value], number: int) -> Loop:
    """Return jinja's `loop` object for an item of a fully known list."""
    left = len(values) - 1 - number
    neighbours = (_item(values, number - 1, "previtem"), _item(values, number + 1, "nextitem"))
    return _loop(number, left, len(values), (number == 0, left == 0), neighbours)


def loop_before_gap(whole: GappedList, ahead: Sequence[Value], number: int) -> Loop:
    """Return jinja's `loop` object for one of the known items before the gap."""
    last = False if whole.least_length > number + 1 else Unknown()
    following = ahead[number + 1] if number + 1 < len(ahead) else Unknown(may_end=True)
    neighbours = (_item(ahead, number - 1, "previtem"), following)
    return _loop(number, whole.length - number - 1, whole.length, (number == 0, last), neighbours)


def loop_after_gap(whole: GappedList, after: Sequence[Value], number: int) -> Loop:
    """Return jinja's `loop` object for one of the known items after the gap."""
    left = len(after) - 1 - number
    first = False if number or whole.least_length > len(after) else Unknown()
    previous = after[number - 1] if number else Unknown(may_end=True)
    if number == 0 and whole.messages and not whole.backwards and whole.least_before:
        previous = PastMessage(null_content=True)
    neighbours = (previous, _item(after, number + 1, "nextitem"))
    return _loop(whole.length - left - 1, left, whole.length, (first, left == 0), neighbours)


def _loop(
    index: int | Position,
    left: int | Position,
    length: int | Position,
    ends: tuple[Value, Value],
    neighbours: tuple[Value, Value],
) -> Loop:
    """Return jinja's `loop` object for the item at an index, with `left` items after it."""
    first, last = ends
    previous, following = neighbours
    return Loop(
        {
            "index0": index,
            "index": index + 1,
            "revindex0": left,
            "revindex": left + 1,
            "length": length,
            "first": first,
            "last": last,
            "previtem": previous,
            "nextitem": following,
            "depth": Unknown(),
        }
    )


def _item(values: Sequence[Value], number: int, name: str) -> Value:
    return values[number] if 0 <= number < len(values) else jinja2.Undefined(name=name)
