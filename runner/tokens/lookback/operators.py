"""Transfer functions of operators, tests, attributes and items; jinja's own result if all operands are known."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import SandboxedEnvironment

from runner.tokens.lookback.join import Symbols
from runner.tokens.lookback.positions import (
    base_of,
    compared_with_least,
    item_of_gapped,
    moved,
    slice_of_gapped,
)
from runner.tokens.lookback.values import (
    END,
    GappedList,
    LastArguments,
    Loop,
    Method,
    NotFollowed,
    PastMessage,
    Position,
    SplitText,
    Symbol,
    Text,
    Unknown,
    Value,
    after_end,
    concatenated,
    has_effects,
    is_concrete,
    is_independent,
    is_text,
    may_hold_end,
)

__all__ = ["LastTurnText", "Operators", "RenderRaised", "RenderStopped"]


class RenderStopped(Exception):
    """A render that does not continue after this point."""


class RenderRaised(RenderStopped):
    """A render in which the template raised."""


@dataclass(frozen=True, slots=True)
class LastTurnText:
    """The last turn's words, if they are not the sentinel."""

    text: Text
    """The value of the words in the template."""
    nonempty: bool | None
    """True if the words have characters, including white space; False if they are empty; None if it is not known."""
    typed: bool = True
    """True if the words are certainly text. The argument of a call may also be a number, an object, ..."""


class Operators:
    """The transfer functions of operators, tests, attributes, items and slices.

    Args:
        environment: the environment of the template.
        symbols: the source of symbols for results.
        words: the last turn's words; None if they are the sentinel.
    """

    def __init__(self, environment: jinja2.Environment, symbols: Symbols, words: LastTurnText | None = None) -> None:
        self._environment = environment
        self._context = environment.from_string("").new_context()
        self._eval_context = nodes.EvalContext(environment)
        self._symbols = symbols
        self._words = words

    # --- in general

    def of(self, operation: str, *operands: Value, text: bool = False) -> Symbol | Unknown:
        """Return a symbol for an operation that is not modelled; `Unknown` if an operand is not independent.

        Raises:
            NotFollowed: an operand is a macro, a namespace or a function, whose effects would be lost.
        """
        if any(map(has_effects, operands)):
            raise NotFollowed(f"{operation} of a value with effects")
        if all(map(is_independent, operands)):
            return self._symbols.of(operation, *operands, text=text)
        return Unknown(may_end=any(map(may_hold_end, operands)), text=text)

    def concrete(self, compute: Callable[[], Value]) -> Value:
        """Return the result of `compute`, which calls jinja.

        Raises:
            RenderRaised: jinja raises.
        """
        try:
            return compute()
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise RenderRaised(str(error)) from error

    def truth(self, value: Value) -> bool | Symbol | Unknown:
        """Return the truth of a value: True or False if known, else the condition."""
        match value:
            case Text():
                return self._truth_of_text(value)
            case Unknown() | Symbol():
                return True if value.nonempty else value
            case GappedList():
                return True if value.least_length else Unknown()
            case LastArguments() if self._words is not None and not self._words.nonempty:
                return self.of("truth", value)
            case Position():
                return True if value.least > 0 else Unknown()
        return bool(value)

    def _truth_of_text(self, value: Text) -> bool | Symbol | Unknown:
        # The sentinel ends the words, so a text that contains the end of the words is not empty.
        if value.has_end and self._words is None:
            return True
        if self._words is not None and value is self._words.text and self._words.nonempty is not None:
            return self._words.nonempty
        if any(isinstance(part, str) or getattr(part, "nonempty", False) for part in value.parts):
            return True
        return self.of("truth", value)

    def _untyped(self, value: Value) -> bool:
        """Return True if the value is the last argument of a call, and its type is not known."""
        # The parts are compared, since a join of two such values is a third value.
        words = self._words
        return words is not None and not words.typed and isinstance(value, Text) and value.parts == words.text.parts

    def negated(self, value: Value) -> Value:
        truth = self.truth(value)
        return self.of("not", truth) if isinstance(truth, Unknown | Symbol) else not truth

    def written(self, value: Value) -> Value:
        """Return a value as text, as in the output."""
        if isinstance(value, str | Text):
            return value
        if isinstance(value, Symbol) and value.base is None:
            return value if value.text else self._symbols.of("str", value, text=True)
        if is_concrete(value):
            return str(value)
        return self.of("str", value, text=True)

    # --- operators

    def binary(self, sign: str, one: Value, other: Value) -> Value:
        if is_concrete(one) and is_concrete(other):
            return self.concrete(lambda: SandboxedEnvironment.default_binop_table[sign](one, other))
        if sign == "+" and (is_text(one) or is_text(other)):
            return concatenated(_as_text(one), _as_text(other))
        position = moved(sign, one, other)
        if position is not None:
            return position
        if sign == "+" and isinstance(one, list) and isinstance(other, list):
            return [*one, *other]
        return self.of(sign, one, other, text=sign == "%" and is_text(one))

    def compared(self, sign: str, one: Value, other: Value) -> Value:
        if sign == "notin":
            return self.negated(self.compared("in", one, other))
        if is_concrete(one) and is_concrete(other):
            return self.concrete(lambda: _COMPARISONS[sign](one, other))
        if sign == "in":
            return self._contained(one, other)
        if self._untyped(one) or self._untyped(other):
            return self.of(sign, one, other)
        if sign in ("eq", "ne"):
            equal = self._equal(one, other)
            if equal is not None:
                return equal if sign == "eq" else not equal
        positions = base_of(one) is not None or base_of(other) is not None
        return self._compared_positions(sign, one, other) if positions else self.of(sign, one, other)

    def _equal(self, one: Value, other: Value) -> bool | None:
        """Return True if two values are certainly equal, False if they certainly differ, and None otherwise."""
        if isinstance(one, Symbol) and one == other:
            return True
        for value, against in ((one, other), (other, one)):
            if is_text(value) and is_concrete(against) and not isinstance(against, str):
                return False
            if against == "" and is_text(value) and isinstance(truth := self.truth(value), bool):
                return not truth
        return None

    def _compared_positions(self, sign: str, one: Value, other: Value) -> Value:
        base = base_of(one)
        if base is not None and base is base_of(other):
            if isinstance(one, Position) and isinstance(other, Position):
                return _COMPARISONS[sign](one.offset, other.offset)
            return self._symbols.of(sign, one, other)
        if isinstance(one, Position) and type(other) is int:
            return compared_with_least(sign, one.least, other)
        if isinstance(other, Position) and type(one) is int:
            return compared_with_least(_MIRRORED[sign], other.least, one)
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
        """Return `value.name`, as jinja looks it up."""
        if is_concrete(value):
            return self.concrete(lambda: self._environment.getattr(value, name))
        if isinstance(value, Loop):
            return value.attributes.get(name, Unknown(may_end=True))
        if isinstance(value, dict) and name in value and not hasattr(dict, name):
            return value[name]
        if isinstance(value, PastMessage) and not hasattr(dict, name):
            return value.get(name)
        if isinstance(value, Unknown | Symbol) and not value.text:
            return self.of("attribute", value, name)
        kind = _python_type(value)
        if kind is None or (isinstance(value, LastArguments) and not hasattr(dict, name)):
            raise NotFollowed(f"an attribute of {type(value).__name__}")
        return Method(value, name) if hasattr(kind, name) else jinja2.Undefined(name=name)

    def item(self, value: Value, key: Value) -> Value:
        if is_concrete(value) and is_concrete(key):
            return self.concrete(lambda: self._environment.getitem(value, key))
        match value:
            case GappedList():
                return item_of_gapped(value, key)
            case PastMessage():
                return value.get(key) if isinstance(key, str) else Unknown()
            case dict() if is_concrete(key) and all(map(is_concrete, value)):
                return value[key] if key in value else self.attribute(value, str(key))
            case list() | tuple() if type(key) is int:
                return value[key] if -len(value) <= key < len(value) else jinja2.Undefined(name=str(key))
            case Loop() if isinstance(key, str):
                return self.attribute(value, key)
            case LastArguments() if key == value.name:
                return value.value
            case SplitText() if key == -1:
                return value.last
        if is_text(value) and isinstance(key, str):
            return self.attribute(value, key)
        return self.of("item", value, key, text=isinstance(value, SplitText) or (is_text(value) and type(key) is int))

    def slice(self, value: Value, start: Value, stop: Value, step: Value) -> Value:
        known = all(map(is_concrete, (start, stop, step)))
        if known and (is_concrete(value) or isinstance(value, list | tuple)):
            return self.concrete(lambda: value[slice(start, stop, step)])
        if isinstance(value, GappedList):
            return slice_of_gapped(value, start, stop, step)
        from_its_beginning = (start, step) == (None, None) and type(stop) is int and stop < 0
        if isinstance(value, Text) and value.has_end and from_its_beginning:
            return self._shortened(value, stop)
        return self.of("slice", value, start, stop, step, text=is_text(value))

    def _shortened(self, value: Text, stop: int) -> Value:
        """Return `value`, a text with the end of the turn's words, without its last `-stop` characters."""
        rest, before = value.rest, None if value.before is None else (stop, value.before)
        if isinstance(rest, str) and len(rest) >= -stop:
            return after_end(rest[:stop], before)
        if stop == -1 and is_independent(rest) and self.truth(rest) is True:
            return Text((END, self.of("slice", rest, stop, text=True)), before)
        return Unknown(may_end=True, text=True)

    # --- tests

    def tested(self, name: str, value: Value, arguments: Sequence[Value]) -> Value:
        if name not in self._environment.tests:
            raise RenderRaised(f"no test named {name!r}")
        if is_concrete(value) and all(map(is_concrete, arguments)):
            return self.concrete(lambda: self._environment.call_test(name, value, list(arguments), None, self._context))
        if name in _COMPARED_BY:
            return self.compared(_COMPARED_BY[name], value, *arguments)
        if self._untyped(value):
            return self.of("is " + name, value, *arguments)
        if not isinstance(value, Unknown | Symbol) or value.text:
            if name in ("defined", "undefined"):
                return name == "defined"
            kind = _python_type(value)
            if kind is not None and name in _TESTS_OF_TYPES:
                # The result of jinja for an empty value of a type applies to all values of the type.
                return self._environment.call_test(name, kind())
        return self.of("is " + name, value, *arguments)


def _as_text(value: Value) -> Value:
    """Return an operand of "+" as a text. At least one operand is a text, so jinja raises if the other one is not."""
    if is_text(value) or (isinstance(value, Symbol) and value.base is None):
        return value
    return Unknown(may_end=may_hold_end(value), text=True)


def _python_type(value: Value) -> type | None:
    """Return the Python type that a value has in a render; None if it is not known."""
    return str if is_text(value) else _PYTHON_TYPES.get(type(value))


_PYTHON_TYPES: Mapping[type, type] = {
    dict: dict,
    list: list,
    tuple: tuple,
    PastMessage: dict,
    LastArguments: dict,
    GappedList: list,
    SplitText: list,
    Position: int,
}
_TESTS_OF_TYPES = frozenset(
    {"string", "mapping", "iterable", "sequence", "none", "number", "integer", "boolean", "callable"}
)
_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda one, other: one in other,
}
_MIRRORED = {"eq": "eq", "ne": "ne", "lt": "gt", "gt": "lt", "lteq": "gteq", "gteq": "lteq"}
_COMPARED_BY = {
    **dict.fromkeys(("eq", "==", "equalto"), "eq"),
    **dict.fromkeys(("ne", "!="), "ne"),
    "in": "in",
    "gt": "gt",
    "lt": "lt",
}
"""The comparison that each of these tests of jinja makes, by the test's name."""
