"""Shapes: sets of values of one type, described by all keywords of a JSON schema."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, TypeVar

__all__ = [
    "ANYTHING",
    "KINDS",
    "NOTHING",
    "ArrayPart",
    "Conjunction",
    "Kind",
    "NumberRange",
    "ObjectPart",
    "SchemaPart",
    "ValueShape",
    "kind_of",
]

Kind: TypeAlias = Literal["string", "number", "boolean", "null", "array", "object"]
KINDS: Final[tuple[Kind, ...]] = ("string", "number", "boolean", "null", "array", "object")


def kind_of(value: Any) -> Kind:
    """Return the kind of a value that was read from JSON."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case int() | float():
            return "number"
        case Mapping():
            return "object"
        case _:
            return "array"


@dataclass(frozen=True, slots=True, eq=False)
class SchemaPart:
    """A schema or its negation."""

    schema: Any
    negated: bool = False
    keyword: str = "not"
    """Keyword of the author's schema that negates `schema`; used only if `negated` is true."""


Conjunction: TypeAlias = tuple[SchemaPart, ...]
"""Schemas that must all be satisfied; () allows anything."""

ANYTHING: Final[Conjunction] = ()
NOTHING: Final[Conjunction] = (SchemaPart(False),)


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Numbers between two bounds."""

    low: float | None = None
    low_excluded: bool = False
    high: float | None = None
    high_excluded: bool = False

    def within(self, other: NumberRange) -> NumberRange:
        """Return the intersection of two ranges."""
        low, high = self, self
        if other.low is not None and (
            self.low is None or other.low > self.low or (other.low == self.low and other.low_excluded)
        ):
            low = other
        if other.high is not None and (
            self.high is None or other.high < self.high or (other.high == self.high and other.high_excluded)
        ):
            high = other
        return NumberRange(low.low, low.low_excluded, high.high, high.high_excluded)

    @property
    def least(self) -> int | None:
        """The smallest integer that the lower bound allows; None without a finite bound. It may be above `high`."""
        if self.low is None or math.isinf(self.low):
            return None
        least = math.ceil(self.low)
        return least + 1 if self.low_excluded and least == self.low else least

    @property
    def greatest(self) -> int | None:
        """The largest integer that the upper bound allows; None without a finite bound. It may be below `low`."""
        if self.high is None or math.isinf(self.high):
            return None
        greatest = math.floor(self.high)
        return greatest - 1 if self.high_excluded and greatest == self.high else greatest

    @property
    def is_empty(self) -> bool:
        """True if the range contains no number."""
        if self.low is None or self.high is None:
            return False
        return self.low > self.high or (self.low == self.high and (self.low_excluded or self.high_excluded))


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """Rules of one schema for the members of an object."""

    properties: Mapping[str, Conjunction] = field(default_factory=dict)
    patterns: Sequence[tuple[str, Conjunction]] = ()
    additional: Conjunction = ANYTHING
    """Schemas of the members that no name and no pattern covers."""
    has_additional: bool = False
    """True if the schema sets `additional`."""

    def of(self, name: str) -> Conjunction:
        """Return the schemas of the member with this name."""
        found = self.properties.get(name)
        matching = [each for pattern, each in self.patterns if re.search(pattern, name)]
        if found is None and not matching:
            return self.additional
        return (*(found or ()), *(part for each in matching for part in each))


@dataclass(frozen=True, slots=True)
class ArrayPart:
    """Rules of one schema for the items of an array."""

    first: Sequence[Conjunction] = ()
    rest: Conjunction = ANYTHING
    has_rest: bool = False

    def of(self, index: int) -> Conjunction:
        """Return the schemas of the item with this index."""
        return self.first[index] if index < len(self.first) else self.rest


@dataclass(frozen=True, slots=True)
class ValueShape:
    """Values of one kind that satisfy a schema."""

    kind: Kind
    values: tuple[Any, ...] | None = None
    """All allowed values; None if they are not listed."""
    integer: bool = False
    numbers: NumberRange = NumberRange()
    least: int = 0
    """Minimum length, or minimum number of items or members."""
    most: int | None = None
    patterns: tuple[str, ...] = ()
    """Patterns that strings must match."""
    formats: tuple[str, ...] = ()
    objects: tuple[ObjectPart, ...] = ()
    required: tuple[str, ...] = ()
    names: Conjunction = ANYTHING
    """Schemas of every member's name."""
    arrays: tuple[ArrayPart, ...] = ()
    unexpressed: tuple[str, ...] = ()
    """Keywords that the shape does not express, so that validation has to check them."""

    def both(self, other: ValueShape) -> ValueShape | None:
        """Return the intersection of two shapes; None if it is empty."""
        if self.kind != other.kind:
            return None
        values = self.values
        if other.values is not None:
            values = other.values if values is None else tuple(each for each in values if _is_in(each, other.values))
        mosts = [each for each in (self.most, other.most) if each is not None]
        made = ValueShape(
            self.kind,
            values,
            self.integer or other.integer,
            self.numbers.within(other.numbers),
            max(self.least, other.least),
            min(mosts) if mosts else None,
            _together(self.patterns, other.patterns),
            _together(self.formats, other.formats),
            (*self.objects, *other.objects),
            _together(self.required, other.required),
            (*self.names, *other.names),
            (*self.arrays, *other.arrays),
            _together(self.unexpressed, other.unexpressed),
        )
        return None if made.is_empty else made

    @property
    def is_empty(self) -> bool:
        """True if no value satisfies the shape, judging by listed values and bounds only."""
        if self.values is not None:
            return not self.values
        if self.kind == "number":
            low, high = self.numbers.least, self.numbers.greatest
            if self.integer and low is not None and high is not None and low > high:
                return True
            return self.numbers.is_empty
        return self.most is not None and max(self.least, len(set(self.required))) > self.most

    @property
    def is_free(self) -> bool:
        """True if every value of its kind satisfies the shape."""
        return self == ValueShape(self.kind)

    def member(self, name: str) -> Conjunction:
        """Return the schemas of the member with this name."""
        return tuple(part for each in self.objects for part in each.of(name))

    @property
    def named(self) -> tuple[str, ...]:
        """Names of members that a schema lists or requires, in order."""
        found = dict.fromkeys(name for each in self.objects for name in each.properties)
        return tuple(found | dict.fromkeys(self.required))

    @property
    def others(self) -> Conjunction:
        """Schemas of members that no name and no pattern covers."""
        return tuple(part for each in self.objects for part in each.additional)

    @property
    def of_patterns(self) -> tuple[tuple[str, Conjunction], ...]:
        """Patterns of names, each with the schemas of the members whose names match it."""
        found = []
        for index, each in enumerate(self.objects):
            for pattern, conjunction in each.patterns:
                beside = (
                    part
                    for n, other in enumerate(self.objects)
                    if n != index and not other.patterns
                    for part in other.additional
                )
                found.append((pattern, (*conjunction, *beside)))
        return tuple(found)

    def item(self, index: int) -> Conjunction:
        """Return the schemas of the item with this index."""
        return tuple(part for each in self.arrays for part in each.of(index))

    @property
    def listed(self) -> int:
        """Number of items at the beginning that have a schema by their position."""
        return max((len(each.first) for each in self.arrays), default=0)


_HashableT = TypeVar("_HashableT", bound=Hashable)


def _together(one: Sequence[_HashableT], other: Sequence[_HashableT]) -> tuple[_HashableT, ...]:
    return tuple(dict.fromkeys((*one, *other)))


def _is_in(value: Any, values: Sequence[Any]) -> bool:
    return any(kind_of(value) == kind_of(each) and value == each for each in values)
