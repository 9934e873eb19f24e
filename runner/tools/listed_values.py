"""Values of `enum` and `const` that contradict the type in the same schema."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from runner.tools.value_shapes import kind_of

__all__ = ["Contradiction", "without_contradictions"]


class Contradiction(NamedTuple):
    """A keyword that lists no values, or only values that the type in the same schema forbids."""

    keyword: str
    why: str
    """The contradiction and how the keyword is read, as a clause."""


def without_contradictions(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[Contradiction]]:
    """Return the schema with `enum` and `const` changed to allow a value of the schema's type, and the changes.

    The schema is one that `modern_schema` converted. If the type and all values contradict each other, the type is
    kept. Authors often write numbers in quotes, or text without quotes, so such values are converted to the type. Other
    values apply to the items if the type is a list; otherwise the keyword is omitted.
    """
    made, found = dict(schema), list[Contradiction]()
    for keyword in ("enum", "const"):
        if keyword not in made:
            continue
        values = made[keyword] if keyword == "enum" else [made[keyword]]
        types = _types(made)
        if not values:
            del made[keyword]
            found.append(Contradiction(keyword, "it lists no value"))
        elif types and _contradict(values, types):
            del made[keyword]
            found += _read_by_type(made, keyword, values, types)
    return made, found


def _types(schema: Mapping[str, Any]) -> Sequence[str]:
    given = schema.get("type", ())
    return [given] if isinstance(given, str) else given


def _contradict(values: Sequence[Any], types: Sequence[str]) -> bool:
    """Return True if no value has one of the types.

    A null among other values is ignored, unless null is the only type.
    """
    fitting = [each for each in values if any(_is_of(each, name) for name in types)]
    if any(each is not None for each in fitting):
        return False
    return not fitting or (set(types) != {"null"} and any(each is not None for each in values))


def _is_of(value: Any, name: str) -> bool:
    if name == "integer":
        return kind_of(value) == "number" and (isinstance(value, int) or value.is_integer())
    return kind_of(value) == name


def _read_by_type(
    made: dict[str, Any], keyword: str, values: Sequence[Any], types: Sequence[str]
) -> list[Contradiction]:
    """Convert the values to one of the types, add them to `made`, and return the changes.

    `made` is the schema without the keyword. If no value can be converted, the values are added for the items, if
    the type allows a list whose items have one schema. If not, the keyword stays omitted.
    """
    wanted = f"no value is of type {' or '.join(map(repr, types))}"
    converted = [new for each in values for new in _converted(each, types)]
    if any(each is not None for each in converted):
        made[keyword] = converted if keyword == "enum" else converted[0]
        return [Contradiction(keyword, f"{wanted}, read as {', '.join(map(repr, converted)):.60}")]
    items = made.get("items", {})
    items = {} if items is True else items
    if "array" not in types or "prefixItems" in made or not isinstance(items, Mapping):
        return [Contradiction(keyword, wanted)]
    of_items = {"enum": [each for each in values if each is not None]}
    both = {"allOf": [items, of_items]} if "enum" in items or "const" in items else {**items, **of_items}
    made["items"], inside = without_contradictions(both)
    return [Contradiction(keyword, "no value is a list, read as values of the items"), *inside]


def _converted(value: Any, types: Sequence[str]) -> Iterator[Any]:
    """Yield the value, converted to the first type that can represent it; yield nothing if no type can."""
    for name in types:
        if name == "string" and isinstance(value, int | float):
            yield json.dumps(value)
            return
        read = _read(value) if isinstance(value, str) else value
        if (value is None or name in _WRITTEN_IN_QUOTES) and _is_of(read, name):
            yield int(read) if name == "integer" else read
            return


_WRITTEN_IN_QUOTES: Final = ("integer", "number", "boolean")

MAX_LITERAL: Final = 64
"""Maximum number of characters of a number in quotes; longer texts stay texts."""


def _read(text: str) -> Any:
    """Return the number or boolean that a text spells, or else the text."""
    try:
        value = json.loads(text) if len(text) <= MAX_LITERAL else text
    except ValueError:
        return text
    return value if isinstance(value, int | float) and math.isfinite(value) else text
