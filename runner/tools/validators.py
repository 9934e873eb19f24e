"""Validators for JSON schemas that `modern_schema` converted."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from runner.tools.ecma_patterns import matches, python_pattern

__all__ = ["any_matches", "validator_of"]


def validator_of(schema: Any) -> Any:
    """Return a validator that reports the problems of a value; it ignores `format`."""
    return _validator_class()(schema)


def any_matches(patterns: Iterable[str], name: str) -> bool:
    """Return whether a name matches a key of `patternProperties`, which `modern_schema` translated to Python."""
    return any(matches(re.compile(pattern), name) for pattern in patterns)


@functools.cache
def _validator_class() -> Any:
    from jsonschema import Draft202012Validator, ValidationError, validators

    # A model wrote the texts that are matched, so they are matched in linear time. jsonschema itself calls `re`, which
    # may take hours.
    def pattern(validator: Any, wanted: str, instance: Any, schema: Any) -> Iterator[Any]:
        # The error shows the pattern of the schema. A translation is matched, since Python's `$` and `\d` differ.
        if validator.is_type(instance, "string") and not matches(python_pattern(wanted), instance):
            yield ValidationError(f"{instance!r} does not match {wanted!r}")

    def of_patterns(validator: Any, wanted: Mapping[str, Any], instance: Any, schema: Any) -> Iterator[Any]:
        for name, value in instance.items() if validator.is_type(instance, "object") else ():
            for each, inner in wanted.items():
                if any_matches([each], name):
                    yield from validator.descend(value, inner, path=name, schema_path=each)

    def additional(validator: Any, wanted: Any, instance: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
        if patterns := schema.get("patternProperties"):
            schema = {key: value for key, value in schema.items() if key != "patternProperties"}
            if validator.is_type(instance, "object"):
                instance = {name: value for name, value in instance.items() if not any_matches(patterns, name)}
        yield from Draft202012Validator.VALIDATORS["additionalProperties"](validator, wanted, instance, schema)

    own = {"pattern": pattern, "patternProperties": of_patterns, "additionalProperties": additional}
    return validators.extend(Draft202012Validator, own)
