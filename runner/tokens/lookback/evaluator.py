"""Evaluates the expressions of a template whose past is unknown, and goes both ways where it decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from typing import Any, cast

import jinja2
from jinja2 import nodes

from runner.tokens.lookback.expressions import Left, Raised, Stopped
from runner.tokens.lookback.filters import Filters
from runner.tokens.lookback.merging import Leaving, State, Symbols, merged
from runner.tokens.lookback.positions import positions
from runner.tokens.lookback.values import (
    UNTOLD,
    Condition,
    Function,
    GaveUp,
    Macro,
    Method,
    NamespaceOf,
    Text,
    Unknown,
    Value,
    concatenated,
    is_concrete,
    is_given,
)
from runner.tokens.template import environment

__all__ = ["Evaluator"]

STEPS = 40_000
"""Nodes that may be looked at; a large template with a few tools takes some thousands."""

MACROS_DEEP = 30
"""Calls of one macro within another that are followed where all it is given is known."""


class Evaluator(ABC):
    """The state of one render, and the values of expressions in it.

    Args:
        jinja: the environment of the template.
        names: what the template is given.
        symbols: numbers for given values.
        words: the value that stands for the last turn's words where those may be any; None where they are given.
        null_content: messages with calls may have no content.
    """

    def __init__(
        self,
        jinja: jinja2.Environment,
        names: dict[str, Value],
        symbols: Symbols,
        *,
        words: Text | None = None,
        null_content: bool = False,
    ) -> None:
        self.refuses = False
        """Whether the past decides that the template raises."""
        self._symbols = symbols
        self._operations = Filters(jinja, symbols, words)
        self._state = State([{**_FUNCTIONS, **names}, {}])
        self._conditions: list[Condition] = []
        self._steps = 0
        self._calling: list[nodes.Macro] = []
        self._leaving: list[Leaving] = []
        self._null_content = null_content
        self._namespaces = 0

    @abstractmethod
    def _written_by(self, body: Sequence[nodes.Node]) -> Value:
        """What statements write, kept from the output."""

    def _step(self) -> None:
        self._steps += 1
        if self._steps > STEPS:
            raise GaveUp("too many steps")

    # --- two ways

    def _either(self, condition: Condition, one: Callable[[], Value], other: Callable[[], Value]) -> Value:
        """The value and the state after one of two, by a condition that is not known; `Stopped` if neither goes on."""
        # Each way starts from the same state. While one is gone, the condition tells who decided, if it raises.
        before, ends = self._state, []
        self._conditions.append(condition)
        try:
            for way in (one, other):
                self._state = before.copy()
                try:
                    ends.append((way(), self._state))
                except Stopped as stopped:
                    self._note(stopped, condition)
        finally:
            self._conditions.pop()
        if not ends:
            raise Left("neither way goes on")
        if len(ends) == 1:
            value, self._state = ends[0]
            return value
        (first, one_state), (second, other_state) = ends
        self._state = one_state.merged(condition, other_state, self._symbols)
        return merged(condition, first, second, self._symbols)

    def _by_truth(self, value: Value, one: Callable[[], Value], other: Callable[[], Value]) -> Value:
        truth = self._operations.truth(value)
        if isinstance(truth, bool):
            return one() if truth else other()
        return self._either(truth, one, other)

    def _note(self, stopped: Stopped, condition: Condition) -> None:
        unknown = any(isinstance(each, Unknown) for each in (*self._conditions, condition))
        self.refuses = self.refuses or (isinstance(stopped, Raised) and unknown)

    # --- expressions

    def _value(self, node: nodes.Node) -> Value:
        self._step()
        value = getattr(self, "_value_of_" + type(node).__name__.lower(), None)
        if value is not None:
            return cast("Value", value(node))
        if type(node) in _SIGNS:
            return self._operations.binary(_SIGNS[type(node)], self._value(node.left), self._value(node.right))  # type: ignore[attr-defined]  # all of these have both
        raise GaveUp(f"{type(node).__name__} is not followed")

    def _value_of_const(self, node: nodes.Const) -> Value:
        return node.value

    def _value_of_templatedata(self, node: nodes.TemplateData) -> Value:
        return node.data

    def _value_of_name(self, node: nodes.Name) -> Value:
        value = self._state.lookup(node.name)
        if node.name in _OF_JINJA and isinstance(value, jinja2.Undefined):
            raise GaveUp(f"{node.name} is jinja's own")
        if value is UNTOLD:
            raise GaveUp(f"{node.name} is one of two macros or namespaces, or none")
        return value

    def _value_of_list(self, node: nodes.List) -> Value:
        return [self._value(item) for item in node.items]

    def _value_of_tuple(self, node: nodes.Tuple) -> Value:
        return tuple(self._value(item) for item in node.items)

    def _value_of_dict(self, node: nodes.Dict) -> Value:
        pairs = [(self._value(pair.key), self._value(pair.value)) for pair in node.items]
        if not all(is_concrete(key) for key, _ in pairs):
            return self._operations.of("dict", pairs)
        return dict(pairs)

    def _value_of_getattr(self, node: nodes.Getattr) -> Value:
        owner = self._value(node.node)
        if isinstance(owner, NamespaceOf):
            return self._state.namespaces[owner.number].get(node.attr, jinja2.Undefined(name=node.attr))
        return self._operations.attribute(owner, node.attr)

    def _value_of_getitem(self, node: nodes.Getitem) -> Value:
        owner = self._value(node.node)
        if isinstance(node.arg, nodes.Slice):
            bounds = (node.arg.start, node.arg.stop, node.arg.step)
            return self._operations.slice(owner, *(None if bound is None else self._value(bound) for bound in bounds))
        key = self._value(node.arg)
        if isinstance(owner, NamespaceOf):
            raise GaveUp("a namespace with a subscript")
        return self._operations.item(owner, key)

    def _value_of_concat(self, node: nodes.Concat) -> Value:
        written = [self._operations.written(self._value(part)) for part in node.nodes]
        return reduce(concatenated, written, "")

    def _value_of_compare(self, node: nodes.Compare) -> Value:
        return self._compared(self._value(node.expr), node.ops)

    def _compared(self, one: Value, operands: Sequence[nodes.Operand]) -> Value:
        """A chain of comparisons, which ends at the first that does not hold."""
        operand, *rest = operands
        other = self._value(operand.expr)
        found = self._operations.compared(operand.op, one, other)
        return self._by_truth(found, lambda: self._compared(other, rest), lambda: found) if rest else found

    def _value_of_not(self, node: nodes.Not) -> Value:
        return self._operations.negated(self._value(node.node))

    def _value_of_neg(self, node: nodes.Neg) -> Value:
        return self._operations.binary("-", 0, self._value(node.node))

    def _value_of_and(self, node: nodes.And) -> Value:
        left = self._value(node.left)
        return self._by_truth(left, lambda: self._value(node.right), lambda: left)

    def _value_of_or(self, node: nodes.Or) -> Value:
        left = self._value(node.left)
        return self._by_truth(left, lambda: left, lambda: self._value(node.right))

    def _value_of_condexpr(self, node: nodes.CondExpr) -> Value:
        def otherwise() -> Value:
            return jinja2.Undefined() if node.expr2 is None else self._value(node.expr2)

        return self._by_truth(self._value(node.test), lambda: self._value(node.expr1), otherwise)

    def _value_of_test(self, node: nodes.Test) -> Value:
        return self._operations.tested(node.name, self._value(node.node), [self._value(arg) for arg in node.args])

    def _value_of_filter(self, node: nodes.Filter) -> Value:
        if node.name in _LAZY:
            raise GaveUp("a generator that is kept, which is true and can be read once")
        return self._filtered(node)

    def _filtered(self, node: nodes.Filter) -> Value:
        """The value of a filter that something reads at once."""
        if node.node is None:
            raise GaveUp("a filter of nothing")
        lazy = isinstance(node.node, nodes.Filter) and node.node.name in _LAZY and node.name in _READS
        return self._filter(node, self._read(node.node) if lazy else self._value(node.node))

    def _read(self, node: nodes.Node) -> Value:
        """The value of an expression whose elements are read at once, and nothing else of it."""
        return self._filtered(node) if isinstance(node, nodes.Filter) else self._value(node)

    def _filter(self, node: nodes.Filter, value: Value) -> Value:
        if isinstance(node.node, nodes.Filter):
            value = self._filter(node.node, value) if node.node.node is None else value
        arguments, keywords = self._arguments(node)
        return self._operations.filtered(node.name, value, arguments, keywords)

    def _arguments(self, node: Any) -> tuple[list[Value], dict[str, Value]]:
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise GaveUp("arguments that are not spelt out")
        return [self._value(each) for each in node.args], {each.key: self._value(each.value) for each in node.kwargs}

    # --- calls

    def _value_of_call(self, node: nodes.Call) -> Value:
        callee = self._value(node.node)
        if callee is _RAISE:
            raise Raised("the template raised")
        arguments, keywords = self._arguments(node)
        if isinstance(callee, Macro):
            return self._call_macro(callee, arguments, keywords)
        if isinstance(callee, Method) and not keywords:
            return self._operations.method(callee.owner, callee.name, arguments)
        if callee is range and not keywords:
            found = positions(arguments)
            if found is not None:
                return found
        if callee is _OTHER:
            raise GaveUp("a function that keeps a state of its own")
        if callee is _NAMESPACE:
            return self._new_namespace(arguments, keywords)
        everything = (*arguments, *keywords.values())
        if isinstance(callee, jinja2.Undefined):
            raise Raised("what is called is undefined")
        if is_concrete(callee) and all(map(is_concrete, everything)) and callable(callee):
            return self._operations.concrete(lambda: callee(*arguments, **keywords))
        return self._operations.of("call", callee, *everything, *keywords)

    def _new_namespace(self, arguments: Sequence[Value], keywords: dict[str, Value]) -> NamespaceOf:
        if not all(isinstance(each, dict) for each in arguments):
            raise GaveUp("a namespace of what is not known")
        self._namespaces += 1
        names: dict[str, Value] = {}
        for each in (*arguments, keywords):
            names.update(each)
        self._state.namespaces[self._namespaces] = names
        return NamespaceOf(self._namespaces)

    def _unfollowed(self, node: nodes.Macro, arguments: Sequence[Value]) -> Value:
        """What a macro writes that calls itself: anything, as long as that is all it does."""
        if not _keeps_to_itself(node):
            raise GaveUp("a macro that calls itself and more")
        self.refuses = self.refuses or not all(map(is_given, arguments))
        return Unknown(ends=True, text=True)

    def _call_macro(self, macro: Macro, arguments: Sequence[Value], keywords: dict[str, Value]) -> Value:
        node = macro.node
        names = [argument.name for argument in node.args]
        if len(arguments) > len(names):
            raise GaveUp("a macro that takes more than it names")
        within = self._calling.count(node)
        if within >= MACROS_DEEP or (within and not all(map(is_concrete, arguments))):
            return self._unfollowed(node, arguments)
        self._calling.append(node)
        # A macro sees the scopes that it was defined in, and none of its caller's.
        hidden, self._state.scopes[macro.depth :] = self._state.scopes[macro.depth :], []
        given = {**dict(zip(names, arguments, strict=False)), **keywords}
        self._state.scopes.append({})
        try:
            without = names[len(names) - len(node.defaults) :]
            for name in names:
                if name in given:
                    self._state.scopes[-1][name] = given[name]
                elif name in without:
                    self._state.scopes[-1][name] = self._value(node.defaults[without.index(name)])
                else:
                    self._state.scopes[-1][name] = jinja2.Undefined(name=name)
            return self._written_by(node.body)
        finally:
            self._calling.pop()
            self._state.scopes[macro.depth :] = hidden


_LAZY = frozenset(
    {"map", "select", "reject", "selectattr", "rejectattr", "batch", "slice", "unique", "items", "reverse"}
)
"""Filters that give generators."""

_READS = _LAZY | {"list", "first", "join", "sort", "sum", "unique", "min", "max"}
"""Filters that read what they are given once, from its beginning."""

_SIGNS: dict[type[nodes.Node], str] = {
    nodes.Add: "+",
    nodes.Sub: "-",
    nodes.Mul: "*",
    nodes.Div: "/",
    nodes.FloorDiv: "//",
    nodes.Mod: "%",
    nodes.Pow: "**",
}


_NAMESPACE, _RAISE, _OTHER = Function(), Function(), Function()
_FUNCTIONS: dict[str, Value] = {
    **dict.fromkeys(environment().globals, _OTHER),
    "namespace": _NAMESPACE,
    "raise_exception": _RAISE,
    "range": range,
    "dict": dict,
}
_OF_JINJA = frozenset({"self", "kwargs", "varargs", "caller"})
"""Names that jinja gives a meaning where nobody has assigned them."""


@lru_cache(maxsize=256)
def _keeps_to_itself(macro: nodes.Macro) -> bool:
    """It calls itself and jinja's functions only, and sets attributes of namespaces only that it makes itself."""
    stored: dict[str, list[nodes.Node]] = {}
    for each in macro.find_all(nodes.Assign):
        for name in each.target.find_all(nodes.Name):
            stored.setdefault(name.name, []).append(each.node)
        if isinstance(each.target, nodes.Name):
            stored.setdefault(each.target.name, []).append(each.node)
    own = {name for name, values in stored.items() if all(map(_makes_a_namespace, values))}
    called = (each.node for each in macro.find_all(nodes.Call))
    named = {node.name for node in called if isinstance(node, nodes.Name)}
    return named <= {macro.name, *_FUNCTIONS} and all(each.name in own for each in macro.find_all(nodes.NSRef))


def _makes_a_namespace(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == "namespace"
