"""Values that a grammar must allow by the page on JSON schemas, and the errors that a report must name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any, Final

from jsonschema.exceptions import ValidationError

from runner.tools.modern_schema import modern
from runner.tools.schema_keywords import ALL
from runner.tools.schema_shapes import SchemaShapes, shapes_of
from runner.tools.validators import validator_of
from runner.tools.value_shapes import Conjunction, ValueShape, kind_of

__all__ = ["as_json", "expected_arguments", "expected_forms", "repeats_a_key", "unexplained"]

MAX_FORMS: Final = 8
"""Maximum number of forms of one value that are tried."""


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# --- values that a grammar must allow


def expected_forms(schema: Any, value: Any) -> list[Any]:
    """Return a valid value in the order and spelling of the page, one for each shape that has it.

    The result is empty if the page lists the value among those that a grammar does not allow.
    """
    shapes = shapes_of(json.dumps(schema))
    if '"unevaluated' in json.dumps(schema):
        return []  # one alternative at a time is considered
    return list(islice(_forms(shapes, shapes.whole, value), MAX_FORMS))


def expected_arguments(schema: Any, arguments: Mapping[str, Any]) -> list[Any]:
    """Return the valid arguments of a tool in the same way. Without a description, no other arguments are allowed."""
    shapes = shapes_of(json.dumps(schema))
    if '"unevaluated' in json.dumps(schema):
        return []
    found = (each for shape in shapes.arguments() for each in _shape_forms(shapes, shape, arguments, closed=True))
    return list(islice(found, MAX_FORMS))


def _forms(shapes: SchemaShapes, conjunction: Conjunction, value: Any) -> Iterator[Any]:
    for shape in shapes.of(conjunction) if shapes.key(conjunction) else ALL:
        yield from _shape_forms(shapes, shape, value, closed=False)


def _shape_forms(shapes: SchemaShapes, shape: ValueShape, value: Any, *, closed: bool) -> Iterator[Any]:
    if shape.kind != kind_of(value):
        return
    if shape.values is not None:
        yield from (each for each in shape.values if _text(each) == _text(value))
    elif shape.kind == "object":
        yield from _object_forms(shapes, shape, value, closed=closed)
    elif shape.kind == "array":
        yield from _array_forms(shapes, shape, value)
    elif shape.kind == "number":
        yield from _number_forms(shape, value)
    elif shape.kind != "string" or _has_string(shape, value):
        yield value


def _text(value: Any) -> str:
    """Return equal texts for values that a schema regards as equal."""

    def whole(each: Any) -> Any:
        if isinstance(each, float) and each.is_integer():
            return int(each)
        if isinstance(each, list):
            return [whole(one) for one in each]
        return {key: whole(one) for key, one in each.items()} if isinstance(each, Mapping) else each

    return json.dumps(whole(value), sort_keys=True)


def _has_string(shape: ValueShape, text: str) -> bool:
    long = len(text) >= shape.least and (shape.most is None or len(text) <= shape.most)
    # The page lists the strings of a format that a grammar does not allow.
    return long and not shape.formats and all(re.search(pattern, text) for pattern in shape.patterns)


def _number_forms(shape: ValueShape, value: float) -> Iterator[float]:
    whole = isinstance(value, int) or value.is_integer()
    numbers = shape.numbers
    inside = not numbers.within(type(numbers)(value, False, value, False)).is_empty
    if not inside or (shape.integer and not whole) or "e" in json.dumps(value):
        return
    if whole:
        yield int(value)
    if not shape.integer:
        yield value


def _array_forms(shapes: SchemaShapes, shape: ValueShape, value: Sequence[Any]) -> Iterator[Any]:
    if len(value) < shape.least or (shape.most is not None and len(value) > shape.most):
        return
    has_others = not shape.listed or any(part.has_rest for part in shape.arrays) or shape.least > shape.listed
    if len(value) > shape.listed and not has_others:
        return
    items = (list(islice(_forms(shapes, shape.item(n), each), MAX_FORMS)) for n, each in enumerate(value))
    yield from map(list, product(*items))


def _object_forms(
    shapes: SchemaShapes, shape: ValueShape, value: Mapping[str, Any], *, closed: bool
) -> Iterator[dict[str, Any]]:
    if len(value) < shape.least or (shape.most is not None and len(value) > shape.most):
        return
    if not set(shape.required) <= value.keys() or not all(shapes.fits(name, shape.names) for name in value):
        return
    named = [name for name in shape.named if name in value]
    others = [name for name in value if name not in named]
    for name in others:
        matched = any(re.search(pattern, name) for pattern, _ in shape.of_patterns)
        bare = not closed and not shape.named and not shape.of_patterns
        has_others = bare or any(part.has_additional for part in shape.objects) or shape.least > len(shape.named)
        if not matched and not has_others:
            return
    names = [*named, *others]
    members = (list(islice(_forms(shapes, shape.member(name), value[name]), MAX_FORMS)) for name in names)
    yield from (dict(zip(names, each, strict=True)) for each in product(*members))


# --- errors that are not enforced


def repeats_a_key(text: str) -> bool:
    """Return whether an object has a key twice. A grammar cannot forbid this if it allows unnamed keys."""
    found = list[bool]()

    def members(pairs: list[tuple[str, Any]]) -> None:
        found.append(len({key for key, _ in pairs}) < len(pairs))

    json.loads(text, object_pairs_hook=members)
    return any(found)


def unexplained(schema: Any, value: Any, unenforced: Sequence[str]) -> list[str]:
    """Return the errors of a value that a grammar allowed, without the errors of reported keywords."""
    named = {each.partition(" ")[0] for each in unenforced}
    if "patternProperties" in named:
        # The names of members are checked after reading, so a name that another keyword forbids may be written.
        named |= {"properties", "additionalProperties", "dependentRequired", "dependentSchemas", "not"}
    if named & {"if", "oneOf", "not"}:
        # Then another branch applies, which evaluates other members.
        named |= {"unevaluatedItems", "unevaluatedProperties"}
    errors = validator_of(modern(schema).schema).iter_errors(value)
    return [f"{error.validator}: {error.message}" for error in errors if not _is_explained(error, named)]


_REPORTED_AS: Final = {"minContains": "contains", "maxContains": "contains", "then": "if", "else": "if"}

_KEYWORDS_WITH_SCHEMAS: Final = {"properties", "patternProperties", "dependentSchemas", "allOf", "prefixItems"}


def _is_explained(error: ValidationError, named: set[str]) -> bool:
    path = [str(step) for step in error.absolute_schema_path]
    steps = {_REPORTED_AS.get(step, step) for step in path}
    if error.validator is None and path[-1:] not in [[keyword] for keyword in _KEYWORDS_WITH_SCHEMAS]:
        steps.add("if")  # jsonschema leaves `then` and `else` out of the path of a schema that is false
    if steps & named:
        return True
    if str(error.validator).startswith("unevaluated"):  # the error has no context
        # Keywords beside it evaluate members, but not if such a keyword has an error of its own.
        inside = json.dumps(error.schema)
        return any(f'"{keyword}"' in inside for keyword in (*named, *(["$ref"] if named else ())))
    branches: dict[Any, list[ValidationError]] = {}
    for each in error.context or ():
        if each.schema_path:  # a branch that is false has no path, and explains nothing, since it allows no value
            branches.setdefault(each.schema_path[0], []).append(each)
    return any(all(_is_explained(each, named) for each in branch) for branch in branches.values())
