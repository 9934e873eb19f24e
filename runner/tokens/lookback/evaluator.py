"""Evaluation of a template's expressions over abstract values.

If a condition is unknown, both branches are evaluated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import safe_range
from jinja2.visitor import NodeVisitor

from runner.tokens.lookback.filters import TransferFunctions
from runner.tokens.lookback.join import LoopExits, State, Symbols, join
from runner.tokens.lookback.operators import LastTurnText, RenderRaised, RenderStopped
from runner.tokens.lookback.positions import range_of
from runner.tokens.lookback.values import (
    AMBIGUOUS,
    Condition,
    Function,
    Macro,
    Method,
    NamespaceOf,
    NotFollowed,
    Unknown,
    Value,
    concatenated,
    is_concrete,
)
from runner.tokens.template import environment

__all__ = ["FUNCTIONS", "Evaluator"]

MAX_STEPS = 40_000
"""Maximum number of visited nodes and passes of loops. A large template with a few tools needs some thousands."""


class Evaluator(NodeVisitor, ABC):
    """The state of one render, in which expressions are evaluated: `visit` of an expression returns its value.

    Args:
        jinja: the environment of the template.
        names: the values of the template's variables, by name.
        symbols: the source of symbols.
        words: the last turn's words; None if they are the sentinel.
        null_content: True if the content of messages with calls may be null.
    """

    def __init__(
        self,
        jinja: jinja2.Environment,
        names: dict[str, Value],
        symbols: Symbols,
        *,
        words: LastTurnText | None = None,
        null_content: bool = False,
    ) -> None:
        self.refuses = False
        """True if earlier messages can make the template raise."""
        self._symbols = symbols
        self._transfer = TransferFunctions(jinja, symbols, words)
        self._state = State([{**FUNCTIONS, **names}, {}])
        self._conditions: list[Condition] = []
        self._steps = 0
        self._null_content = null_content
        self._exits: list[LoopExits] = []
        self._macros: list[nodes.Macro] = []
        self._namespaces = 0

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self._step()
        return super().visit(node, *args, **kwargs)

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        # In jinja's tree, `And` and `Or` are binary expressions too, but they have their own methods.
        if isinstance(node, nodes.BinExpr):
            return self._transfer.binary(node.operator, self.visit(node.left), self.visit(node.right))
        raise NotFollowed(f"{type(node).__name__} is not followed")

    def _step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise NotFollowed("too many steps")

    # --- branches

    def _both(self, condition: Condition, one: Callable[[], Value], other: Callable[[], Value]) -> Value:
        """Evaluate both branches of an unknown condition, and return the join of their values.

        Raises:
            RenderStopped: neither branch continues.
        """
        # Both branches start from the same state. If a branch raises, the condition decides whether the template
        # raises.
        before, ends = self._state, []
        self._conditions.append(condition)
        try:
            for branch in (one, other):
                self._state = before.copy()
                try:
                    ends.append((branch(), self._state))
                except RenderStopped as stopped:
                    self._note_refusal(stopped, condition)
        finally:
            self._conditions.pop()
        if not ends:
            raise RenderStopped("neither branch continues")
        if len(ends) == 1:
            value, self._state = ends[0]
            return value
        (first, one_state), (second, other_state) = ends
        self._state = one_state.join(condition, other_state, self._symbols)
        return join(condition, first, second, self._symbols)

    def _branch(self, value: Value, if_true: Callable[[], Value], if_false: Callable[[], Value]) -> Value:
        truth = self._transfer.truth(value)
        if isinstance(truth, bool):
            return if_true() if truth else if_false()
        return self._both(truth, if_true, if_false)

    def _note_refusal(self, stopped: RenderStopped, condition: Condition) -> None:
        unknown = any(isinstance(each, Unknown) for each in (*self._conditions, condition))
        self.refuses = self.refuses or (isinstance(stopped, RenderRaised) and unknown)

    # --- names and literals

    def visit_Const(self, node: nodes.Const) -> Value:
        return node.value

    def visit_TemplateData(self, node: nodes.TemplateData) -> Value:
        return node.data

    def visit_Name(self, node: nodes.Name) -> Value:
        value = self._state.lookup(node.name)
        if node.name in _JINJAS_OWN and isinstance(value, jinja2.Undefined):
            raise NotFollowed(f"{node.name} is jinja's own")
        if value is AMBIGUOUS:
            raise NotFollowed(f"{node.name} may be one of two macros or namespaces, or neither")
        return value

    def visit_List(self, node: nodes.List) -> Value:
        return [self.visit(item) for item in node.items]

    def visit_Tuple(self, node: nodes.Tuple) -> Value:
        return tuple(self.visit(item) for item in node.items)

    def visit_Dict(self, node: nodes.Dict) -> Value:
        pairs = [(self.visit(pair.key), self.visit(pair.value)) for pair in node.items]
        if not all(is_concrete(key) for key, _ in pairs):
            return self._transfer.of("dict", pairs)
        return dict(pairs)

    # --- operators

    def visit_Getattr(self, node: nodes.Getattr) -> Value:
        owner = self.visit(node.node)
        if isinstance(owner, NamespaceOf):
            return self._state.namespaces[owner.number].get(node.attr, jinja2.Undefined(name=node.attr))
        return self._transfer.attribute(owner, node.attr)

    def visit_Getitem(self, node: nodes.Getitem) -> Value:
        owner = self.visit(node.node)
        if isinstance(node.arg, nodes.Slice):
            bounds = (node.arg.start, node.arg.stop, node.arg.step)
            return self._transfer.slice(owner, *(None if bound is None else self.visit(bound) for bound in bounds))
        key = self.visit(node.arg)
        if isinstance(owner, NamespaceOf):
            raise NotFollowed("a namespace with a subscript")
        return self._transfer.item(owner, key)

    def visit_Concat(self, node: nodes.Concat) -> Value:
        return concatenated(*(self._transfer.written(self.visit(part)) for part in node.nodes))

    def visit_Compare(self, node: nodes.Compare) -> Value:
        return self._compared(self.visit(node.expr), node.ops)

    def _compared(self, one: Value, operands: Sequence[nodes.Operand]) -> Value:
        """Evaluate a chain of comparisons, which ends at the first false one."""
        operand, *rest = operands
        other = self.visit(operand.expr)
        found = self._transfer.compared(operand.op, one, other)
        return self._branch(found, lambda: self._compared(other, rest), lambda: found) if rest else found

    def visit_Not(self, node: nodes.Not) -> Value:
        return self._transfer.negated(self.visit(node.node))

    def visit_Neg(self, node: nodes.Neg) -> Value:
        return self._transfer.binary("-", 0, self.visit(node.node))

    def visit_And(self, node: nodes.And) -> Value:
        left = self.visit(node.left)
        return self._branch(left, lambda: self.visit(node.right), lambda: left)

    def visit_Or(self, node: nodes.Or) -> Value:
        left = self.visit(node.left)
        return self._branch(left, lambda: left, lambda: self.visit(node.right))

    def visit_CondExpr(self, node: nodes.CondExpr) -> Value:
        def otherwise() -> Value:
            return jinja2.Undefined() if node.expr2 is None else self.visit(node.expr2)

        return self._branch(self.visit(node.test), lambda: self.visit(node.expr1), otherwise)

    def visit_Test(self, node: nodes.Test) -> Value:
        return self._transfer.tested(node.name, self.visit(node.node), [self.visit(arg) for arg in node.args])

    # --- filters

    def visit_Filter(self, node: nodes.Filter) -> Value:
        if node.name in _LAZY:
            # The abstract value is a list. A generator differs from a list unless it is read at once: a generator is
            # always true, and can be read only once.
            raise NotFollowed("a generator that is not read at once")
        return self._filtered(node)

    def _filtered(self, node: nodes.Filter) -> Value:
        if node.node is None:
            raise NotFollowed("a filter without an operand")
        return self._filter(node, self._read(node.node) if node.name in _READERS else self.visit(node.node))

    def _read(self, node: nodes.Node) -> Value:
        """Return the value of an expression whose elements are read at once, so that it may be a generator."""
        return self._filtered(node) if isinstance(node, nodes.Filter) else self.visit(node)

    def _filter(self, node: nodes.Filter, value: Value) -> Value:
        arguments, keywords = self._arguments(node)
        return self._transfer.filtered(node.name, value, arguments, keywords)

    def _filter_block(self, node: nodes.Filter | None, value: Value) -> Value:
        """Apply the filters of a block to its output. The first filter has no operand."""
        if node is None:
            return value
        return self._filter(node, self._filter_block(node.node, value))  # type: ignore[arg-type]  # filters only

    def _arguments(self, node: Any) -> tuple[list[Value], dict[str, Value]]:
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise NotFollowed("arguments given by * or **")
        return [self.visit(each) for each in node.args], {each.key: self.visit(each.value) for each in node.kwargs}

    # --- calls

    @abstractmethod
    def _call_macro(self, macro: Macro, arguments: Sequence[Value], keywords: dict[str, Value]) -> Value:
        """Return the output of a macro."""

    def visit_Call(self, node: nodes.Call) -> Value:
        callee = self.visit(node.node)
        if callee is _RAISE:
            raise RenderRaised("the template raised")
        arguments, keywords = self._arguments(node)
        if isinstance(callee, Macro):
            return self._call_macro(callee, arguments, keywords)
        if isinstance(callee, Method) and not keywords:
            return self._transfer.method(callee.owner, callee.name, arguments)
        if callee is safe_range and not keywords:
            found = range_of(arguments)
            if found is not None:
                return found
        if callee is _STATEFUL:
            raise NotFollowed("a function with its own state")
        if callee is _NAMESPACE:
            return self._new_namespace(arguments, keywords)
        everything = (*arguments, *keywords.values())
        if isinstance(callee, jinja2.Undefined):
            raise RenderRaised("the called value is undefined")
        if is_concrete(callee) and all(map(is_concrete, everything)) and callable(callee):
            return self._transfer.concrete(lambda: callee(*arguments, **keywords))
        return self._transfer.of("call", callee, *everything, *keywords)

    def _new_namespace(self, arguments: Sequence[Value], keywords: dict[str, Value]) -> NamespaceOf:
        if not all(isinstance(each, dict) for each in arguments):
            raise NotFollowed("a namespace of unknown values")
        self._namespaces += 1
        names: dict[str, Value] = {}
        for each in (*arguments, keywords):
            names.update(each)
        self._state.namespaces[self._namespaces] = names
        return NamespaceOf(self._namespaces)


_LAZY = frozenset(
    {"map", "select", "reject", "selectattr", "rejectattr", "batch", "slice", "unique", "items", "reverse"}
)
"""Filters that return generators."""

_READERS = _LAZY | {"list", "first", "join", "sort", "sum", "min", "max"}
"""Filters that read their input once, from its beginning."""

_NAMESPACE, _RAISE, _STATEFUL = Function(), Function(), Function()

FUNCTIONS: dict[str, Value] = {
    **dict.fromkeys(environment().globals, _STATEFUL),
    "namespace": _NAMESPACE,
    "raise_exception": _RAISE,
    "range": safe_range,
    "dict": dict,
}
"""Functions that every template can call."""

_JINJAS_OWN = frozenset({"self", "kwargs", "varargs", "caller"})
"""Names that jinja defines unless the template assigns them."""
