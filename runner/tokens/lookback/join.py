"""Join of two values, and of two states of a render: the facts that hold for both."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

import jinja2

from runner.tokens.lookback.positions import base_of
from runner.tokens.lookback.values import (
    AMBIGUOUS,
    MAYBE_END,
    Condition,
    GappedList,
    Position,
    Symbol,
    Text,
    Unknown,
    UnknownCount,
    Value,
    has_effects,
    is_independent,
    is_text,
    may_hold_end,
    same,
)

__all__ = ["LoopExits", "State", "Symbols", "join"]


class Symbols:
    """The symbols of one proof. The same operation on the same operands always has the same number."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        # The list keeps objects alive that are identified by id, since another object could get the same id otherwise.
        self._kept: list[Any] = []

    def of(self, operation: str, *operands: Value, text: bool = False, base: UnknownCount | None = None) -> Symbol:
        """Return the symbol of an operation on operands that do not depend on earlier messages."""
        key = (operation, *map(self._key, operands))
        number = self._numbers.setdefault(key, len(self._numbers))
        return Symbol(number, text, base=base, may_end=any(map(may_hold_end, operands)))

    def _key(self, value: Value) -> Any:
        match value:
            case str() | int() | float() | None | Symbol() | Position():  # the key has the type, since 1 == 1.0 == True
                return type(value).__name__, value
            case Text():
                return "text", value.before, *map(self._key, value.parts)
            case list() | tuple():
                return "list", *map(self._key, value)
            case dict():
                return "dict", *((self._key(key), self._key(each)) for key, each in value.items())
            case jinja2.Undefined():
                return "undefined"
        self._kept.append(value)
        return "object", id(value)


def join(condition: Condition, one: Value, other: Value, symbols: Symbols) -> Value:
    """Return the abstract value that is `one` if the condition holds, else `other`."""
    if same(one, other):
        # Only the object `LastTurnText.text` is known to have non-empty words. A filter may have shortened the words of
        # an equal text, so the join of both is a copy.
        return replace(one) if isinstance(one, Text) and one is not other else one
    both = (one, other)
    if any(map(has_effects, both)):  # the effects of a call of one of two macros cannot be followed
        return AMBIGUOUS
    if isinstance(one, GappedList) and isinstance(other, GappedList):
        alike = (one.messages, one.backwards) == (other.messages, other.backwards)
        if alike and same(one.last_items, other.last_items):
            start = Position(UnknownCount(min(one.least_before, other.least_before)))
            return GappedList(one.last_items, start, messages=one.messages, backwards=one.backwards)
    may_end, text = any(map(may_hold_end, both)), is_text(one) and is_text(other)
    if isinstance(condition, Symbol):
        # Texts with the end of the words are not joined into a symbol, since the text after that end must stay known.
        if all(map(is_independent, both)) and not all(isinstance(each, Text) and each.has_end for each in both):
            return symbols.of("if", condition, *both, text=text)
        base = base_of(one)
        if base is not None and base is base_of(other):
            return symbols.of("if", condition, *both, base=base)
    if text and may_end:
        return _joined_text(condition, one, other, symbols)
    return Unknown(may_end=may_end, text=text)


def _joined_text(condition: Condition, one: Value, other: Value, symbols: Symbols) -> Value:
    """Join two texts, at least one of which may contain the end of the turn's words."""
    both = (one, other)
    marks = [each.parts[0] if isinstance(each, Text) and each.is_marked else None for each in both]
    if marks[0] is marks[1] and marks[0] is not None:
        rest = join(condition, one.rest, other.rest, symbols)
        known = isinstance(condition, Symbol) and one.before is not None and other.before is not None
        return Text((marks[0], *_parts(rest)), ("if", condition, one.before, other.before) if known else None)
    if isinstance(condition, Unknown) or any(isinstance(each, Unknown) and each.may_end for each in both):
        return Unknown(may_end=True, text=True)
    # One text is marked, or both are marked in different ways, so the words may end anywhere before the rest.
    return Text((MAYBE_END, *_parts(join(condition, _after_mark(one), _after_mark(other), symbols))))


def _after_mark(text: Value) -> Value:
    """Return the text after the mark; "" if the text is unknown and no words end in it."""
    if isinstance(text, Text) and text.is_marked:
        return text.rest
    return "" if isinstance(text, Unknown) else text


def _parts(value: Value) -> tuple[Value, ...]:
    return value.parts if isinstance(value, Text) else (value,) if value != "" else ()


# --- states


@dataclass(slots=True)
class State:
    """The abstract state of the interpreter at one point of a render."""

    scopes: list[dict[str, Value]] = field(default_factory=lambda: [{}])
    """The values of the names in each scope; the innermost scope is the last."""
    namespaces: dict[int, dict[str, Value]] = field(default_factory=dict)
    """The content of each jinja namespace, by its number."""
    output: Value = ""
    """Current output of the macro or block that is being rendered."""

    def copy(self) -> Self:
        namespaces = {number: dict(names) for number, names in self.namespaces.items()}
        return type(self)([dict(scope) for scope in self.scopes], namespaces, self.output)

    def lookup(self, name: str, depth: int | None = None) -> Value:
        """Return the value of a name in the innermost scope that has the name; undefined if no scope has it.

        With `depth`, only the first `depth` scopes are searched.
        """
        for scope in reversed(self.scopes[:depth]):
            if name in scope:
                return scope[name]
        return jinja2.Undefined(name=name)

    def lost_nothing_since(self, before: Self) -> bool:
        """Return True if a pass from `before` to this state lost no information, so that the fixpoint is reached."""
        one, other = ((state.scopes, state.namespaces, state.output) for state in (self, before))
        return same(one, other, unknowns_alike=True)

    def join(self, condition: Condition, other: Self, symbols: Symbols) -> Self:
        """Return the state that is this one if the condition is true, else `other`."""
        scopes = []
        for depth, (mine, theirs) in enumerate(zip(self.scopes, other.scopes, strict=True), start=1):
            # If only one state has set a name, the other has the value of an outer scope.
            differ = [name for name in {**mine, **theirs} if name not in mine or mine[name] is not theirs.get(name)]
            found = {
                name: join(condition, self.lookup(name, depth), other.lookup(name, depth), symbols) for name in differ
            }
            scopes.append({**mine, **found})
        missing = jinja2.Undefined()
        namespaces = {}
        for number in {**self.namespaces, **other.namespaces}:
            mine, theirs = self.namespaces.get(number, {}), other.namespaces.get(number, {})
            namespaces[number] = {
                name: join(condition, mine.get(name, missing), theirs.get(name, missing), symbols)
                for name in {**mine, **theirs}
            }
        return type(self)(scopes, namespaces, join(condition, self.output, other.output, symbols))


@dataclass(slots=True)
class LoopExits:
    """The states in which a loop, or one pass of it, ended early. They are joined at the end of the loop or pass."""

    depth: int
    """Number of conditions around the loop."""
    continued: list[State] = field(default_factory=list)
    """The states that left the pass with `continue`."""
    broken: list[State] = field(default_factory=list)
    """The states that left the loop with `break`."""
    conditions: list[Condition] = field(default_factory=list)
    """The conditions under which these states left."""
