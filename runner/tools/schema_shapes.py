"""Shapes of a JSON schema: for each type, the values that satisfy all keywords together.

Only this module decides how keywords combine. Grammars of calls and answers are written from shapes, and untyped text
is converted by their types. The shapes of a schema allow every value that the schema allows, and possibly more:
`unexpressed` of a shape lists the keywords that the shape does not express, and that validation has to check.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

from runner.tools.modern_schema import modern, resolved
from runner.tools.schema_keywords import ALL, forbidding, not_own_shapes, own_shapes, with_unevaluated, without
from runner.tools.value_shapes import KINDS, Conjunction, SchemaPart, ValueShape

__all__ = ["MAX_LISTED", "SchemaShapes", "shapes_for", "shapes_of", "types_of"]

MAX_SHAPES: Final = 64
"""Maximum number of shapes of a schema. If a keyword would create more, validation checks it instead."""

MAX_LISTED: Final = 256
"""Maximum number of values of an integer range that are listed and validated one by one."""


@functools.lru_cache(maxsize=256)
def shapes_of(text: str) -> SchemaShapes:
    """Return the shapes of a schema of any dialect, given as JSON."""
    return SchemaShapes(modern(json.loads(text)).schema)


_CACHE_ENTRIES: Final = 512
_by_identity: dict[int, tuple[Any, SchemaShapes]] = {}


def shapes_for(schema: Any) -> SchemaShapes:
    """Return the shapes of a schema object. They are cached by its identity, since every call uses the same object."""
    known = _by_identity.get(id(schema))
    if known is None:
        if len(_by_identity) >= _CACHE_ENTRIES:
            _by_identity.pop(next(iter(_by_identity)))
        known = _by_identity[id(schema)] = (schema, shapes_of(json.dumps(schema, default=str)))
    return known[1]


class SchemaShapes:
    """Shapes of a 2020-12 schema and of all its subschemas."""

    def __init__(self, root: Any) -> None:
        """Create the shapes of a schema that `modern_schema` converted."""
        self.root = root
        self.whole: Conjunction = (SchemaPart(root),)
        self._texts: dict[int, tuple[Any, str]] = {}
        self._of: dict[Hashable, tuple[ValueShape, ...]] = {}
        self._parts: dict[tuple[str, bool], tuple[ValueShape, ...]] = {}
        self._satisfiable: dict[Hashable, bool] = {}
        self._arguments: dict[str, tuple[ValueShape, ...]] = {}
        self._types: dict[str, frozenset[str]] = {}

    def key(self, conjunction: Conjunction) -> tuple[str, ...]:
        """Return a key that is equal for equal conjunctions; () if the conjunction allows any value."""
        texts = (f"{f'!{part.keyword} ' if part.negated else ''}{self._text(part.schema)}" for part in conjunction)
        return tuple(sorted({text for text in texts if text not in _TRIVIAL}))

    def is_recursive(self, conjunction: Conjunction) -> bool:
        """Return whether a conjunction contains references, so that it may contain itself."""
        return any('"$ref"' in text for text in self.key(conjunction))

    def of(self, conjunction: Conjunction) -> tuple[ValueShape, ...]:
        """Return the shapes of the values that satisfy all of these schemas; () if there is no such value."""
        return tuple(shape for shape in self._every(conjunction) if self._can_be(shape, frozenset()))

    def arguments(self) -> tuple[ValueShape, ...]:
        """Return the shapes of a tool's arguments, which are objects."""
        return tuple(shape for shape in self.of(self.whole) if shape.kind == "object")

    def why_uncallable(self) -> str | None:
        """Return a clause with the reason why no arguments of a tool satisfy the schema; None if some satisfy it."""
        if self.arguments():
            return None
        objects = [shape for shape in self._every(self.whole) if shape.kind == "object"]
        unfit = (name for one in objects for name in one.required if not self.is_satisfiable(one.member(name)))
        name = next(unfit, None)
        return "no object fits its schema" + ("" if name is None else f", since no value fits its argument {name!r}")

    def argument(self, name: str) -> tuple[ValueShape, ...]:
        """Return all shapes that the argument with this name can have, for any values of the other arguments."""
        if name not in self._arguments:
            given = (shape for one in self.arguments() for shape in self.of(one.member(name)))
            self._arguments[name] = self._unlike(given)
        return self._arguments[name]

    def types_of_argument(self, name: str) -> frozenset[str]:
        """Return the JSON schema types of the argument with this name; an empty set if any type is allowed."""
        if name not in self._types:
            self._types[name] = types_of(self.argument(name))
        return self._types[name]

    def fits(self, value: Any, conjunction: Conjunction) -> bool:
        """Return whether a value satisfies all of these schemas, by validation."""
        return all(
            self._validator.evolve(schema=part.schema).is_valid(value) is not part.negated for part in conjunction
        )

    def is_satisfiable(self, conjunction: Conjunction, above: frozenset[tuple[str, ...]] = frozenset()) -> bool:
        """Return whether a finite value satisfies all schemas of a conjunction.

        `above` has the keys of the conjunctions for the values that contain this value. If it has the key of this
        conjunction, such values would contain each other without end, so the result is False.
        """
        key = self.key(conjunction)
        if not key:
            return True
        if key in above:
            return False
        if key not in self._satisfiable:
            found = any(self._can_be(each, above | {key}) for each in self._every(conjunction))
            if not found and above:
                return False  # not cached, since the result may differ without `above`
            self._satisfiable[key] = found
        return self._satisfiable[key]

    def _every(self, conjunction: Conjunction) -> tuple[ValueShape, ...]:
        key = self.key(conjunction)
        if key not in self._of:
            shapes: Sequence[ValueShape] = ALL
            for part in conjunction:
                shapes = self._product(shapes, self._part(part), "allOf")
            checked = (self._checked(shape, conjunction) for shape in shapes)
            self._of[key] = self._unlike(shape for shape in checked if shape is not None)
        return self._of[key]

    def _can_be(self, shape: ValueShape, above: frozenset[tuple[str, ...]]) -> bool:
        """Return whether a value of this shape exists, judging by bounds and required members."""
        if shape.values is not None:
            return True
        if shape.kind == "object":
            if shape.names and not all(self.fits(name, shape.names) for name in shape.required):
                return False
            if not all(self.is_satisfiable(shape.member(name), above) for name in shape.required):
                return False
            return shape.least <= len(shape.required) or self._has_room(shape, above)
        if shape.kind == "array":
            return all(self.is_satisfiable(shape.item(n), above) for n in range(min(shape.least, shape.listed + 1)))
        return True

    def allows_unnamed(self, shape: ValueShape) -> bool:
        """Return whether a name that the shape does not list may satisfy the shape's schemas of names."""
        if not self.key(shape.names):
            return True
        names = (each for each in self.of(shape.names) if each.kind == "string")
        return any(each.values is None or not set(each.values) <= set(shape.named) for each in names)

    def _has_room(self, shape: ValueShape, above: frozenset[tuple[str, ...]]) -> bool:
        """Return whether an object of this shape can have as many members as its minimum requires."""
        unnamed = (shape.others, *(each for _, each in shape.of_patterns)) if self.allows_unnamed(shape) else ()
        if any(self.is_satisfiable(each, above) for each in unnamed):
            return True
        named = [name for name in shape.named if not shape.names or self.fits(name, shape.names)]
        return sum(self.is_satisfiable(shape.member(name), above) for name in named) >= shape.least

    def _checked(self, shape: ValueShape, conjunction: Conjunction) -> ValueShape | None:
        """Return the shape; if its values can be listed, return only the valid ones, or None if none is valid."""
        values = _listed(shape)
        if values is None:
            return shape
        values = tuple(each for each in values if self.fits(each, conjunction))
        return ValueShape(shape.kind, values, integer=shape.integer) if values else None

    @cached_property
    def _validator(self) -> Any:
        from runner.tools.validators import validator_of

        return validator_of(self.root)

    def _text(self, schema: Any) -> str:
        # Keep a reference to the schema, so that no other object gets its identity.
        known = self._texts.get(id(schema))
        if known is None:
            known = self._texts[id(schema)] = (schema, json.dumps(schema))
        return known[1]

    # --- combining

    def _unlike(self, shapes: Iterator[ValueShape]) -> tuple[ValueShape, ...]:
        return tuple({self._shape_key(shape): shape for shape in shapes}.values())

    def _shape_key(self, shape: ValueShape) -> Hashable:
        objects = tuple(
            (
                tuple((name, self.key(each)) for name, each in part.properties.items()),
                tuple((pattern, self.key(each)) for pattern, each in part.patterns),
                self.key(part.additional),
                part.has_additional,
            )
            for part in shape.objects
        )
        arrays = tuple((tuple(map(self.key, part.first)), self.key(part.rest), part.has_rest) for part in shape.arrays)
        values = json.dumps(shape.values)
        return (
            replace(shape, objects=(), arrays=(), names=(), values=None),
            objects,
            arrays,
            values,
            self.key(shape.names),
        )

    def _product(self, one: Sequence[ValueShape], other: Sequence[ValueShape], keyword: str) -> tuple[ValueShape, ...]:
        """Return the intersection of two sets of shapes.

        If the intersection has too many shapes, return the shapes of `one` whose kind occurs in it. They are marked as
        not expressing `keyword`.
        """
        if other is ALL or one is ALL:
            return tuple(one if other is ALL else other)
        both = (a.both(b) for a in one for b in other)
        found = self._unlike(each for each in both if each is not None)
        if len(found) > MAX_SHAPES and len(found) > len(one):
            kinds = {shape.kind for shape in found}
            return tuple(without(shape, keyword) for shape in one if shape.kind in kinds)
        return found

    def _part(self, part: SchemaPart) -> tuple[ValueShape, ...]:
        return _named(self._negative(part.schema), part.keyword) if part.negated else self._positive(part.schema)

    def _positive(self, schema: Any) -> tuple[ValueShape, ...]:
        if not isinstance(schema, Mapping):
            return ALL if schema else ()
        return self._once(schema, False, self._keywords)

    def _negative(self, schema: Any) -> tuple[ValueShape, ...]:
        if not isinstance(schema, Mapping):
            return () if schema else ALL
        return self._once(schema, True, self._negated_keywords)

    def _once(
        self, schema: Mapping[str, Any], negated: bool, make: Callable[[Mapping[str, Any]], tuple[ValueShape, ...]]
    ) -> tuple[ValueShape, ...]:
        key = (self._text(schema), negated)
        if key not in self._parts:
            self._parts[key] = make(schema)
        return self._parts[key]

    def _keywords(self, schema: Mapping[str, Any]) -> tuple[ValueShape, ...]:
        found: Sequence[ValueShape] = own_shapes(schema)
        for keyword, shapes in self._applied(schema):
            found = self._product(found, shapes, keyword)
        return tuple(with_unevaluated(shape, schema) for shape in found)

    def _applied(self, schema: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[ValueShape]]]:
        """Yield each keyword that applies other schemas to the same value, with its shapes."""
        if "$ref" in schema:
            yield "$ref", self._positive(resolved(self.root, schema["$ref"]))
        for each in schema.get("allOf", ()):
            yield "allOf", self._positive(each)
        if "anyOf" in schema:
            yield "anyOf", self._unlike(shape for each in schema["anyOf"] for shape in self._positive(each))
        if "oneOf" in schema:
            yield "oneOf", self._one_of(schema["oneOf"])
        if "not" in schema:
            yield "not", self._negative(schema["not"])
        if "if" in schema:
            yield "if", self._if(schema, negated=False)
        for name, names in schema.get("dependentRequired", {}).items():
            yield "dependentRequired", (*self._absent(name), ValueShape("object", required=(name, *names)))
        for name, each in schema.get("dependentSchemas", {}).items():
            present = self._product(self._positive(each), (ValueShape("object", required=(name,)),), "dependentSchemas")
            yield "dependentSchemas", (*self._absent(name), *present)

    def _absent(self, name: str) -> tuple[ValueShape, ...]:
        """Return the shapes of all values except objects with a member of this name."""
        return (*(shape for shape in ALL if shape.kind != "object"), forbidding(name))

    def _if(self, schema: Mapping[str, Any], *, negated: bool) -> tuple[ValueShape, ...]:
        side = self._negative if negated else self._positive
        then = self._product(self._positive(schema["if"]), side(schema.get("then", True)), "then")
        otherwise = self._product(_named(self._negative(schema["if"]), "if"), side(schema.get("else", True)), "else")
        return self._unlike(iter((*then, *otherwise)))

    def _one_of(self, choices: Sequence[Any]) -> tuple[ValueShape, ...]:
        found: list[ValueShape] = []
        for index, choice in enumerate(choices):
            for shape in self._positive(choice):
                only: tuple[ValueShape, ...] = (shape,)
                for other_index, other in enumerate(choices):
                    if other_index == index:
                        continue
                    rivals = [each for each in self._positive(other) if self._may_meet(shape, each)]
                    if rivals:
                        only = self._product(only, _named(self._negative(other), "oneOf"), "oneOf")
                found += only
        exclusive = self._unlike(iter(found))
        if len(exclusive) <= MAX_SHAPES:
            return exclusive
        # The shapes express that one schema is satisfied. Validation checks that no other schema is satisfied.
        return self._unlike(without(shape, "oneOf") for choice in choices for shape in self._positive(choice))

    def _may_meet(self, one: ValueShape, other: ValueShape) -> bool:
        """Return True if a value may have both shapes.

        No value has both if the shapes list values for a required member, and share none of these values.
        """
        both = one.both(other)
        if both is None:
            return False
        for name in both.required:
            listed = [self._listed_of(each) for each in (one.member(name), other.member(name))]
            if None not in listed and not set(listed[0] or ()) & set(listed[1] or ()):
                return False
        return True

    def _listed_of(self, conjunction: Conjunction) -> frozenset[str] | None:
        """Return the values that one of the schemas lists, itself or by reference, as JSON; None if no schema does."""
        for part in conjunction:
            schema = part.schema
            for _ in range(4):
                if isinstance(schema, Mapping) and "$ref" in schema and "enum" not in schema:
                    schema = resolved(self.root, schema["$ref"])
            if isinstance(schema, Mapping) and not part.negated and ("const" in schema or "enum" in schema):
                return frozenset(json.dumps(each, sort_keys=True) for each in schema.get("enum", [schema.get("const")]))
        return None

    # --- negation

    def _negated_keywords(self, schema: Mapping[str, Any]) -> tuple[ValueShape, ...]:
        return self._unlike(shape for keyword in schema for shape in self._not(keyword, schema) if not shape.is_empty)

    def _not(  # noqa: C901  # one case for each keyword
        self, keyword: str, schema: Mapping[str, Any]
    ) -> Iterator[ValueShape]:
        """Yield the shapes of the values that one keyword forbids."""
        value = schema[keyword]
        match keyword:
            case "$ref":
                yield from self._negative(resolved(self.root, value))
            case "allOf":
                for each in value:
                    yield from self._negative(each)
            case "anyOf":
                shapes: tuple[ValueShape, ...] = ALL
                for each in value:
                    shapes = self._product(shapes, self._negative(each), "not")
                yield from shapes
            case "oneOf":
                yield from (without(shape, "not") for shape in ALL)
            case "not":
                yield from self._positive(value)
            case "if":
                yield from self._if(schema, negated=True)
            case "dependentRequired":
                for name, names in value.items():
                    for missing in names:
                        yield replace(forbidding(missing), required=(name,))
            case "dependentSchemas":
                for name, each in value.items():
                    yield from self._product(self._negative(each), (ValueShape("object", required=(name,)),), "not")
            case _:
                yield from not_own_shapes(keyword, schema)


def _named(shapes: Sequence[ValueShape], keyword: str) -> tuple[ValueShape, ...]:
    """Return the shapes of a negation, in which the author's `keyword` replaces the unexpressed keyword "not"."""
    return tuple(shapes) if keyword == "not" else tuple(_renamed(shape, keyword) for shape in shapes)


def _renamed(shape: ValueShape, keyword: str) -> ValueShape:
    def renamed(conjunction: Conjunction) -> Conjunction:
        return tuple(replace(part, keyword=keyword) if part.negated else part for part in conjunction)

    return replace(
        shape,
        unexpressed=tuple(keyword if each == "not" else each for each in shape.unexpressed),
        objects=tuple(
            replace(part, properties={name: renamed(each) for name, each in part.properties.items()})
            for part in shape.objects
        ),
        arrays=tuple(replace(part, first=[*map(renamed, part.first)]) for part in shape.arrays),
    )


def types_of(shapes: Sequence[ValueShape]) -> frozenset[str]:
    """Return the JSON schema types of values of these shapes; an empty set if any type is allowed."""
    found: set[str] = set()
    unlisted: set[str] = set()
    for shape in shapes:
        if shape.values is not None and shape.kind == "number":
            found |= {"integer" if isinstance(each, int) else "number" for each in shape.values}
            continue
        found.add("integer" if shape.integer else shape.kind)
        if shape.values is None and not shape.integer:
            unlisted.add(shape.kind)
    return frozenset() if unlisted == set(KINDS) else frozenset(found)


_TRIVIAL: Final = ("true", "{}", *(f"!{keyword} false" for keyword in ("not", "if", "oneOf")))


def _listed(shape: ValueShape) -> tuple[Any, ...] | None:
    """Return all values of a shape; None if they are too many, or if they need no check."""
    if shape.values is not None:
        return shape.values
    match shape.kind:
        case "null":
            return (None,) if shape.unexpressed else None
        case "boolean":
            return (True, False) if shape.unexpressed else None
        case "number" if shape.integer:
            low, high = shape.numbers.least, shape.numbers.greatest
            if low is not None and high is not None and high - low < MAX_LISTED:
                return tuple(range(low, high + 1))
    return None
