"""Validators for JSON schemas that `modern` converted."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from runner.tools.ecma_patterns import python_pattern

__all__ = ["validator_of"]


def validator_of(schema: Any) -> Any:
    """Return a validator that reports the problems of a value; it ignores `format`."""
    return _validator_class()(schema)


@functools.cache
def _validator_class() -> Any:
    from jsonschema import Draft202012Validator, ValidationError, validators

    def pattern(validator: Any, wanted: str, instance: Any, schema: Any) -> Iterator[Any]:
        # The error shows the pattern of the schema; Python's `$` and `\d` differ, so it is matched in translation.
        if validator.is_type(instance, "string") and not python_pattern(wanted).search(instance):
            yield ValidationError(f"{instance!r} does not match {wanted!r}")

    return validators.extend(Draft202012Validator, {"pattern": pattern})
