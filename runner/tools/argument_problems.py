"""Problems of a tool's arguments, one clause each, for the model to read.

Pydantic checks the arguments of tools with type hints, and jsonschema the arguments of tools with a schema. Both are
needed: pydantic refuses values that a schema cannot exclude (3.0 for an int, an invalid date), but it validates only
Python types, and a schema is not a Python type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runner import wording
from runner.tools.validators import any_matches

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

__all__ = ["schema_problems", "typed_problems"]

# Expected values in words for a model, by pydantic's error type. Pydantic's own message is used for other types.
_EXPECTED = {
    **dict.fromkeys(("int_type", "int_from_float"), "an integer"),
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "a boolean",
    "none_required": "null",
    **dict.fromkeys(("list_type", "tuple_type", "set_type", "frozen_set_type"), "a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object"),
    **dict.fromkeys(("dataclass_type", "dataclass_exact_type"), "an object"),
    **dict.fromkeys(("literal_error", "enum"), "{expected}"),
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "below {lt:g}",
    "less_than_equal": "at most {le:g}",
    "multiple_of": "a multiple of {multiple_of:g}",
    "string_too_short": "at least {min_length} characters long",
    "string_too_long": "at most {max_length} characters long",
    "string_pattern_mismatch": "of the pattern {pattern}",
    "too_short": "at least {min_length} long",
    "too_long": "at most {max_length} long",
}


def typed_problems(errors: Iterable[ErrorDetails], raw: Mapping[str, Any]) -> list[str]:
    """Return the clauses for pydantic's errors; `raw` has the arguments as the model wrote them, for the paths.

    All failed alternatives of a union together are one problem.
    """
    expected: dict[tuple[str, str], list[str]] = {}
    clauses: dict[str, None] = {}
    for error in errors:
        path = _path(error["loc"], raw)
        if error["type"] == "missing":
            clauses[wording.missing(_path(error["loc"], raw, missing=True))] = None
        elif error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            clauses[wording.not_a_parameter(path)] = None
        else:
            expected.setdefault((path, _shown(error["input"])), []).append(_expectation(error))
    clauses |= dict.fromkeys(wording.must_be(path, kinds, got) for (path, got), kinds in expected.items())
    return list(clauses)


def _expectation(error: ErrorDetails) -> str:
    template = _EXPECTED.get(error["type"])
    if template is not None:
        return template.format(**error.get("ctx", {}))
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input should ").removeprefix("be ")
    return message[:1].lower() + message[1:]


def _path(location: Sequence[int | str], raw: Any, *, missing: bool = False) -> str:
    """Return the path as the model wrote it, without pydantic's names for the alternatives of a union."""
    path = ""
    for index, step in enumerate(location):
        if isinstance(step, int):
            path += f"[{step}]"
        elif (isinstance(raw, Mapping) and step in raw) or (missing and index == len(location) - 1):
            path += f".{step}" if path else step
        else:
            continue
        raw = _below(raw, step)
    return path or "the arguments"


def _below(value: Any, step: int | str) -> Any:
    try:
        return value[step]
    except (LookupError, TypeError):
        return None


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


_JSON_TYPES = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "a boolean",
    "null": "null",
    "array": "a list",
    "object": "an object",
}


def schema_problems(errors: Iterable[Any]) -> list[str]:
    """Return the clauses for jsonschema's errors."""
    # The dict removes repeated clauses, since two keywords may report the same problem.
    clauses: dict[str, None] = {}
    for error in errors:
        path = re.sub(r"^\.", "", "".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in error.absolute_path))
        clauses |= dict.fromkeys(_schema_clauses(error, path))
    return list(clauses)


def _schema_clauses(error: Any, path: str) -> list[str]:
    inside = f"{path}." if path else ""
    if error.validator == "required":
        return [wording.missing(inside + name) for name in error.validator_value if name not in error.instance]
    if error.validator == "additionalProperties" and error.validator_value is False:
        known, patterns = error.schema.get("properties", {}), error.schema.get("patternProperties", {})
        extra = [name for name in error.instance if name not in known and not any_matches(patterns, name)]
        return [wording.not_a_parameter(inside + name) for name in extra]
    if error.validator == "type":
        kinds = [error.validator_value] if isinstance(error.validator_value, str) else error.validator_value
        return [wording.must_be(path, [_JSON_TYPES[kind] for kind in kinds], _shown(error.instance))]
    if error.validator in ("enum", "const"):
        values = error.validator_value if error.validator == "enum" else [error.validator_value]
        return [wording.must_be(path, [_shown(value) for value in values], _shown(error.instance))]
    return [f"{path or 'the arguments'}: {error.message}"]
