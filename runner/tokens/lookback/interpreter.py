"""Renders a template whose past is unknown: where the past decides what is done, both branches are followed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import cast

import jinja2
from jinja2 import nodes

from runner.tokens.lookback.evaluator import Evaluator
from runner.tokens.lookback.expressions import Left, Stopped
from runner.tokens.lookback.merging import Leaving, State
from runner.tokens.lookback.positions import backwards_head_loop, backwards_loop, head_loop, known_loop
from runner.tokens.lookback.values import (
    Arguments,
    Condition,
    GaveUp,
    Loop,
    Macro,
    NamespaceOf,
    Past,
    PastMessage,
    Position,
    Root,
    Split,
    Unknown,
    Value,
    acts,
    concatenated,
    holds_end,
    is_concrete,
    is_text,
    namespaces_in,
)

__all__ = ["Interpreter"]

PASSES = 12
"""Times that a loop over what came before is gone through until nothing changes any more."""


class Interpreter(Evaluator):
    """One render: runs the statements whose expressions an `Evaluator` knows the values of."""

    def output(self, template: nodes.Template) -> Value:
        """What the template writes.

        Raises:
            GaveUp: it cannot be followed.
            Stopped: it raises, whatever came before.
        """
        self._run(template.body)
        return self._state.output

    # --- statements

    def _run(self, body: Sequence[nodes.Node]) -> None:
        for node in body:
            self._step()
            run = getattr(self, "_run_" + type(node).__name__.lower(), None)
            if run is None:
                raise GaveUp(f"{type(node).__name__} is not followed")
            run(node)

    def _run_output(self, node: nodes.Output) -> None:
        for part in node.nodes:
            text = part.data if isinstance(part, nodes.TemplateData) else self._operations.written(self._value(part))
            self._state.output = concatenated(self._state.output, text)

    def _run_exprstmt(self, node: nodes.ExprStmt) -> None:
        self._value(node.node)

    def _run_if(self, node: nodes.If) -> None:
        otherwise = list(node.else_)
        branches = [(node.test, node.body), *((each.test, each.body) for each in node.elif_)]
        self._branch(branches, otherwise)

    def _branch(self, branches: Sequence[tuple[nodes.Node, Sequence[nodes.Node]]], otherwise: list[nodes.Node]) -> None:
        if not branches:
            self._run(otherwise)
            return
        (test, body), *rest = branches
        self._by_truth(self._value(test), lambda: self._run(body), lambda: self._branch(rest, otherwise))

    def _run_assign(self, node: nodes.Assign) -> None:
        self._assign(node.target, self._value(node.node))

    def _run_assignblock(self, node: nodes.AssignBlock) -> None:
        value = self._written_by(node.body)
        self._assign(node.target, self._filter(node.filter, value) if node.filter is not None else value)

    def _run_filterblock(self, node: nodes.FilterBlock) -> None:
        value = self._filter(node.filter, self._written_by(node.body))
        self._state.output = concatenated(self._state.output, self._operations.written(value))

    def _run_scope(self, node: nodes.Scope) -> None:
        with self._scope():
            self._run(node.body)

    def _run_macro(self, node: nodes.Macro) -> None:
        self._state.scopes[-1][node.name] = Macro(node, len(self._state.scopes))

    def _run_break(self, _: nodes.Node) -> None:
        self._leave(self._leaving[-1].loops)

    def _run_continue(self, _: nodes.Node) -> None:
        self._leave(self._leaving[-1].passes)

    def _leave(self, states: list[State]) -> None:
        leaving = self._leaving[-1]
        leaving.conditions += self._conditions[leaving.depth :]
        states.append(self._state.copy())
        raise Left("left a loop")

    def _assign(self, target: nodes.Node, value: Value) -> None:
        if isinstance(target, nodes.Name):
            self._state.scopes[-1][target.name] = value
        elif isinstance(target, nodes.NSRef):
            space = self._state.lookup(target.name)
            if not isinstance(space, NamespaceOf):
                raise GaveUp("a namespace that is not known")
            self._state.namespaces[space.number][target.attr] = value
        elif isinstance(target, nodes.Tuple):
            parts = list(value) if isinstance(value, list | tuple) and len(value) == len(target.items) else None
            for index, name in enumerate(target.items):
                self._assign(name, self._operations.of("part", value, index) if parts is None else parts[index])
        else:
            raise GaveUp(f"{type(target).__name__} is not assigned to")

    @contextmanager
    def _scope(self) -> Iterator[None]:
        """Names of its own for what is run in it."""
        self._state.scopes.append({})
        try:
            yield
        finally:
            del self._state.scopes[-1]

    def _written_by(self, body: Sequence[nodes.Node]) -> Value:
        """What statements write, kept from the output."""
        output, self._state.output = self._state.output, ""
        try:
            with self._scope():
                self._run(body)
            return self._state.output
        finally:
            self._state.output = output

    def _call_macro(self, macro: Macro, arguments: Sequence[Value], keywords: dict[str, Value]) -> Value:
        leaving, self._leaving = self._leaving, []  # a macro leaves no loop around its call
        try:
            return super()._call_macro(macro, arguments, keywords)
        finally:
            self._leaving = leaving

    # --- loops

    def _run_for(self, node: nodes.For) -> None:
        if node.recursive:
            raise GaveUp("a recursive loop")
        values = self._chosen(node, self._elements(self._read(node.iter)))
        before = len(self._state.scopes)
        self._leaving.append(Leaving(len(self._conditions)))
        try:
            if isinstance(values, list | tuple):
                self._loop_known(node, values)
            elif isinstance(values, Past):
                self._loop_past(node, values)
            else:
                text = is_text(values)
                self._loop_unknown(node, [Unknown(ends=holds_end(values), text=text, filled=text)], Loop({}))
        except Stopped as stopped:
            if not self._leaving[-1].loops:
                raise
            self._note_left(stopped)
            self._state = self._leaving[-1].loops.pop()
        finally:
            leaving = self._leaving.pop()
        del self._state.scopes[before:]
        for state in leaving.loops:
            del state.scopes[before:]
        self._state = self._one_of([self._state, *leaving.loops], leaving.conditions)
        if node.else_:
            self._run_else(node, values)

    def _run_else(self, node: nodes.For, values: Value) -> None:
        """What is done where there was nothing to go through."""
        if isinstance(values, list | tuple):
            if not values:
                self._run(node.else_)
        elif not isinstance(values, Past) or not values.items:
            self._either(Unknown(), lambda: self._run(node.else_), lambda: None)

    def _elements(self, values: Value) -> Value:
        """What a loop over `values` goes through."""
        if isinstance(values, jinja2.Undefined):
            return []
        if is_concrete(values):
            return self._operations.concrete(lambda: list(values))
        if isinstance(values, dict):
            return list(values)
        if isinstance(values, Arguments):
            return [values.name]
        return Past((values.last,), Root(0), 0, (), messages=False) if isinstance(values, Split) else values

    def _chosen(self, node: nodes.For, values: Value) -> Value:
        """The elements that the loop's own condition lets through, looked at one by one as the loop goes on."""
        if node.test is None:
            return values
        if any(map(acts, map(self._state.lookup, _read_by_condition(node)))):
            raise GaveUp("a loop whose condition reads what its passes may change")
        if isinstance(values, list | tuple):
            return self._kept(node, list(values))
        if isinstance(values, Past):
            return Past(tuple(self._kept(node, list(values.items))), Root(0), 0, (), values.messages, values.backwards)
        return values

    def _kept(self, node: nodes.For, values: list[Value]) -> list[Value]:
        kept = []
        for value in values:
            with self._scope():
                self._assign(node.target, value)
                truth = self._operations.truth(self._value(cast("nodes.Expr", node.test)))
            if not isinstance(truth, bool):
                raise GaveUp("a loop that leaves out what cannot be told")
            kept += [value] * truth
        return kept

    def _note_left(self, stopped: Stopped) -> None:
        """A render ended beside one that had left the loop before: the conditions of that one decided which."""
        for condition in self._leaving[-1].conditions or [Unknown()]:
            self._note(stopped, condition)

    def _loop_known(
        self, node: nodes.For, values: Sequence[Value], first: int | Position = 0, whole: Past | None = None
    ) -> None:
        for number, value in enumerate(values):
            self._pass(node, value, known_loop(values, number, first, whole))

    def _loop_past(self, node: nodes.For, values: Past) -> None:
        if values.backwards:
            items = values.items[::-1]
            for number, value in enumerate(items):
                self._pass(node, value, backwards_loop(items, number, values))
            self._loop_between(node, values)
            for number, head in reversed(list(enumerate(values.heads))):
                self._pass(node, head, backwards_head_loop(values, number))
            return
        for number, head in enumerate(values.heads):
            self._pass(node, head, head_loop(values, number))
        self._loop_between(node, values)
        self._loop_known(node, values.items, Position(values.root, values.offset), values)

    def _loop_between(self, node: nodes.For, values: Past) -> None:
        # Any message may come at any pass, so each role is tried, and what they leave is merged.
        heads: list[Value] = [Unknown(ends=True)]
        if values.messages:
            heads = [PastMessage(role, self._null_content) for role in ("system", "user", "assistant", "tool")]
        ahead, behind = (values.items, values.heads) if values.backwards else (values.heads, values.items)
        known = {"first": False} if ahead else {}
        self._loop_unknown(node, heads, Loop(known | ({"last": False} if behind else {})))

    def _loop_unknown(self, node: nodes.For, heads: Sequence[Value], loop: Loop) -> None:
        """Any number of passes, none included: until another one changes nothing."""
        unknown = Unknown()
        for _ in range(PASSES):
            before = self._state.copy()
            ends = [self._state]
            for head in heads:
                self._state = before.copy()
                self._conditions.append(unknown)
                try:
                    self._pass(node, head, loop)
                    ends.append(self._state)
                except Stopped as stopped:
                    self._note(stopped, unknown)
                finally:
                    self._conditions.pop()
            self._state = self._one_of(ends, [unknown])
            if self._state.settled(before):
                return
        raise GaveUp("a loop that does not settle")

    def _pass(self, node: nodes.For, value: Value, loop: Loop) -> None:
        self._step()
        leaving, depth, namespaces = self._leaving[-1], len(self._state.scopes), self._namespaces
        leaving.passes = []
        self._state.scopes.append({"loop": loop})
        ends = []
        try:
            self._assign(node.target, value)
            self._run(node.body)
            ends = [self._state]
        except Stopped as stopped:
            if not leaving.passes:
                raise
            self._note_left(stopped)
        ends += leaving.passes
        for state in ends:
            del state.scopes[depth:]
        self._state = self._one_of(ends, leaving.conditions)
        self._forget(namespaces)

    def _forget(self, number: int) -> None:
        """Forget the namespaces made after the first `number`, so that the next pass makes the same ones."""
        if self._leaving[-1].loops:  # some of them may live on where the loop was left
            return
        held = namespaces_in(
            [*self._state.scopes, *(self._state.namespaces.get(each, {}) for each in range(1, number + 1))]
        )
        if max(held, default=0) <= number:
            for each in [each for each in self._state.namespaces if each > number]:
                del self._state.namespaces[each]
            self._namespaces = number

    def _one_of(self, states: Sequence[State], conditions: Sequence[Condition]) -> State:
        """The state of one of several renders; which one, the conditions decide."""
        if len(states) == 1:
            return states[0]
        unknown = any(isinstance(condition, Unknown) for condition in conditions)
        condition: Condition = Unknown() if unknown else self._symbols.fresh()
        return reduce(lambda one, other: one.merged(condition, other, self._symbols), states)


def _read_by_condition(node: nodes.For) -> set[str]:
    """The names beside the element that the loop's condition reads; those that it calls are among them."""
    test = cast("nodes.Expr", node.test)
    targets, names = (
        {name.name for name in (*part.find_all(nodes.Name), part) if isinstance(name, nodes.Name)}
        for part in (node.target, test)
    )
    return names - targets
