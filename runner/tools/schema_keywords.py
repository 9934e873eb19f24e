"""Shapes of the JSON schema keywords that describe a value itself, and of their negations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from runner.tools.value_shapes import (
    ANYTHING,
    KINDS,
    NOTHING,
    ArrayPart,
    Conjunction,
    Kind,
    NumberRange,
    ObjectPart,
    SchemaPart,
    ValueShape,
    kind_of,
)

__all__ = ["ALL", "forbidding", "not_own_shapes", "own_shapes", "with_unevaluated", "without"]

ALL: Final = tuple(ValueShape(kind) for kind in KINDS)
"""Shapes that together allow any value."""


def forbidding(name: str) -> ValueShape:
    return ValueShape("object", objects=(ObjectPart({name: NOTHING}),))


def without(shape: ValueShape, keyword: str) -> ValueShape:
    """Return the shape with the keyword marked as not expressed."""
    return shape if keyword in shape.unexpressed else replace(shape, unexpressed=(*shape.unexpressed, keyword))


def _types(schema: Mapping[str, Any]) -> Sequence[str]:
    given = schema.get("type", ("string", "number", "boolean", "null", "array", "object"))
    return [given] if isinstance(given, str) else given


def own_shapes(schema: Mapping[str, Any]) -> tuple[ValueShape, ...]:
    """Return the shapes for a schema's own keywords, without keywords that apply other schemas to the same value."""
    types = set(_types(schema))
    kinds: dict[Kind, None] = {"number" if each == "integer" else each: None for each in types}  # type: ignore[misc]  # modern schemas only have these types
    shapes = [_of_kind(kind, schema, "integer" in types and "number" not in types) for kind in KINDS if kind in kinds]
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        values = [each for each in values if "const" not in schema or each == schema["const"]]
        alike: dict[Kind, list[Any]] = {}
        for each in values:
            alike.setdefault(kind_of(each), []).append(each)
        shapes = [replace(shape, values=tuple(alike[shape.kind])) for shape in shapes if shape.kind in alike]
    return tuple(shape for shape in shapes if not shape.is_empty)


def _of_kind(kind: Kind, schema: Mapping[str, Any], integer: bool) -> ValueShape:
    get = schema.get
    match kind:
        case "string":
            patterns = (schema["pattern"],) if "pattern" in schema else ()
            formats = (schema["format"],) if "format" in schema else ()
            return ValueShape(
                kind, least=get("minLength", 0), most=get("maxLength"), patterns=patterns, formats=formats
            )
        case "number":
            numbers = NumberRange(get("minimum"), False, get("maximum"), False)
            numbers = numbers.within(NumberRange(get("exclusiveMinimum"), True, get("exclusiveMaximum"), True))
            multiple = get("multipleOf")
            whole = multiple is not None and float(multiple).is_integer()
            unexpressed = ("multipleOf",) if multiple is not None and multiple != 1 else ()
            return ValueShape(kind, integer=integer or whole, numbers=numbers, unexpressed=unexpressed)
        case "array":
            least = get("minItems", 0)
            found: list[str] = []
            if "contains" in schema and get("minContains", 1) + ("maxContains" in schema) > 0:
                least = max(least, get("minContains", 1))
                found.append("contains")
            if "uniqueItems" in schema and get("maxItems", 2) > 1:
                found.append("uniqueItems")
            part = ArrayPart(
                [(SchemaPart(each),) for each in get("prefixItems", ())],
                (SchemaPart(get("items", True)),),
                "items" in schema,
            )
            arrays = (part,) if "prefixItems" in schema or "items" in schema else ()
            return ValueShape(kind, least=least, most=get("maxItems"), arrays=arrays, unexpressed=tuple(found))
        case "object":
            part_of_object = ObjectPart(
                {name: (SchemaPart(each),) for name, each in get("properties", {}).items()},
                [(pattern, (SchemaPart(each),)) for pattern, each in get("patternProperties", {}).items()],
                (SchemaPart(get("additionalProperties", True)),),
                "additionalProperties" in schema,
            )
            has_object = any(key in schema for key in ("properties", "patternProperties", "additionalProperties"))
            return ValueShape(
                kind,
                least=get("minProperties", 0),
                most=get("maxProperties"),
                objects=(part_of_object,) if has_object else (),
                required=tuple(get("required", ())),
                names=(SchemaPart(schema["propertyNames"]),) if "propertyNames" in schema else (),
            )
        case _:
            return ValueShape(kind)


def with_unevaluated(shape: ValueShape, schema: Mapping[str, Any]) -> ValueShape:
    """Return the shape with the schema's rules for members and items that no other keyword evaluates."""
    if shape.values is not None:
        return shape
    # The members that an unexpressed or negated keyword evaluates are unknown.
    unsure = "not" in schema or any(keyword in _APPLYING for keyword in shape.unexpressed)
    if shape.kind == "object" and "unevaluatedProperties" in schema:
        if any(part.has_additional for part in shape.objects):
            return shape
        if unsure:
            return without(shape, "unevaluatedProperties")
        known = {name: ANYTHING for part in shape.objects for name, each in part.properties.items() if _evaluates(each)}
        patterns = [(pattern, ANYTHING) for part in shape.objects for pattern, _ in part.patterns]
        part = ObjectPart(known, patterns, (SchemaPart(schema["unevaluatedProperties"]),), has_additional=True)
        return replace(shape, objects=(*shape.objects, part))
    if shape.kind == "array" and "unevaluatedItems" in schema:
        if any(each.has_rest for each in shape.arrays):
            return shape
        if "contains" in shape.unexpressed or unsure:
            return without(shape, "unevaluatedItems")
        others = (SchemaPart(schema["unevaluatedItems"]),)
        first = [ANYTHING if _evaluates_item(shape, index) else others for index in range(shape.listed)]
        rest = ArrayPart(first, others, has_rest=True)
        return replace(shape, arrays=(*shape.arrays, rest))
    return shape


def _evaluates(conjunction: Conjunction) -> bool:
    """Return whether one of these schemas evaluates a value. Negated schemas (`not`, conditions) evaluate none."""
    return any(not part.negated for part in conjunction)


def _evaluates_item(shape: ValueShape, index: int) -> bool:
    return any(_evaluates(part.first[index]) for part in shape.arrays if index < len(part.first))


def not_own_shapes(  # noqa: C901  # one case for each keyword
    keyword: str, schema: Mapping[str, Any]
) -> Iterator[ValueShape]:
    """Yield the shapes of the values that a keyword about the value itself forbids."""
    value = schema[keyword]
    match keyword:
        case "type":
            types = set(_types(schema))
            yield from (
                shape
                for shape in ALL
                if shape.kind not in types and (shape.kind, "integer") != ("number", *types & {"integer"})
            )
            if "integer" in types and "number" not in types:
                yield ValueShape("number", unexpressed=("not",))
        case "enum" | "const":
            for shape in ALL:
                listed = [each for each in (value if keyword == "enum" else [value]) if kind_of(each) == shape.kind]
                yield without(shape, "not") if listed else shape
        case "required":
            yield from map(forbidding, value)
        case "properties":
            for name, each in value.items():
                part = ObjectPart({name: (SchemaPart(each, negated=True),)})
                yield ValueShape("object", objects=(part,), required=(name,))
        case "minimum":
            yield ValueShape("number", numbers=NumberRange(high=value, high_excluded=True))
        case "exclusiveMinimum":
            yield ValueShape("number", numbers=NumberRange(high=value))
        case "maximum":
            yield ValueShape("number", numbers=NumberRange(low=value, low_excluded=True))
        case "exclusiveMaximum":
            yield ValueShape("number", numbers=NumberRange(low=value))
        case "minLength" | "minItems" | "minProperties" if value > 0:
            yield ValueShape(_KIND_OF_COUNT[keyword[3:]], most=value - 1)
        case "maxLength" | "maxItems" | "maxProperties":
            yield ValueShape(_KIND_OF_COUNT[keyword[3:]], least=value + 1)
        case "prefixItems":
            for index, each in enumerate(value):
                before = [ANYTHING] * index
                yield ValueShape(
                    "array", least=index + 1, arrays=(ArrayPart([*before, (SchemaPart(each, negated=True),)]),)
                )
        case "items" if value is False:
            yield ValueShape("array", least=len(schema.get("prefixItems", ())) + 1)
        case _ if keyword in _KIND_OF_KEYWORD:
            yield ValueShape(_KIND_OF_KEYWORD[keyword], least=keyword in _NEEDS_ONE, unexpressed=("not",))


_APPLYING: Final = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas")
_KIND_OF_COUNT: Final[Mapping[str, Kind]] = {"Length": "string", "Items": "array", "Properties": "object"}
_KIND_OF_KEYWORD: Final[Mapping[str, Kind]] = {
    "pattern": "string",
    "multipleOf": "number",
    **dict.fromkeys(("items", "contains", "uniqueItems", "unevaluatedItems"), "array"),
    **dict.fromkeys(("patternProperties", "additionalProperties", "propertyNames", "unevaluatedProperties"), "object"),
}
_NEEDS_ONE: Final = (
    "items", "uniqueItems", "unevaluatedItems", "patternProperties", "additionalProperties", "propertyNames",
    "unevaluatedProperties",
)  # fmt: skip
