"""One of two values, and of two states of a render, where it is not known which; and numbers for given values."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Self

import jinja2

from runner.tokens.lookback.values import (
    MAYBE,
    UNTOLD,
    Condition,
    Given,
    Past,
    Position,
    Root,
    Text,
    Unknown,
    Value,
    acts,
    holds_end,
    is_given,
    is_text,
    same,
)

__all__ = ["Leaving", "State", "Symbols", "merged", "root_of"]


class Symbols:
    """Numbers for given values: an operation on the same operands has the same one."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._kept: list[Any] = []  # so that no other object gets its identity
        self._fresh = itertools.count(-1, -1)

    def fresh(self) -> Given:
        """A given value like no other."""
        return Given(next(self._fresh))

    def of(self, operation: str, *operands: Value, text: bool = False, root: Root | None = None) -> Given:
        """What an operation makes of given operands."""
        key = (operation, *map(self._key, operands))
        number = self._numbers.setdefault(key, len(self._numbers))
        return Given(number, text, root=root, ends=any(map(holds_end, operands)))

    def _key(self, value: Value) -> Any:
        if isinstance(value, str | int | float | bool | None | Given | Position):
            return type(value).__name__, value
        if isinstance(value, Text):
            return "text", value.head, *map(self._key, value.parts)
        if isinstance(value, list | tuple):
            return "list", *map(self._key, value)
        if isinstance(value, dict):
            return "dict", *((self._key(key), self._key(each)) for key, each in value.items())
        if isinstance(value, jinja2.Undefined):
            return "undefined"
        self._kept.append(value)
        return "object", id(value)


def merged(condition: Condition, one: Value, other: Value, symbols: Symbols) -> Value:
    """`one` where the condition holds, else `other`."""
    if same(one, other):
        return one
    both = (one, other)
    if any(map(acts, both)):  # what calling one of two macros does would have to be followed twice
        return UNTOLD
    pasts = isinstance(one, Past) and isinstance(other, Past)
    if pasts and (one.messages, one.backwards) == (other.messages, other.backwards) and same(one.items, other.items):
        return Past(one.items, Root(min(one.least, other.least)), 0, (), one.messages, one.backwards)
    ends, text = any(map(holds_end, both)), is_text(one) and is_text(other)
    if isinstance(condition, Given):
        if all(map(is_given, both)) and not all(isinstance(each, Text) and each.has_end for each in both):
            return symbols.of("if", condition, *both, text=text)
        root = root_of(one)
        if root is not None and root is root_of(other):
            return symbols.of("if", condition, *both, root=root)
    if text and ends:
        return _merged_text(condition, one, other, symbols)
    return Unknown(ends=ends, text=text)


def _merged_text(condition: Condition, one: Value, other: Value, symbols: Symbols) -> Value:
    """One of two texts, of which one at least may hold the end of the turn's words."""
    both = (one, other)
    marks = [each.parts[0] if isinstance(each, Text) and each.is_marked else None for each in both]
    if marks[0] is marks[1] and marks[0] is not None:
        rest = merged(condition, one.rest, other.rest, symbols)
        heads = (one.head, other.head)
        known = isinstance(condition, Given) and None not in heads
        return Text((marks[0], *_parts(rest)), ("if", condition, *heads) if known else None)
    if isinstance(condition, Unknown) or any(isinstance(each, Unknown) and each.ends for each in both):
        return Unknown(ends=True, text=True)
    return Text((MAYBE, *_parts(merged(condition, _behind_mark(one), _behind_mark(other), symbols))))


def _behind_mark(text: Value) -> Value:
    """What of a text stands behind its mark; nothing where it is unknown and no words end in it."""
    if isinstance(text, Text) and text.is_marked:
        return text.rest
    return "" if isinstance(text, Unknown) else text


def _parts(value: Value) -> tuple[Value, ...]:
    return value.parts if isinstance(value, Text) else (value,) if value != "" else ()


def root_of(value: Value) -> Root | None:
    """What a position among the messages counts from; None where the value is none."""
    return value.root if isinstance(value, Position | Given) else None


# --- one of two states


@dataclass(slots=True)
class State:
    """Where a render stands."""

    scopes: list[dict[str, Value]] = field(default_factory=lambda: [{}])
    """The names that are known, by scopes, the innermost last."""
    namespaces: dict[int, dict[str, Value]] = field(default_factory=dict)
    """What each jinja namespace holds, by its number."""
    output: Value = ""
    """What was written so far by the macro or block that is being rendered."""

    def copy(self) -> Self:
        namespaces = {number: dict(names) for number, names in self.namespaces.items()}
        return type(self)([dict(scope) for scope in self.scopes], namespaces, self.output)

    def lookup(self, name: str, depth: int | None = None) -> Value:
        """The value of a name, seen from a scope; undefined where there is none."""
        for scope in reversed(self.scopes[:depth]):
            if name in scope:
                return scope[name]
        return jinja2.Undefined(name=name)

    def settled(self, before: Self) -> bool:
        """No less is known than `before`."""
        one, other = ((state.scopes, state.namespaces, state.output) for state in (self, before))
        return same(one, other, settled=True)

    def merged(self, condition: Condition, other: Self, symbols: Symbols) -> Self:
        """This state where the condition holds, else `other`."""
        scopes = []
        for depth, (mine, theirs) in enumerate(zip(self.scopes, other.scopes, strict=True), start=1):
            differ = [name for name in {**mine, **theirs} if name not in mine or mine[name] is not theirs.get(name)]
            found = (merged(condition, self.lookup(name, depth), other.lookup(name, depth), symbols) for name in differ)
            scopes.append({**mine, **dict(zip(differ, found, strict=True))})
        namespaces = {
            number: _merged_names(condition, self.namespaces.get(number, {}), other.namespaces.get(number, {}), symbols)
            for number in {**self.namespaces, **other.namespaces}
        }
        return type(self)(scopes, namespaces, merged(condition, self.output, other.output, symbols))


@dataclass(slots=True)
class Leaving:
    """Where renders stand that left a pass through a loop, or the loop."""

    depth: int
    """How many conditions the loop stands under."""
    passes: list[State] = field(default_factory=list)
    """The renders that left a pass with `continue`."""
    loops: list[State] = field(default_factory=list)
    """The renders that left the loop with `break`."""
    conditions: list[Condition] = field(default_factory=list)
    """The conditions under which they left."""


def _merged_names(
    condition: Condition, one: dict[str, Value], other: dict[str, Value], symbols: Symbols
) -> dict[str, Any]:
    undefined = jinja2.Undefined()
    return {
        name: merged(condition, one.get(name, undefined), other.get(name, undefined), symbols)
        for name in {**one, **other}
    }
