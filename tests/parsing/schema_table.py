"""The table of the page on JSON schemas: for each keyword and notation, a test of whether it is enforced."""

# ruff: noqa: E501  # one line per table row

from __future__ import annotations

from typing import Any, Final, NamedTuple

from jsonschema_specifications import REGISTRY

from runner.parsing.call_grammar import not_enforced as not_enforced_of_tool
from runner.parsing.schema_grammar import answer_constraint, not_enforced
from runner.parsing.turn_format import CallFormat, TaggedArguments
from runner.tools.external_tools import tools_of
from runner.tools.modern_schema import modern
from runner.tools.validators import validator_of
from tests.parsing.enforced import accepts, form_of, required, written
from tests.parsing.expected_values import as_json

__all__ = ["IGNORED", "PROBES", "keywords", "table"]


class Probe(NamedTuple):
    """A schema with a keyword, a value that only this keyword forbids, and a note for the table."""

    schema: Any
    wrong: Any
    remark: str = ""
    more: Any = None
    """Keywords that the schema of the arguments needs besides `properties`."""
    wrong_arguments: Any = None
    """Forbidden arguments, if they differ from `wrong`."""


_OBJECT: Final = {"type": "object"}
_NUMBER: Final = {"type": "number"}
_STRING: Final = {"type": "string"}
_ARRAY: Final = {"type": "array"}

PROBES: Final[dict[str, Probe]] = {
    "type": Probe({"type": "integer"}, True, "also a list of types; an integer is written without a decimal point"),
    "enum": Probe({"enum": ["x", "y"]}, "z", "also beside any other keyword"),
    "const": Probe({"const": "x"}, "z"),
    "$ref": Probe({"$ref": "#/$defs/x", "$defs": {"x": {"type": "integer"}}}, True, "with the keywords beside it"),
    "$dynamicRef": Probe(
        {"$dynamicRef": "#x", "$defs": {"x": {"$dynamicAnchor": "x", "type": "integer"}}}, True, "treated like `$ref`"
    ),
    "allOf": Probe({"allOf": [{"type": "integer"}, {"minimum": 1}]}, 0),
    "anyOf": Probe(
        {**_OBJECT, "anyOf": [{"required": ["b"]}, {"required": ["c"]}]},
        {},
        "up to 64 combinations of the alternatives that apply to one value",
    ),
    "oneOf": Probe(
        {**_OBJECT, "oneOf": [{"required": ["b"]}, {"required": ["c"]}]},
        {"b": 1, "c": 1},
        "as `anyOf`; that no second alternative fits is enforced where `not` is enforced",
    ),
    "not": Probe(
        {**_OBJECT, "properties": {"b": {}}, "not": {"required": ["b"]}},
        {"b": 1},
        "enforced for types, bounds, lengths, names and listed values; otherwise checked",
    ),
    "if": Probe(
        {"type": "integer", "if": {"minimum": 5}, "then": {"maximum": 6}}, 7, "enforced where `not` is enforced"
    ),
    "then": Probe({"type": "integer", "if": {"minimum": 5}, "then": {"maximum": 6}}, 7),
    "else": Probe({"type": "integer", "if": {"minimum": 5}, "else": {"maximum": 2}}, 3),
    "minimum": Probe({**_NUMBER, "minimum": 1}, 0, "bounds with an exponent, or of 10^15 and more, are checked"),
    "maximum": Probe({**_NUMBER, "maximum": 1}, 2),
    "exclusiveMinimum": Probe({**_NUMBER, "exclusiveMinimum": 1}, 1),
    "exclusiveMaximum": Probe({**_NUMBER, "exclusiveMaximum": 1}, 1),
    "multipleOf": Probe(
        {**_NUMBER, "multipleOf": 0.5}, 0.3, "enforced only for integers between bounds that are less than 256 apart"
    ),
    "minLength": Probe({**_STRING, "minLength": 2}, "x", "enforced up to 16, or up to 64 if there is a `maxLength`"),
    "maxLength": Probe(
        {**_STRING, "maxLength": 2},
        "xyz",
        "enforced up to 64, since compiling the grammar takes 10 to 20 ms for each character",
    ),
    "pattern": Probe(
        {**_STRING, "pattern": "^[a-c]+$"},
        "d",
        "enforced for one pattern without a length; not with look-around, back references, or repetitions above 128",
    ),
    "format": Probe(
        {**_STRING, "format": "date"},
        "soon",
        "enforced: `date`, `time`, `date-time`, `uuid`, `ipv4`, `email`; no format is checked",
    ),
    "prefixItems": Probe(
        {**_ARRAY, "prefixItems": [{"type": "integer"}]}, [True], "no further items, unless `items` allows them"
    ),
    "items": Probe({**_ARRAY, "items": {"type": "integer"}}, [1, True]),
    "minItems": Probe({**_ARRAY, "items": {}, "minItems": 2}, [1], "enforced up to 4096"),
    "maxItems": Probe({**_ARRAY, "items": {}, "maxItems": 1}, [1, 2], "enforced up to 4096"),
    "uniqueItems": Probe({**_ARRAY, "items": {}, "uniqueItems": True}, [1, 1]),
    "contains": Probe({**_ARRAY, "contains": {"const": 5}}, [1]),
    "minContains": Probe(
        {**_ARRAY, "contains": {"const": 5}, "minContains": 2},
        [5, 1],
        "enforced is only that the list has this number of items",
    ),
    "maxContains": Probe({**_ARRAY, "contains": {"const": 5}, "maxContains": 1}, [5, 5]),
    "unevaluatedItems": Probe(
        {**_ARRAY, "prefixItems": [{}], "unevaluatedItems": {"type": "integer"}},
        [1, True],
        "not enforced beside `contains` or `not`",
    ),
    "properties": Probe(
        {**_OBJECT, "properties": {"b": {"type": "integer"}}}, {"b": True}, "in the order of the schema"
    ),
    "required": Probe({**_OBJECT, "required": ["b"]}, {}, "also names that are not in `properties`"),
    "additionalProperties": Probe(
        {**_OBJECT, "additionalProperties": {"type": "integer"}},
        {"b": True},
        "without this keyword, an object with `properties` has no other members",
    ),
    "patternProperties": Probe(
        {**_OBJECT, "patternProperties": {"^b": {"type": "integer"}}, "additionalProperties": False},
        {"b": True},
        "names are only checked if there are several patterns, other members, or a pattern that matches a name of `properties`",
        wrong_arguments={"c": 1},  # the name is forbidden
    ),
    "propertyNames": Probe(
        {**_OBJECT, "propertyNames": {"pattern": "^[a-c]+$"}}, {"d": 1}, more={"additionalProperties": True}
    ),
    "minProperties": Probe(
        {**_OBJECT, "properties": {"b": {}, "c": {}}, "minProperties": 1},
        {},
        "enforced up to some 30 names in `properties`; checked if two or more other members are needed, since a key may be written twice",
    ),
    "maxProperties": Probe(
        {**_OBJECT, "properties": {"b": {}, "c": {}}, "maxProperties": 1}, {"b": 1, "c": 1}, "as `minProperties`"
    ),
    "dependentRequired": Probe(
        {**_OBJECT, "properties": {"b": {}, "c": {}}, "dependentRequired": {"b": ["c"]}}, {"b": 1}
    ),
    "dependentSchemas": Probe(
        {**_OBJECT, "properties": {"b": {}, "c": {}}, "dependentSchemas": {"b": {"required": ["c"]}}}, {"b": 1}
    ),
    "unevaluatedProperties": Probe(
        {**_OBJECT, "anyOf": [{"properties": {"b": {}}}], "unevaluatedProperties": False},
        {"c": 1},
        "considers one alternative at a time",
    ),
}

IGNORED: Final = {
    "$id", "$schema", "$anchor", "$dynamicAnchor", "$vocabulary", "$comment", "$defs", "title", "description", "default",
    "deprecated", "readOnly", "writeOnly", "examples", "contentEncoding", "contentMediaType", "contentSchema",
}  # fmt: skip
"""Keywords that forbid nothing. The first ones only define targets of references."""

NOTATIONS: Final = {"JSON": "JSON object", "strings without quotes": "raw strings", "own notation": "own notation"}


def keywords() -> set[str]:
    """All keywords of dialect 2020-12, from its meta schemas."""
    found: set[str] = set()
    for address in REGISTRY:
        if "/draft/2020-12/meta/" in address:
            found |= REGISTRY.contents(address)["properties"].keys()
    return found


def table() -> list[str]:
    """Return the lines of the table."""
    lines = ["| keyword | " + " | ".join(NOTATIONS) + " | an answer | limits |", "|---" * (len(NOTATIONS) + 3) + "|"]
    for keyword, probe in PROBES.items():
        cells = [_of_call(form_of(name), keyword, probe) for name in NOTATIONS.values()]
        lines.append(f"| `{keyword}` | " + " | ".join([*cells, _of_answer(keyword, probe), probe.remark]) + " |")
    return [line.replace("|  |", "| |") for line in lines]


def _of_call(form: CallFormat, keyword: str, probe: Probe) -> str:
    parameters = {"type": "object", "properties": {"a": probe.schema}, "required": ["a"]}
    definitions = {"$defs": probe.schema["$defs"]} if "$defs" in probe.schema else {}
    inside = _of_arguments(form, keyword, {**parameters, **definitions}, {"a": probe.wrong})
    if probe.schema.get("type") != "object" or not isinstance(form.arguments, TaggedArguments):
        return inside
    # Arguments between tags have their own rules. Objects inside them follow the rules of JSON.
    wrong = probe.wrong if probe.wrong_arguments is None else probe.wrong_arguments
    whole = _of_arguments(form, keyword, {**probe.schema, **(probe.more or {})}, wrong)
    return inside if whole == inside else f"{inside} (arguments: {whole})"


def _of_arguments(form: CallFormat, keyword: str, parameters: Any, wrong: Any) -> str:
    (tool,) = tools_of([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    lets_through = accepts(required(form, [tool]), written(form, ("f", wrong)))
    unenforced = _named(keyword, not_enforced_of_tool(form, tool))
    assert unenforced or not lets_through, (keyword, form)
    checked = not validator_of(modern(tool.parameters).schema).is_valid(wrong)
    return "enforced" if not lets_through else "checked" if checked else "not"


def _of_answer(keyword: str, probe: Probe) -> str:
    lets_through = accepts(answer_constraint(probe.schema), as_json(probe.wrong))
    assert not lets_through or _named(keyword, not_enforced(probe.schema)), keyword
    return "named" if lets_through else "enforced"


def _named(keyword: str, unenforced: list[str]) -> bool:
    words = {"minContains": "contains", "maxContains": "contains"}
    return any(each.startswith(words.get(keyword, keyword)) for each in unenforced)
