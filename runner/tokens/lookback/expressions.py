"""Expressions of a template whose past is unknown: what jinja computes where all is known, else what can be said."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes

from runner.tokens.lookback.merging import Symbols, root_of
from runner.tokens.lookback.positions import item_of_past, moved, slice_of_past, told_by_least
from runner.tokens.lookback.values import (
    END,
    Arguments,
    GaveUp,
    Given,
    Loop,
    Macro,
    Method,
    NamespaceOf,
    Past,
    PastMessage,
    Position,
    Split,
    Text,
    Unknown,
    Value,
    acts,
    concatenated,
    holds_end,
    is_concrete,
    is_given,
    is_text,
    joined,
)

__all__ = ["Left", "Operations", "Raised", "Stopped"]


class Stopped(Exception):
    """The render does not go on from here."""


class Raised(Stopped):
    """The template raised."""


class Left(Stopped):
    """It left a loop, or a pass through one."""


class Operations:
    """What operators, tests, filters and methods make of values."""

    def __init__(self, environment: jinja2.Environment, symbols: Symbols, words: Text | None = None) -> None:
        self._environment = environment
        self._context = environment.from_string("").new_context()
        self._eval_context = nodes.EvalContext(environment)
        self._symbols = symbols
        self._words = words

    # --- in general

    def of(self, operation: str, *operands: Value, text: bool = False) -> Given | Unknown:
        """A value of which nothing is known but what it is made of.

        Raises:
            GaveUp: that is a macro, a namespace or a function, whose effects would be lost.
        """
        if any(map(acts, operands)):
            raise GaveUp(f"{operation} of what acts")
        if all(map(is_given, operands)):
            return self._symbols.of(operation, *operands, text=text)
        return Unknown(ends=any(map(holds_end, operands)), text=text)

    def concrete(self, compute: Callable[[], Value]) -> Value:
        """What jinja computes; `Raised` where it raises."""
        try:
            return compute()
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise Raised(str(error)) from error

    def truth(self, value: Value) -> bool | Given | Unknown:
        """Whether a value counts as true."""
        if isinstance(value, Text):
            return self._truth_of_text(value)
        if isinstance(value, Unknown | Given):
            return True if value.filled else value
        if isinstance(value, Past):
            return True if value.items or value.least else Unknown()
        if isinstance(value, Position):
            return True if value.least > 0 else Unknown()
        return bool(value)

    def _truth_of_text(self, value: Text) -> bool | Given | Unknown:
        # The sentinel ends the words, so a text that they end in is not empty.
        if value.has_end and (self._words is None or value is self._words):
            return True
        if any(isinstance(part, str) or getattr(part, "filled", False) for part in value.parts):
            return True
        return self.of("truth", value)

    def negated(self, value: Value) -> Value:
        truth = self.truth(value)
        return self.of("not", truth) if isinstance(truth, Unknown | Given) else not truth

    def written(self, value: Value) -> Value:
        """A value as text, as an output writes it."""
        if isinstance(value, str | Text):
            return value
        if isinstance(value, Given) and value.root is None:
            return value if value.text else self._symbols.of("str", value, text=True)
        if is_concrete(value):
            return str(value)
        return self.of("str", value, text=True)

    # --- operators

    def binary(self, sign: str, one: Value, other: Value) -> Value:
        if is_concrete(one) and is_concrete(other):
            return self.concrete(lambda: _OPERATORS[sign](one, other))
        if sign == "+" and (is_text(one) or is_text(other)):
            return concatenated(_as_text(one), _as_text(other))
        if sign in "+-":
            position = moved(sign, one, other)
            if position is not None:
                return position
            if isinstance(one, list) and isinstance(other, list):
                return [*one, *other]
        return self.of(sign, one, other, text=sign == "%" and is_text(one))

    def compared(self, sign: str, one: Value, other: Value) -> Value:
        if is_concrete(one) and is_concrete(other):
            return self.concrete(lambda: _COMPARISONS[sign](one, other))
        if sign in ("in", "notin"):
            found = self._contained(one, other)
            return found if sign == "in" else self.negated(found)
        if sign in ("eq", "ne"):
            equal = self._equal(one, other)
            if isinstance(equal, bool):
                return equal if sign == "eq" else not equal
        positions = root_of(one) is not None or root_of(other) is not None
        return self._compared_positions(sign, one, other) if positions else self.of(sign, one, other)

    def _equal(self, one: Value, other: Value) -> bool | None:
        if isinstance(one, Given) and one == other:
            return True
        for value, against in ((one, other), (other, one)):
            if is_text(value) and is_concrete(against) and not isinstance(against, str):
                return False
            if against == "" and self.truth(value) is True and is_text(value):
                return False
        return None

    def _compared_positions(self, sign: str, one: Value, other: Value) -> Value:
        root = root_of(one)
        if root is not None and root is root_of(other):
            if isinstance(one, Position) and isinstance(other, Position):
                return _COMPARISONS[sign](one.offset, other.offset)
            return self._symbols.of(sign, one, other)
        if isinstance(one, Position) and type(other) is int:
            return told_by_least(sign, one.least, other)
        if isinstance(other, Position) and type(one) is int:
            return told_by_least(_MIRRORED[sign], other.least, one)
        return Unknown()

    def _contained(self, item: Value, container: Value) -> Value:
        if isinstance(container, PastMessage):
            return container.has(item) if isinstance(item, str) else Unknown()
        if isinstance(container, dict) and is_concrete(item) and all(map(is_concrete, container)):
            return item in container
        if isinstance(container, list | tuple):
            found = [self._equal(item, each) for each in container]
            known = [item == each for each in container if is_concrete(item) and is_concrete(each)]
            if True in found or True in known:
                return True
            if len(known) == len(container):
                return False
        return self.of("in", item, container)

    # --- parts of values

    def attribute(self, value: Value, name: str) -> Value:
        """`value.name`, as jinja looks it up."""
        if is_concrete(value):
            return self.concrete(lambda: self._environment.getattr(value, name))
        if isinstance(value, Loop):
            return value.values.get(name, Unknown(ends=True))
        if isinstance(value, dict) and name in value and not hasattr(dict, name):
            return value[name]
        if isinstance(value, PastMessage) and not hasattr(dict, name):
            return value.get(name)
        if isinstance(value, Unknown | Given) and not value.text:
            return self.of("attribute", value, name)
        kind = str if is_text(value) else _PYTHON.get(type(value))
        if kind is None or (isinstance(value, Arguments) and not hasattr(dict, name)):
            raise GaveUp(f"an attribute of {type(value).__name__}")
        return Method(value, name) if hasattr(kind, name) else jinja2.Undefined(name=name)

    def item(self, value: Value, key: Value) -> Value:
        """`value[key]`."""
        if is_concrete(value) and is_concrete(key):
            return self.concrete(lambda: self._environment.getitem(value, key))
        if isinstance(value, Past):
            return item_of_past(value, key)
        if isinstance(value, PastMessage):
            return value.get(key) if isinstance(key, str) else Unknown()
        if isinstance(value, dict) and is_concrete(key) and all(map(is_concrete, value)):
            return value[key] if key in value else self.attribute(value, str(key))
        if isinstance(value, list | tuple) and type(key) is int:
            return value[key] if -len(value) <= key < len(value) else jinja2.Undefined(name=str(key))
        if isinstance(value, Loop) and isinstance(key, str):
            return self.attribute(value, key)
        if isinstance(value, Arguments) and key == value.name:
            return value.value
        if isinstance(value, Split) and key == -1:
            return value.last
        if is_text(value) and isinstance(key, str):
            return self.attribute(value, key)
        if is_text(value) and type(key) is int:
            return self.of("item", value, key, text=True)
        return self.of("item", value, key, text=isinstance(value, Split))

    def slice(self, value: Value, start: Value, stop: Value, step: Value) -> Value:
        if all(map(is_concrete, (value, start, stop, step))):
            return self.concrete(lambda: value[slice(start, stop, step)])
        if isinstance(value, Past):
            return slice_of_past(value, start, stop, step)
        if isinstance(value, list | tuple) and all(map(is_concrete, (start, stop, step))):
            return self.concrete(lambda: value[slice(start, stop, step)])
        if (
            isinstance(value, Text)
            and value.has_end
            and (start, step) == (None, None)
            and type(stop) is int
            and stop < 0
        ):
            return self._shortened(value, stop)
        return self.of("slice", value, start, stop, step, text=is_text(value))

    def _shortened(self, value: Text, stop: int) -> Value:
        """Text in which the turn's words end, less its last characters."""
        rest, head = value.rest, None if value.head is None else (stop, value.head)
        if isinstance(rest, str) and len(rest) >= -stop:
            return joined((Text((END,), head), rest[:stop]))
        if stop == -1 and is_given(rest) and self.truth(rest) is True:
            return Text((END, self.of("slice", rest, stop, text=True)), head)
        return Unknown(ends=True, text=True)

    # --- tests

    def tested(self, name: str, value: Value, arguments: Sequence[Value]) -> Value:
        if is_concrete(value) and all(map(is_concrete, arguments)):
            return self.concrete(lambda: self._environment.call_test(name, value, list(arguments), None, self._context))
        if name in _COMPARED_BY:
            return self.compared(_COMPARED_BY[name], value, *arguments)
        known = _known_kind(name, value)
        return self.of("is " + name, value, *arguments) if known is None else known


def _as_text(value: Value) -> Value:
    """What is added to a text is one too: anything else raises."""
    if is_text(value) or (isinstance(value, Given) and value.root is None):
        return value
    return Unknown(ends=holds_end(value), text=True)


def _known_kind(name: str, value: Value) -> bool | None:
    """Whether a value is of a kind, as far as that can be told."""
    if name in ("defined", "undefined") and not (isinstance(value, Unknown | Given) and not value.text):
        return name == "defined"
    if isinstance(value, Unknown | Given) and not value.text:
        return None
    kinds = _KINDS_OF_TEXT if is_text(value) else _KINDS.get(type(value))
    return None if kinds is None or name not in _KINDS_KNOWN else name in kinds


_KINDS_KNOWN = frozenset(
    {"string", "mapping", "iterable", "sequence", "none", "number", "integer", "boolean", "callable"}
)
_KINDS_OF_TEXT = frozenset({"string", "iterable", "sequence"})
_MAPPING, _LISTED = frozenset({"mapping", "iterable", "sequence"}), frozenset({"iterable", "sequence"})
_PYTHON: Mapping[type, type] = {
    **{kind: kind for kind in (dict, list, tuple)},
    PastMessage: dict,
    Arguments: dict,
    Past: list,
    Split: list,
    Position: int,
}
_KINDS: Mapping[type, frozenset[str]] = {
    dict: _MAPPING,
    PastMessage: _MAPPING,
    Arguments: _MAPPING,
    list: _LISTED,
    tuple: _LISTED,
    Past: _LISTED,
    Position: frozenset({"number", "integer"}),
    NamespaceOf: frozenset(),
    Macro: frozenset({"callable"}),
}

_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}
_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda one, other: one in other,
    "notin": lambda one, other: one not in other,
}
_MIRRORED = {"eq": "eq", "ne": "ne", "lt": "gt", "gt": "lt", "lteq": "gteq", "gteq": "lteq"}
_COMPARED_BY = {
    **dict.fromkeys(("eq", "==", "equalto"), "eq"),
    **dict.fromkeys(("ne", "!="), "ne"),
    "in": "in",
    "gt": "gt",
    "lt": "lt",
}
