"""Abstract values: the known facts about values in a render of unknown messages, and texts of such values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import jinja2

from runner.messages import Role

__all__ = [
    "AMBIGUOUS",
    "END",
    "MAYBE_END",
    "Condition",
    "Function",
    "GappedList",
    "LastArguments",
    "Loop",
    "Macro",
    "Method",
    "NamespaceOf",
    "NotFollowed",
    "PastMessage",
    "Position",
    "SplitText",
    "Symbol",
    "Text",
    "Unknown",
    "UnknownCount",
    "Value",
    "after_end",
    "concatenated",
    "has_effects",
    "is_concrete",
    "is_independent",
    "is_text",
    "may_hold_end",
    "reaches_namespace",
    "same",
]

Value: TypeAlias = Any
"""A value of jinja, if it is fully known, or one of the classes below. Lists and dicts may contain both."""


class NotFollowed(Exception):
    """An operation of the template that this analysis does not model, so that nothing is proven."""


class Abstract:
    """A value that is not fully known, or that belongs to the interpreter. Jinja cannot compute with it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)  # two unknowns may be two values, so each unknown equals only itself
class Unknown(Abstract):
    """A value that is not known: earlier messages or the last turn's words may determine it. The top of the lattice."""

    may_end: bool = False
    """True if the value may contain the end of the turn's words."""
    text: bool = False
    """True if the value is a string."""
    nonempty: bool = False
    """True if the value is certainly not empty."""


@dataclass(frozen=True, slots=True)
class Symbol(Abstract):
    """An unknown value that is the same for all earlier messages: new messages, tools and options determine it."""

    number: int
    """The identity of the value: two symbols with the same number are the same value."""
    text: bool = False
    """True if the value is a string."""
    nonempty: bool = False
    """True if the value is certainly not empty."""
    base: UnknownCount | None = None
    """The base, if the value is a position among messages and so depends on earlier messages; otherwise None."""
    may_end: bool = False
    """True if the value may contain the end of the turn's words."""


Condition: TypeAlias = Symbol | Unknown
"""The unknown condition of two branches."""


class _Mark(Abstract):
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


END: Final = _Mark("END")
"""The end of the last turn's words. A bridge needs only the text after this end, so earlier text is dropped."""

MAYBE_END: Final = _Mark("MAYBE_END")
"""The first part of a text with an unknown beginning, which may contain the end of the turn's words."""


@dataclass(frozen=True, slots=True)
class Text(Abstract):
    """Text that is not fully known."""

    parts: tuple[Any, ...]
    """Strings and symbols. Only the first may be a mark (END or MAYBE_END). Unknown texts occur only after a mark."""
    before: Any = None
    """Identity of the text before END if it does not depend on earlier messages; otherwise None."""

    @property
    def has_end(self) -> bool:
        return self.parts[0] is END

    @property
    def is_marked(self) -> bool:
        return self.parts[0] in (END, MAYBE_END)

    @property
    def rest(self) -> Value:
        """The text after the mark."""
        return concatenated(*self.parts[1:])


@dataclass(frozen=True, slots=True, eq=False)
class UnknownCount:
    """An unknown number of items with a known minimum. Two such numbers are never known to be equal."""

    least: int


@dataclass(frozen=True, slots=True)
class Position(Abstract):
    """A number of list items, mostly messages, or a position among them: an unknown count plus `offset`."""

    base: UnknownCount
    offset: int = 0

    @property
    def least(self) -> int:
        return self.base.least + self.offset

    def __add__(self, number: int) -> Position:
        return Position(self.base, self.offset + number)

    def __sub__(self, number: int) -> Position:
        return Position(self.base, self.offset - number)


@dataclass(frozen=True, slots=True)
class GappedList(Abstract):
    """A list with a gap of unknown items, and known items at its end and possibly at its beginning."""

    last_items: tuple[Any, ...]
    """The known items at the end, in their order in the list."""
    start: Position
    """The position of the first of `last_items`, and so the number of items before these."""
    first_items: tuple[Any, ...] = ()
    """The known items at the beginning; `start` includes their number."""
    messages: bool = True
    """True if the items in the gap are messages; False if they may be anything."""
    backwards: bool = False
    """True if the list is read from its end."""

    @property
    def length(self) -> Position:
        return self.start + len(self.last_items)

    @property
    def least_before(self) -> int:
        """Minimum number of items before the last ones."""
        return max(0, self.start.least)

    @property
    def least_length(self) -> int:
        return self.least_before + len(self.last_items)

    def selected(self, items: Iterable[Value]) -> GappedList:
        """Return a selection from this list: `items` are its last items, and the number of earlier items is unknown."""
        return GappedList(tuple(items), Position(UnknownCount(0)), messages=self.messages, backwards=self.backwards)


@dataclass(frozen=True, slots=True)
class PastMessage(Abstract):
    """An earlier message; at most its role is known."""

    role: Role | None = None
    null_content: bool = False

    def get(self, key: str) -> Value:
        """Return the value of `key`; undefined if no message of the role has the key."""
        if key == "role":
            return self.role or Unknown(text=True, nonempty=True)
        if key == "content":
            return Unknown(text=not (self.null_content and self.role in (None, "assistant")))
        roles = _OWNERS.get(key)
        if roles is None or (self.role is not None and self.role not in roles):
            return jinja2.Undefined(name=key)
        return Unknown()

    def has(self, key: str) -> bool | Unknown:
        """Return True if each message of the role has the key, False if none has it, and otherwise `Unknown`."""
        if key in ("role", "content"):
            return True
        return False if isinstance(self.get(key), jinja2.Undefined) else Unknown()


_OWNERS: Mapping[str, frozenset[Role]] = {
    "name": frozenset({"system", "user", "assistant", "tool"}),
    "reasoning_content": frozenset({"assistant"}),
    "tool_calls": frozenset({"assistant"}),
    "tool_call_id": frozenset({"tool"}),
}


@dataclass(frozen=True, slots=True)
class LastArguments(Abstract):
    """The arguments of the last turn's last call: an object with one argument, whose text ends the turn's words."""

    name: Symbol | Unknown
    value: Text = Text((END,), ("argument",))

    @property
    def pairs(self) -> list[tuple[Value, Text]]:
        return [(self.name, self.value)]


@dataclass(frozen=True, slots=True)
class NamespaceOf(Abstract):
    """A jinja namespace. `State.namespaces` has its content, by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class Macro(Abstract):
    """A macro, with the number of scopes that it can read."""

    node: Any
    depth: int


class Function(Abstract):
    """A function of jinja, compared by identity. The evaluator models its calls, or refuses them."""


AMBIGUOUS: Final = Function()
"""A value that may be one of two macros or namespaces, or neither. A template that uses it is not followed."""


@dataclass(frozen=True, slots=True)
class Method(Abstract):
    owner: Value
    name: str


@dataclass(frozen=True, slots=True)
class SplitText(Abstract):
    """The pieces of a text with the end of the turn's words. Only the last piece is known."""

    last: Value
    independent: bool
    """True if the whole text is the same for all earlier messages."""


@dataclass(frozen=True, slots=True)
class Loop(Abstract):
    """The variable `loop` in the body of a jinja loop."""

    attributes: Mapping[str, Value] = field(hash=False)


# --- properties of a value


def is_text(value: Value) -> bool:
    """Return True if the value is certainly a string."""
    return isinstance(value, str | Text) or (isinstance(value, Unknown | Symbol) and value.text)


def is_concrete(value: Value) -> bool:
    """Return True if the value is fully known, so that jinja can compute with it."""
    if isinstance(value, list | tuple | dict):
        return all(map(is_concrete, _contents(value)))
    return not isinstance(value, Abstract)


def has_effects(value: Value) -> bool:
    """Return True if the value is or contains a macro, a namespace or a function, whose effects must be followed."""
    return isinstance(value, Macro | NamespaceOf | Function | Loop) or any(map(has_effects, _contents(value)))


def is_independent(value: Value) -> bool:
    """Return True if the value depends neither on earlier messages nor on the words of the last turn."""
    match value:
        case Symbol():
            return value.base is None
        case SplitText():
            return value.independent and is_independent(value.last)
        case LastArguments():
            return is_independent(value.name) and is_independent(value.value)
        case Text():
            known = value.before is not None if value.has_end else not value.is_marked
            return known and all(map(is_independent, value.parts[value.is_marked :]))
    return not isinstance(value, Abstract) and all(map(is_independent, _contents(value)))


def may_hold_end(value: Value) -> bool:
    """Return True if the value may contain the end of the turn's words."""
    match value:
        case Unknown() | Symbol():
            return value.may_end
        case Text() if value.is_marked:
            return True
        case LastArguments() | SplitText() | PastMessage() | Method():
            return True
    return any(map(may_hold_end, _contents(value)))


def reaches_namespace(value: Value, above: int) -> bool:
    """Return True if a namespace with a number above `above` is reachable from a value."""
    # This is not recursive, since it runs after every pass of a loop, and the schemas of many tools may be reachable.
    reached = [value]
    while reached:
        each = reached.pop()
        if isinstance(each, NamespaceOf):
            if each.number > above:
                return True
        elif isinstance(each, _CONTAINERS):
            reached.extend(_contents(each))
    return False


_CONTAINERS: Final = (list, tuple, dict, Text, GappedList, Loop)


def _contents(value: Value) -> Iterable[Value]:
    """Return the direct parts of a value."""
    match value:
        case list() | tuple():
            return value
        case dict():
            return (*value, *value.values())
        case Text():
            return value.parts
        case GappedList():
            return value.last_items
        case Loop():
            return value.attributes.values()
    return ()


def same(one: Value, other: Value, *, unknowns_alike: bool = False) -> bool:  # noqa: C901  # one case for each type
    """Return True if the two values are the same in every render.

    With `unknowns_alike`, two unknown values are the same if the same facts are known about both. This is for detecting
    a fixpoint.
    """

    def alike(one: Value, other: Value) -> bool:
        return same(one, other, unknowns_alike=unknowns_alike)

    if one is other:
        return True
    if type(one) is not type(other):
        return False
    match one:
        case list() | tuple():
            return len(one) == len(other) and all(map(alike, one, other))
        case dict():
            return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
        case jinja2.Undefined():
            return True
        case Text() | SplitText() | Loop():
            return all(alike(getattr(one, name), getattr(other, name)) for name in one.__slots__)
        case GappedList():
            if not (unknowns_alike or one.start == other.start):
                return False
            flags = [(each.least_before, each.messages, each.backwards) for each in (one, other)]
            return flags[0] == flags[1] and alike(
                (one.first_items, one.last_items), (other.first_items, other.last_items)
            )
        case Unknown():
            flags = [(each.may_end, each.text, each.nonempty) for each in (one, other)]
            return unknowns_alike and flags[0] == flags[1]
    return bool(one == other)


# --- text


def concatenated(*texts: Value) -> Value:
    """Return the concatenated texts. Text before the end of the turn's words is dropped."""
    parts: list[Value] = []
    before: Any = None
    for text in texts:
        if not isinstance(text, Text):
            parts += [text] if text != "" else []
        elif text.has_end:
            earlier, parts = parts, list(text.parts)
            known = text.before is not None and all(map(is_independent, earlier))
            # If the words end twice, because a text is written twice, the last end counts.
            before = (before, *earlier, text.before) if known and (before is not None or END not in earlier) else None
        elif not text.is_marked:
            parts += text.parts
        elif any(map(may_hold_end, parts)) or parts[:1] in ([END], [MAYBE_END]):
            parts.append(Unknown(may_end=True, text=True))
        else:
            parts = list(text.parts)
    return _normal(parts, before)


def after_end(rest: Value, before: Any) -> Value:
    """Return a text in which `rest` directly follows the turn's words."""
    return concatenated(Text((END,), before), rest)


def _normal(parts: list[Value], before: Any) -> Value:
    """Return the simplest value that equals the parts."""
    if any(isinstance(part, Unknown) for part in parts) and parts[0] not in (END, MAYBE_END):
        # Only text after the end of the words matters, so an unknown beginning becomes a mark.
        position = next((position for position, part in enumerate(parts) if may_hold_end(part)), None)
        if position is None:
            return Unknown(text=True)
        if isinstance(parts[position], Unknown):
            return Unknown(may_end=True, text=True)
        parts = [MAYBE_END, *parts[position:]]
    merged: list[Value] = []
    for part in parts:
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] = "".join((merged[-1], part))  # without join, markup would escape the added text
        else:
            merged.append(part)
    if not merged:
        return ""
    if len(merged) == 1 and merged[0] not in (END, MAYBE_END):
        return merged[0] if is_text(merged[0]) else Text(tuple(merged))
    return Text(tuple(merged), before)
