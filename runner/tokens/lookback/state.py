"""The state of a render whose past is unknown: names, namespaces and output, and one state of two."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import jinja2

from runner.tokens.lookback.merging import Symbols, merged
from runner.tokens.lookback.values import Condition, Value, same

__all__ = ["Leaving", "State"]


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
