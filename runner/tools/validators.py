"""The check of a value against a JSON schema that `modern` made."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from runner.tools.ecma_patterns import python_pattern

__all__ = ["validator_of"]


def validator_of(schema: Any) -> Any:
    """What finds the problems of a value; it looks at no `format`."""
    return _validator_class()(schema)


@functools.cache
def _validator_class() -> Any:
    from jsonschema import Draft202012Validator, ValidationError, validators

    def pattern(validator: Any, wanted: str, instance: Any, schema: Any) -> Iterator[Any]:
        # As the schema has it, so that a model reads the author's pattern; Python would take `$` and `\d` otherwise.
        if validator.is_type(instance, "string") and not python_pattern(wanted).search(instance):
            yield ValidationError(f"{instance!r} does not match {wanted!r}")

    return validators.extend(Draft202012Validator, {"pattern": pattern})
