"""Rendering of a template over abstract values: statements, macros, and loops up to their fixpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, reduce
from typing import cast

import jinja2
from jinja2 import nodes

from runner.tokens.lookback.evaluator import FUNCTIONS, Evaluator
from runner.tokens.lookback.join import LoopExits, State
from runner.tokens.lookback.operators import RenderStopped
from runner.tokens.lookback.positions import loop_after_gap, loop_before_gap, loop_of_list
from runner.tokens.lookback.values import (
    GappedList,
    LastArguments,
    Loop,
    Macro,
    NamespaceOf,
    NotFollowed,
    PastMessage,
    Position,
    SplitText,
    Unknown,
    UnknownCount,
    Value,
    concatenated,
    has_effects,
    is_concrete,
    is_independent,
    is_text,
    may_hold_end,
    reaches_namespace,
)

__all__ = ["Interpreter"]

MAX_PASSES = 12
"""Maximum number of passes of a loop over earlier messages until a fixpoint. Nearly all loops need two or three."""

MAX_RECURSION = 30
"""Maximum recursion depth of a macro with known arguments."""


class Interpreter(Evaluator):
    """One render: it runs the statements of a template, and evaluates their expressions as an `Evaluator`."""

    def output(self, template: nodes.Template) -> Value:
        """Return the template's output.

        Raises:
            RenderStopped: the template raises, whatever the earlier messages are.
            NotFollowed: the template has an operation that is not modelled.
        """
        self._run(template.body)
        return self._state.output

    # --- statements

    def _run(self, body: Sequence[nodes.Node]) -> None:
        for node in body:
            self.visit(node)

    def visit_Output(self, node: nodes.Output) -> None:
        for part in node.nodes:
            self._write(self.visit(part))

    def _write(self, value: Value) -> None:
        self._state.output = concatenated(self._state.output, self._transfer.written(value))

    def visit_ExprStmt(self, node: nodes.ExprStmt) -> None:
        self.visit(node.node)

    def visit_If(self, node: nodes.If) -> None:
        self._run_branches([(node.test, node.body), *((each.test, each.body) for each in node.elif_)], node.else_)

    def _run_branches(
        self, branches: Sequence[tuple[nodes.Node, Sequence[nodes.Node]]], otherwise: Sequence[nodes.Node]
    ) -> None:
        if not branches:
            self._run(otherwise)
            return
        (test, body), *rest = branches
        self._branch(self.visit(test), lambda: self._run(body), lambda: self._run_branches(rest, otherwise))

    def visit_Assign(self, node: nodes.Assign) -> None:
        self._assign(node.target, self.visit(node.node))

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> None:
        self._assign(node.target, self._filter_block(node.filter, self._written_by(node.body)))

    def visit_FilterBlock(self, node: nodes.FilterBlock) -> None:
        self._write(self._filter_block(node.filter, self._written_by(node.body)))

    def visit_Scope(self, node: nodes.Scope) -> None:
        with self._scope():
            self._run(node.body)

    def visit_Macro(self, node: nodes.Macro) -> None:
        self._state.scopes[-1][node.name] = Macro(node, len(self._state.scopes))

    def _assign(self, target: nodes.Node, value: Value) -> None:
        match target:
            case nodes.Name():
                self._state.scopes[-1][target.name] = value
            case nodes.NSRef():
                namespace = self._state.lookup(target.name)
                if not isinstance(namespace, NamespaceOf):
                    raise NotFollowed("an unknown namespace")
                self._state.namespaces[namespace.number][target.attr] = value
            case nodes.Tuple():
                unpacked = isinstance(value, list | tuple) and len(value) == len(target.items)
                for index, name in enumerate(target.items):
                    self._assign(name, value[index] if unpacked else self._transfer.of("part", value, index))
            case _:
                raise NotFollowed(f"an assignment to {type(target).__name__}")

    @contextmanager
    def _scope(self) -> Iterator[None]:
        """Open a new scope for the names that the `with` block assigns."""
        self._state.scopes.append({})
        try:
            yield
        finally:
            del self._state.scopes[-1]

    def _written_by(self, body: Sequence[nodes.Node]) -> Value:
        """Return the output of statements, separate from the main output."""
        output, self._state.output = self._state.output, ""
        try:
            with self._scope():
                self._run(body)
            return self._state.output
        finally:
            self._state.output = output

    # --- macros

    def _call_macro(self, macro: Macro, arguments: Sequence[Value], keywords: dict[str, Value]) -> Value:
        node = macro.node
        names = [argument.name for argument in node.args]
        if len(arguments) > len(names):
            raise NotFollowed("a macro that takes more than it names")
        recursion = self._macros.count(node)
        if recursion >= MAX_RECURSION or (recursion and not all(map(is_concrete, arguments))):
            return self._written_by_recursion(node, arguments)
        given = {**dict(zip(names, arguments, strict=False)), **keywords}
        defaults = dict(zip(reversed(names), reversed(node.defaults), strict=False))
        # A macro can read the scopes of its definition, but neither its caller's scopes nor the loop around the call.
        hidden, self._state.scopes[macro.depth :] = self._state.scopes[macro.depth :], [{}]
        exits, self._exits = self._exits, []
        self._macros.append(node)
        try:
            for name in names:
                if name in given:
                    value = given[name]
                elif name in defaults:
                    value = self.visit(defaults[name])
                else:
                    value = jinja2.Undefined(name=name)
                self._state.scopes[-1][name] = value
            return self._written_by(node.body)
        finally:
            self._macros.pop()
            self._exits = exits
            self._state.scopes[macro.depth :] = hidden

    def _written_by_recursion(self, node: nodes.Macro, arguments: Sequence[Value]) -> Value:
        """Return the output of a macro that calls itself with unknown arguments: any text, if the macro only writes."""
        if not _only_writes(node):
            raise NotFollowed("a macro that calls itself and more")
        self.refuses = self.refuses or not all(map(is_independent, arguments))
        return Unknown(may_end=True, text=True)

    # --- loops

    def visit_For(self, node: nodes.For) -> None:
        if node.recursive:
            raise NotFollowed("a recursive loop")
        values = self._chosen(node, self._elements(self._read(node.iter)))
        self._exits.append(LoopExits(len(self._conditions)))
        try:
            self._run_and_join(lambda: self._run_passes(node, values), self._exits[-1].broken)
        finally:
            self._exits.pop()
        self._run_else(node, values)

    def visit_Break(self, _: nodes.Break) -> None:
        self._leave(self._exits[-1].broken)

    def visit_Continue(self, _: nodes.Continue) -> None:
        self._leave(self._exits[-1].continued)

    def _leave(self, states: list[State]) -> None:
        exits = self._exits[-1]
        exits.conditions += self._conditions[exits.depth :]
        states.append(self._state.copy())
        raise RenderStopped("left a loop")

    def _run_and_join(self, run: Callable[[], None], left: list[State]) -> None:
        """Run a pass or a loop, and join the state at its end with the states in which it was `left` early."""
        exits, depth = self._exits[-1], len(self._state.scopes)
        ends: list[State] = []
        try:
            run()
            ends.append(self._state)
        except RenderStopped as stopped:
            if not left:
                raise
            # Other branches left before this end; their conditions decide which end is real.
            for condition in exits.conditions or [Unknown()]:
                self._note_refusal(stopped, condition)
        ends += left
        for state in ends:
            del state.scopes[depth:]
        self._state = self._join(ends)

    def _join(self, states: Sequence[State]) -> State:
        """Join several states, each of which may be the real one."""
        return reduce(lambda one, other: one.join(Unknown(), other, self._symbols), states)

    def _run_else(self, node: nodes.For, values: Value) -> None:
        """Run the `else` branch of a loop if the loop has no elements.

        If it is not known whether the loop has elements, join the states with and without the branch.
        """
        if isinstance(values, list | tuple):
            if not values:
                self._run(node.else_)
        elif node.else_ and not (isinstance(values, GappedList) and values.last_items):
            self._both(Unknown(), lambda: self._run(node.else_), lambda: None)

    def _elements(self, values: Value) -> Value:
        """Return the elements of a loop over `values`."""
        if isinstance(values, jinja2.Undefined):
            return []
        if is_concrete(values):
            return self._transfer.concrete(lambda: list(values))
        match values:
            case dict():
                return list(values)
            case LastArguments():
                return [values.name]
            case SplitText():
                return GappedList((values.last,), Position(UnknownCount(0)), messages=False)
        return values

    def _chosen(self, node: nodes.For, values: Value) -> Value:
        """Return the elements that pass the loop's own condition, which jinja checks before each pass."""
        if node.test is None:
            return values
        if any(map(has_effects, map(self._state.lookup, _names_in(node.test) - _names_in(node.target)))):
            raise NotFollowed("a loop whose condition reads what its passes may change")
        if isinstance(values, list | tuple):
            return self._kept(node, values)
        if isinstance(values, GappedList):
            return values.selected(self._kept(node, values.last_items))
        return values

    def _kept(self, node: nodes.For, values: Sequence[Value]) -> list[Value]:
        kept = []
        for value in values:
            with self._scope():
                self._assign(node.target, value)
                truth = self._transfer.truth(self.visit(cast("nodes.Expr", node.test)))
            if not isinstance(truth, bool):
                raise NotFollowed("a loop with an unknown condition")
            if truth:
                kept.append(value)
        return kept

    def _run_passes(self, node: nodes.For, values: Value) -> None:
        if isinstance(values, list | tuple):
            for number, value in enumerate(values):
                self._pass(node, value, loop_of_list(values, number))
        elif isinstance(values, GappedList):
            self._run_over_gap(node, values)
        else:
            text = is_text(values)
            self._run_to_fixpoint(node, [Unknown(may_end=may_hold_end(values), text=text, nonempty=text)], Loop({}))

    def _run_over_gap(self, node: nodes.For, values: GappedList) -> None:
        before, after = values.first_items, values.last_items
        if values.backwards:
            before, after = after[::-1], before[::-1]
        for number, value in enumerate(before):
            self._pass(node, value, loop_before_gap(values, before, number))
        # Any message may occur in any pass, so a message of each role is tried.
        between: list[Value] = [Unknown(may_end=True)]
        if values.messages:
            between = [PastMessage(role, self._null_content) for role in ("system", "user", "assistant", "tool")]
        known = ({"first": False} if before else {}) | ({"last": False} if after else {})
        self._run_to_fixpoint(node, between, Loop(known))
        for number, value in enumerate(after):
            self._pass(node, value, loop_after_gap(values, after, number))

    def _run_to_fixpoint(self, node: nodes.For, values: Sequence[Value], loop: Loop) -> None:
        """Run any number of passes, including none, each over any of `values`, until a pass changes nothing."""
        unknown = Unknown()
        for _ in range(MAX_PASSES):
            before = self._state.copy()
            ends = [self._state]
            for value in values:
                self._state = before.copy()
                self._conditions.append(unknown)
                try:
                    self._pass(node, value, loop)
                    ends.append(self._state)
                except RenderStopped as stopped:
                    self._note_refusal(stopped, unknown)
                finally:
                    self._conditions.pop()
            self._state = self._join(ends)
            if self._state.lost_nothing_since(before):
                return
        raise NotFollowed("a loop that reaches no fixpoint")

    def _pass(self, node: nodes.For, value: Value, loop: Loop) -> None:
        def run() -> None:
            self._state.scopes.append({"loop": loop})
            self._assign(node.target, value)
            self._run(node.body)

        self._step()
        namespaces = self._namespaces
        self._exits[-1].continued = []
        self._run_and_join(run, self._exits[-1].continued)
        self._forget_namespaces(namespaces)

    def _forget_namespaces(self, number: int) -> None:
        """Remove the namespaces after the first `number`, so that the next pass uses the same numbers again.

        Otherwise the state would grow with every pass, and no fixpoint would be reached.
        """
        # States that left the loop may still use the later namespaces.
        if self._namespaces == number or self._exits[-1].broken:
            return
        kept = [self._state.namespaces.get(each, {}) for each in range(1, number + 1)]
        if not reaches_namespace([*self._state.scopes, *kept], above=number):
            for each in [each for each in self._state.namespaces if each > number]:
                del self._state.namespaces[each]
            self._namespaces = number


def _names_in(node: nodes.Node) -> set[str]:
    return {each.name for each in (node, *node.find_all(nodes.Name)) if isinstance(each, nodes.Name)}


@lru_cache(maxsize=256)
def _only_writes(macro: nodes.Macro) -> bool:
    """Return True if a macro calls only itself and jinja's functions, and changes only its own namespaces."""
    assigned: dict[str, list[nodes.Node]] = {}
    for each in macro.find_all(nodes.Assign):
        for name in _names_in(each.target):
            assigned.setdefault(name, []).append(each.node)
    own = {name for name, values in assigned.items() if all(map(_makes_a_namespace, values))}
    called = {each.node.name for each in macro.find_all(nodes.Call) if isinstance(each.node, nodes.Name)}
    return called <= {macro.name, *FUNCTIONS} and all(each.name in own for each in macro.find_all(nodes.NSRef))


def _makes_a_namespace(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == "namespace"
