"""Random values in place of the model in `deltarunner check` fit their schemas."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from runner.testing.environment_linter.random_values import random_arguments, random_text, random_value
from runner.tools.tool import Tool


def test_the_random_model_calls_every_tool_with_arguments_that_fit() -> None:
    def many(a: int, b: list[str], c: dict[str, float], d: bool, e: str | None) -> None:
        """Take many arguments."""

    tool = Tool(many)
    for seed in range(20):
        assert tool.arguments(random_arguments(tool.parameters, random.Random(seed))).keys() == {
            "a",
            "b",
            "c",
            "d",
            "e",
        }


SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "oneOf": [{"required": ["b"]}]},
    {"type": "string", "pattern": "^[A-Z]{2}-\\d+$"},
    {"type": "string", "minLength": 12, "maxLength": 12},
    {"type": "string", "format": "date"},
    {"type": "number", "exclusiveMinimum": 2, "maximum": 2.5},
    {"type": "integer", "multipleOf": 7, "minimum": 50, "maximum": 60},
    {"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "boolean"}, "minItems": 3},
    {"type": "object", "patternProperties": {"^x": {"const": 1}}, "additionalProperties": False, "minProperties": 2},
    {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "object", "required": ["children"], "properties": {
        "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}}},
    {"if": {"type": "string"}, "then": {"const": "x"}, "else": {"type": "integer"}},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_random_values_fit_their_schema(schema: Any) -> None:
    for seed in range(20):
        value = random_value(schema, random.Random(seed))
        assert Draft202012Validator(schema).is_valid(value), value


@pytest.mark.parametrize("pattern", ["^(Yes|No), because [a-z ]{5,40}\\.$", "[0-9]{3}-[0-9]{4}", "^[^\\s]+@x$", "a.c"])
def test_random_texts_match_their_pattern(pattern: str) -> None:
    assert all(re.search(pattern, random_text(pattern, random.Random(seed))) for seed in range(20))
