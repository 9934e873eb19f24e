"""Values of a render whose past is unknown: what is given, what the past may decide, and text behind a turn's words."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import jinja2

from runner.messages import Role

__all__ = [
    "END",
    "MAYBE",
    "UNTOLD",
    "Arguments",
    "Condition",
    "Function",
    "GaveUp",
    "Given",
    "Loop",
    "Macro",
    "Method",
    "NamespaceOf",
    "Past",
    "PastMessage",
    "Position",
    "Root",
    "Split",
    "Text",
    "Unknown",
    "Value",
    "acts",
    "concatenated",
    "holds_end",
    "is_concrete",
    "is_given",
    "is_text",
    "joined",
    "namespaces_in",
    "same",
]

Value: TypeAlias = Any
"""A plain value, which is what it is, or one of the classes below; lists and dicts may hold those."""


class GaveUp(Exception):
    """The template does something that is not followed here."""


class Abstract:
    """A value that is not wholly known, or is not plain: none that jinja could compute with."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class Unknown(Abstract):
    """The past may decide it, or the words of the last turn."""

    ends: bool = False
    """Whether the end of the turn's words may be in it."""
    text: bool = False
    """Whether it is a string."""
    filled: bool = False
    """Whether it is known not to be empty."""


@dataclass(frozen=True, slots=True)
class Given(Abstract):
    """Some value that new messages, tools and options alone decide: the same after every past."""

    number: int
    """Its number: two values of one number are one value."""
    text: bool = False
    """Whether it is a string."""
    filled: bool = False
    """Whether it is known not to be empty."""
    root: Root | None = None
    """What it counts from, where it is a position in the list of messages. As a number it then depends on the past."""
    ends: bool = False
    """Whether the end of the turn's words may be in it."""


Condition: TypeAlias = Given | Unknown
"""What decides between two ways, where that is not known."""


class _Mark(Abstract):
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


END: Final = _Mark("END")
"""Where the words of the last turn end. What stands before it in a text is not kept."""

MAYBE: Final = _Mark("MAYBE")
"""Begins a text behind an unknown part that the turn's words do not end in: they may end later, or not yet."""


@dataclass(frozen=True, slots=True)
class Text(Abstract):
    """Text that is not wholly known."""

    parts: tuple[Any, ...]
    """Plain text and given values; with END or MAYBE in front also unknown ones."""
    head: Any = None
    """Identifies the text before END, where it is known; else None."""

    @property
    def has_end(self) -> bool:
        return self.parts[0] is END

    @property
    def is_marked(self) -> bool:
        return self.parts[0] in (END, MAYBE)

    @property
    def rest(self) -> Value:
        """What stands behind the mark."""
        return joined(self.parts[1:])


@dataclass(frozen=True, slots=True, eq=False)
class Root:
    """How many messages came before, of which only the least possible number is known."""

    least: int


@dataclass(frozen=True, slots=True)
class Position(Abstract):
    """A number of messages, or a position among them: as many as came before, and `offset`."""

    root: Root
    offset: int

    @property
    def least(self) -> int:
        return self.root.least + self.offset


@dataclass(frozen=True, slots=True)
class Past(Abstract):
    """A list that ends with known items, before which stand some that are not."""

    items: tuple[Any, ...]
    """The known items at the end, in their order in the list."""
    root: Root
    """What tells how many items stand before them, beside `offset`."""
    offset: int = 0
    """How many more stand there than the root counts."""
    heads: tuple[Any, ...] = ()
    """The first items, as far as something is known of them; `offset` counts them."""
    messages: bool = True
    """Whether those in between are messages; else they are anything."""
    backwards: bool = False
    """Whether the list is read from its end."""

    @property
    def length(self) -> Position:
        return Position(self.root, self.offset + len(self.items))

    @property
    def least(self) -> int:
        """The least number of elements before the items."""
        return max(0, self.root.least + self.offset)


@dataclass(frozen=True, slots=True)
class PastMessage(Abstract):
    """A message that came before, of which at most the role is known."""

    role: Role | None = None
    null_content: bool = False

    def get(self, key: str) -> Value:
        """The value under `key`; an undefined one where no message of the role has it."""
        if key == "role":
            return self.role or Unknown(text=True, filled=True)
        if key == "content":
            return Unknown(text=not (self.null_content and self.role in (None, "assistant")))
        roles = _OWNERS.get(key)
        if roles is None or (self.role is not None and self.role not in roles):
            return jinja2.Undefined(name=key)
        return Unknown()

    def has(self, key: str) -> bool | Unknown:
        """Whether the key is there."""
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
class Arguments(Abstract):
    """The arguments of the last turn's last call: one of some name, whose text ends the turn's words."""

    name: Given

    @property
    def pairs(self) -> list[tuple[Given, Text]]:
        return [(self.name, self.value)]

    @property
    def value(self) -> Text:
        return Text((END,), ("argument",))


@dataclass(frozen=True, slots=True)
class NamespaceOf(Abstract):
    """A jinja namespace; what is in it belongs to the state of the render."""

    number: int


@dataclass(frozen=True, slots=True)
class Macro(Abstract):
    """A macro, and how many scopes it sees."""

    node: Any
    depth: int


class Function(Abstract):
    """A function of jinja's that is followed by who calls it."""


UNTOLD: Final = Function()
"""One of two macros or namespaces, or none: whoever uses it gives up."""


@dataclass(frozen=True, slots=True)
class Method(Abstract):
    """A method of a value."""

    owner: Value
    name: str


@dataclass(frozen=True, slots=True)
class Split(Abstract):
    """The pieces of a text in which the turn's words end, of which only the last is known."""

    last: Value
    """The last piece."""
    given: bool
    """Whether the whole text is given."""


@dataclass(frozen=True, slots=True)
class Loop(Abstract):
    """The variable `loop`."""

    values: Mapping[str, Value] = field(hash=False)


# --- what a value is


def is_text(value: Value) -> bool:
    """It is a string for certain."""
    return isinstance(value, str | Text) or (isinstance(value, Unknown | Given) and value.text)


def is_concrete(value: Value) -> bool:
    """It is a plain value through and through."""
    if isinstance(value, list | tuple):
        return all(map(is_concrete, value))
    if isinstance(value, dict):
        return all(is_concrete(key) and is_concrete(each) for key, each in value.items())
    return not isinstance(value, Abstract)


def acts(value: Value) -> bool:
    """It is a macro, a namespace or a function, or holds one: what becomes of it has to be followed."""
    if isinstance(value, list | tuple):
        return any(map(acts, value))
    if isinstance(value, dict):
        return any(map(acts, value.values()))
    return isinstance(value, Macro | NamespaceOf | Function | Loop)


def is_given(value: Value) -> bool:
    """Neither the past nor the words of the last turn decide it."""
    if isinstance(value, list | tuple):
        return all(map(is_given, value))
    if isinstance(value, dict):
        return all(is_given(key) and is_given(each) for key, each in value.items())
    if isinstance(value, Split):
        return value.given and is_given(value.last)
    if isinstance(value, Text):
        known = value.head is not None if value.has_end else not value.is_marked
        return known and all(map(is_given, value.parts[value.is_marked :]))
    if isinstance(value, Given):
        return value.root is None
    return not isinstance(value, Abstract)


def holds_end(value: Value) -> bool:
    """The end of the turn's words may be in it."""
    if isinstance(value, list | tuple):
        return any(map(holds_end, value))
    if isinstance(value, dict):
        return any(holds_end(key) or holds_end(each) for key, each in value.items())
    if isinstance(value, Past):
        return any(map(holds_end, value.items))
    if isinstance(value, Text):
        return value.is_marked or any(map(holds_end, value.parts))
    if isinstance(value, Loop):
        return any(map(holds_end, value.values.values()))
    return isinstance(value, Arguments | Split | PastMessage | Method) or (
        isinstance(value, Unknown | Given) and value.ends
    )


def same(one: Value, other: Value, *, settled: bool = False) -> bool:
    """Both are one value in every render; or, if that is asked, `settled`: no more is known of `other`."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    alike = functools.partial(same, settled=settled)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, jinja2.Undefined):
        return True
    if isinstance(one, Text):
        return one.head == other.head and alike(one.parts, other.parts)
    if isinstance(one, Loop):
        return alike(dict(one.values), dict(other.values))
    if isinstance(one, Split):
        return one.given == other.given and alike(one.last, other.last)
    if isinstance(one, Past):
        flags = [(past.least, past.messages, past.backwards) for past in (one, other)]
        rooted = settled or (one.root is other.root and one.offset == other.offset)
        return rooted and flags[0] == flags[1] and alike((one.heads, one.items), (other.heads, other.items))
    if isinstance(one, Unknown):
        flags = [(unknown.ends, unknown.text, unknown.filled) for unknown in (one, other)]
        return settled and flags[0] == flags[1]
    return bool(one == other)


def namespaces_in(value: Value) -> set[int]:
    """Numbers of the namespaces that can be reached from a value."""
    if isinstance(value, NamespaceOf):
        return {value.number}
    if isinstance(value, dict):
        return set().union(*map(namespaces_in, value.values()))
    if isinstance(value, list | tuple):
        return set().union(*map(namespaces_in, value))
    return namespaces_in(dict(value.values)) if isinstance(value, Loop) else set()


# --- text


def joined(values: Iterable[Value]) -> Value:
    """Texts as one, each behind the other."""
    kept: list[Value] = []
    head: Any = None
    for value in values:
        if not isinstance(value, Text):
            kept += [value] if value != "" else []
        elif value.has_end:
            before, kept = kept, list(value.parts)
            known = value.head is not None and all(map(is_given, before))
            head = (head, *before, value.head) if known and (head is not None or END not in before) else None
        elif not value.is_marked:
            kept += value.parts
        elif any(map(holds_end, kept)) or kept[:1] in ([END], [MAYBE]):
            kept.append(Unknown(ends=True, text=True))
        else:
            kept = list(value.parts)
    return _normal(kept, head)


def _normal(kept: list[Value], head: Any) -> Value:
    unknown = [part for part in kept if isinstance(part, Unknown)]
    if unknown and kept[0] not in (END, MAYBE):
        position = next((position for position, part in enumerate(kept) if holds_end(part)), None)
        if position is None:
            return Unknown(text=True)
        if isinstance(kept[position], Unknown):
            return Unknown(ends=True, text=True)
        kept = [MAYBE, *kept[position:]]
    parts: list[Value] = []
    for part in kept:
        if isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts[-1] = "".join((parts[-1], part))  # markup would escape what is added to it
        else:
            parts.append(part)
    if not parts:
        return ""
    if len(parts) == 1 and parts[0] not in (END, MAYBE):
        return parts[0] if is_text(parts[0]) else Text(tuple(parts))
    return Text(tuple(parts), head)


def concatenated(one: Value, other: Value) -> Value:
    """Two strings, one behind the other."""
    return joined((one, other))
