"""Schemas that people and programs write for tools, and random schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

from hypothesis import strategies as st

__all__ = ["PUBLIC", "SUITE", "SuiteCase", "schemas"]


class SuiteCase(NamedTuple):
    """A schema of the JSON-Schema-Test-Suite."""

    name: str
    schema: Any
    valid: list[Any]
    invalid: list[Any]


SUITE: Final = [
    SuiteCase(*case)
    for case in json.loads(
        (Path(__file__).parents[1] / "tools" / "json_schema_suite" / "cases.json").read_text(encoding="utf-8")
    )
]
"""Cases of the draft 2020-12."""

_STRING: Final = {"type": "string"}
_INTEGER: Final = {"type": "integer"}

PUBLIC: Final[dict[str, tuple[Any, list[Any], list[Any]]]] = {
    # Schema, valid arguments and invalid arguments, from MCP servers, pydantic, zod and OpenAPI.
    "one of two required, beside properties (image tools of MCP)": (
        {"type": "object", "properties": {"prompt": _STRING}, "required": ["prompt"],
         "oneOf": [{"required": ["url"]}, {"required": ["data"]}]},
        [{"prompt": "a", "url": "u"}, {"prompt": "a", "data": 1}],
        [{"prompt": "a"}, {"prompt": "a", "url": "u", "data": 1}, {"url": "u"}, 5, [1], None, "text"],
    ),
    "any of two required": (
        {"type": "object", "properties": {"id": _INTEGER, "name": _STRING},
         "anyOf": [{"required": ["id"]}, {"required": ["name"]}], "additionalProperties": False},
        [{"id": 1}, {"name": "a"}, {"id": 1, "name": "a"}],
        [{}, {"id": "1"}, {"other": 1, "id": 1}],
    ),
    "required without properties": (
        {"type": "object", "required": ["a", "b"]},
        [{"a": 1, "b": None}, {"a": [], "b": {"c": 1}}],
        [{}, {"a": 1}],
    ),
    "siblings of a reference (pydantic)": (
        {"type": "object", "properties": {"size": {"$ref": "#/$defs/Size", "maximum": 5, "description": "Of it."}},
         "required": ["size"], "$defs": {"Size": {"type": "integer", "minimum": 1}}},
        [{"size": 1}, {"size": 5}],
        [{"size": 6}, {"size": 0}, {"size": "5"}],
    ),
    "optional by anyOf null (pydantic)": (
        {"type": "object", "properties": {"limit": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}],
         "default": None, "title": "Limit"}}, "title": "Arguments"},
        [{}, {"limit": None}, {"limit": 300}],
        [{"limit": 0}, {"limit": "1"}],
    ),
    "discriminated union (pydantic)": (
        {"type": "object", "properties": {"shape": {
            "discriminator": {"propertyName": "kind", "mapping": {"c": "#/$defs/C", "s": "#/$defs/S"}},
            "oneOf": [{"$ref": "#/$defs/C"}, {"$ref": "#/$defs/S"}]}}, "required": ["shape"],
         "$defs": {"C": {"type": "object", "properties": {"kind": {"const": "c"}, "r": {"type": "number"}},
                         "required": ["kind", "r"]},
                   "S": {"type": "object", "properties": {"kind": {"const": "s"}, "side": _INTEGER},
                         "required": ["kind", "side"]}}},
        [{"shape": {"kind": "c", "r": 1.5}}, {"shape": {"kind": "s", "side": 2}}],
        [{"shape": {"kind": "c", "side": 2}}, {"shape": {"kind": "x", "r": 1.5}}, {"shape": {"r": 1.5}}],
    ),
    "intersection (zod)": (
        {"type": "object", "properties": {"x": {"allOf": [
            {"type": "object", "properties": {"a": _STRING}, "required": ["a"]},
            {"type": "object", "properties": {"b": _INTEGER}, "required": ["b"]}]}}, "required": ["x"],
         "additionalProperties": False, "$schema": "http://json-schema.org/draft-07/schema#"},
        [{"x": {"a": "s", "b": 1}}],
        [{"x": {"a": "s"}}, {"x": {"b": 1}}, {"x": {"a": 1, "b": 1}}],
    ),
    "tuple of draft 7 (zod)": (
        {"type": "object", "properties": {"at": {"type": "array", "minItems": 2, "maxItems": 2,
         "items": [{"type": "number"}, _STRING], "additionalItems": False}}, "required": ["at"]},
        [{"at": [1.5, "a"]}],
        [{"at": [1.5]}, {"at": ["a", 1.5]}, {"at": [1.5, "a", 2]}],
    ),
    "record (zod)": (
        {"type": "object", "properties": {"env": {"type": "object", "additionalProperties": _STRING,
         "propertyNames": {"pattern": "^[A-Z]+$"}}}, "required": ["env"]},
        [{"env": {}}, {"env": {"HOME": "/"}}],
        [{"env": {"HOME": 1}}, {"env": {"home": "/"}}],
    ),
    "nullable and exclusive bounds as in OpenAPI 3.0": (
        {"type": "object", "properties": {"p": {"type": "number", "nullable": True, "minimum": 0,
         "exclusiveMinimum": True, "maximum": 1}}, "required": ["p"]},
        [{"p": None}, {"p": 0.5}, {"p": 1}],
        [{"p": 0}, {"p": 1.5}, {"p": "0.5"}],
    ),
    "conditional": (
        {"type": "object", "properties": {"mode": {"enum": ["file", "text"]}, "path": _STRING, "text": _STRING},
         "required": ["mode"], "if": {"properties": {"mode": {"const": "file"}}}, "then": {"required": ["path"]},
         "else": {"required": ["text"]}},
        [{"mode": "file", "path": "/a"}, {"mode": "text", "text": "a"}],
        [{"mode": "file", "text": "a"}, {"mode": "text"}],
    ),
    "dependent": (
        {"type": "object", "properties": {"card": _INTEGER, "address": _STRING},
         "dependentRequired": {"card": ["address"]}},
        [{}, {"address": "a"}, {"card": 1, "address": "a"}],
        [{"card": 1}],
    ),
    "a type that lists several": (
        {"type": ["object", "null"], "properties": {"v": {"type": ["integer", "boolean", "null"]}}, "required": ["v"]},
        [{"v": 1}, {"v": True}, {"v": None}],
        [{"v": 1.5}, {"v": "1"}],
    ),
    "a tree": (
        {"type": "object", "properties": {"node": {"$ref": "#/definitions/Node"}}, "required": ["node"],
         "definitions": {"Node": {"type": "object", "required": ["value"], "properties": {"value": _INTEGER,
          "next": {"anyOf": [{"$ref": "#/definitions/Node"}, {"type": "null"}]}}, "additionalProperties": False}}},
        [{"node": {"value": 1}}, {"node": {"value": 1, "next": {"value": 2, "next": None}}}],
        [{"node": {"next": None}}, {"node": {"value": 1, "next": {"value": "2"}}}],
    ),
    "booleans for schemas": (
        {"type": "object", "properties": {"any": True, "never": False}, "required": ["any"]},
        [{"any": 1}, {"any": {"a": [None]}}],
        [{}, {"any": 1, "never": 1}],
    ),
}  # fmt: skip


# --- random schemas

NAMES: Final = ("a", "b", "kind")
VALUES: Final = st.sampled_from([None, True, False, 0, 1, -3, 2.5, "a", "", "kind", [], [1], {}, {"a": 1}])
SIZES: Final = st.integers(0, 3)
_LEAVES: Final = (
    st.booleans()
    | st.fixed_dictionaries({"type": st.sampled_from(["string", "integer", "number", "boolean", "null", "array"])})
    | st.fixed_dictionaries({"enum": st.lists(VALUES, min_size=1, max_size=4)})
    | st.fixed_dictionaries({"const": VALUES})
    | st.fixed_dictionaries({}, optional={"minimum": st.integers(-4, 4), "exclusiveMaximum": st.integers(-4, 9)})
    | st.fixed_dictionaries({"type": st.just("integer")}, optional={"minimum": SIZES, "multipleOf": st.just(3)})
    | st.fixed_dictionaries({"type": st.just("string")}, optional={"minLength": SIZES, "maxLength": SIZES})
    | st.fixed_dictionaries({"pattern": st.sampled_from(["^[a-c]+$", "x", "^\\d{2}(-\\d)?$", '^[^"]*$'])})
)


def _with(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=2)
    names = st.lists(st.sampled_from(NAMES), unique=True, max_size=2)
    objects = st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", ["object", "null"]]),
            "properties": st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
            "required": names,
            "additionalProperties": inner,
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "^k.*d$"]), inner, max_size=1),
            "propertyNames": st.just({"maxLength": 2}) | st.just({"enum": ["a", "kind"]}),
            "minProperties": SIZES,
            "maxProperties": SIZES,
            "dependentRequired": st.dictionaries(st.sampled_from(NAMES), names, max_size=1),
            "dependentSchemas": st.dictionaries(st.sampled_from(NAMES), inner, max_size=1),
            "unevaluatedProperties": inner,
        },
    )
    arrays = st.fixed_dictionaries(
        {},
        optional={
            "type": st.just("array"),
            "prefixItems": some,
            "items": inner,
            "minItems": SIZES,
            "maxItems": SIZES,
            "uniqueItems": st.booleans(),
            "contains": inner,
            "unevaluatedItems": inner,
        },
    )
    combined = st.fixed_dictionaries(
        {},
        optional={
            "anyOf": some,
            "oneOf": some,
            "allOf": some,
            "not": inner,
            "if": inner,
            "then": inner,
            "else": inner,
            "$ref": st.sampled_from(["#", "#/$defs/one", "#/$defs/two"]),
        },
    )
    both = st.tuples(objects | arrays, combined).map(lambda pair: {**pair[0], **pair[1]})
    return objects | arrays | both


def schemas() -> st.SearchStrategy[Any]:
    """Generate random schemas of dialect 2020-12, which may refer to themselves and to two other schemas."""
    inner = st.recursive(_LEAVES, _with, max_leaves=6)
    roots = _with(inner)
    return st.tuples(roots, inner, inner).map(lambda all: {**all[0], "$defs": {"one": all[1], "two": all[2]}})
