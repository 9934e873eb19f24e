"""Grammar and validation of a schema agree, or the difference is documented."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runner.errors import BadOption
from runner.options import Constraint
from runner.parsing.call_grammar import not_enforced as not_enforced_of_tool
from runner.parsing.call_reader import CallReader
from runner.parsing.schema_grammar import answer_constraint, not_enforced
from runner.testing.environment_linter.random_values import random_arguments, random_value
from runner.tools.external_tools import tools_of
from runner.tools.modern_schema import modern
from runner.tools.tool import Tool
from runner.tools.validators import validator_of
from tests import sweeps
from tests.parsing.enforced import accepts, every_class, form_of, required, written
from tests.parsing.expected_values import as_json, expected_arguments, expected_forms, repeats_a_key, unexplained
from tests.parsing.schema_cases import PUBLIC, SUITE, SuiteCase, schemas
from tests.parsing.test_call_grammar import holds_its_end, walk

public = pytest.mark.parametrize("name", PUBLIC)
STRING, INTEGER = {"type": "string"}, {"type": "integer"}


def fits(schema: Any, value: Any) -> bool:
    return bool(validator_of(modern(schema).schema).is_valid(value))


def walks(schema: Any, seeds: range) -> Iterator[str]:
    """Generate texts that the grammar of an answer allows."""
    try:
        enforced = answer_constraint(schema)
    except BadOption:
        return
    yield from filter(None, (walk(enforced, random.Random(seed), 20) for seed in seeds))


# --- answers


def assert_allowed(enforced: Constraint, schema: Any, value: Any) -> None:
    """Check that the grammar allows a valid value, unless the page lists it as a value that no grammar allows."""
    forms = expected_forms(schema, value)
    assert not forms or any(accepts(enforced, as_json(form)) for form in forms), (value, forms)


def assert_forbids_the_rest(schema: Any, text: str, unenforced: Sequence[str]) -> None:
    """Check that text which the grammar allows violates only reported keywords."""
    if unenforced and repeats_a_key(text):
        return
    wrong = unexplained(schema, json.loads(text), unenforced)
    assert not wrong, (text, wrong, unenforced)


@pytest.mark.parametrize("case", sweeps.part(SUITE, 3), ids=lambda case: case.name)
def test_grammar_of_an_official_case_agrees_with_its_check(case: SuiteCase) -> None:
    unenforced = not_enforced(case.schema)
    for text in walks(case.schema, range(sweeps.times(6, 1))):
        assert_forbids_the_rest(case.schema, text, unenforced)
    try:
        enforced = answer_constraint(case.schema)
    except BadOption:
        assert not case.valid
        return
    for value in case.valid:
        assert_allowed(enforced, case.schema, value)
    for value in case.invalid:
        if accepts(enforced, as_json(value)):
            assert unenforced, value
            assert not unexplained(case.schema, value, unenforced), value


@settings(max_examples=sweeps.times(500, 60), deadline=None)
@given(schema=schemas(), seed=st.integers(0, 2**32))
def test_random_grammar_forbids_all_that_it_does_not_name(schema: Any, seed: int) -> None:
    unenforced = not_enforced(schema)
    for text in walks(schema, range(seed, seed + 2)):
        assert_forbids_the_rest(schema, text, unenforced)


@settings(max_examples=sweeps.times(500, 60), deadline=None)
@given(schema=schemas(), seed=st.integers(0, 2**32))
def test_random_grammar_allows_valid_values_in_its_order(schema: Any, seed: int) -> None:
    made = modern(schema).schema
    drawn = [random_value(made, random.Random(seed + number)) for number in range(2)]
    valid = [value for value in (None, 2.5, "a", [1], {}, {"a": 1}, *drawn) if fits(schema, value)]
    if valid:
        enforced = answer_constraint(schema)
    for value in valid:
        assert_allowed(enforced, schema, value)


@public
def test_grammar_of_a_public_schema_allows_only_valid_values(name: str) -> None:
    schema, right, wrong = PUBLIC[name]
    enforced = answer_constraint(schema)
    assert not_enforced(schema) == []
    for value in right:
        assert fits(schema, value)
        for text in (as_json(value), json.dumps(value, separators=(",", ":")), json.dumps(value, indent=2)):
            assert accepts(enforced, text), text
    for value in wrong:
        assert not fits(schema, value) or value is None
        assert not accepts(enforced, as_json(value)) or value is None, value
    for text in walks(schema, range(8)):
        assert fits(schema, json.loads(text)), text


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 10}]}, "oneOf"),
        ({"if": {"pattern": "^a"}, "then": {"type": "string"}}, "if"),
        ({"type": "string", "not": {"pattern": "^a"}}, "not"),
        ({"oneOf": [{"required": ["a"]}, {"properties": {"b": INTEGER}, "required": ["b"]}]}, "oneOf of b"),
        ({"if": {"properties": {"a": {"const": "x"}}, "required": ["a"]}, "then": {"required": ["b"]}}, "if of a"),
    ],
    ids=["oneOf", "if", "not", "oneOf of a member", "if of a member"],
)
def test_keyword_that_is_not_enforced_is_named_as_in_the_schema(schema: Any, named: str) -> None:
    assert not_enforced(schema) == [named]


OVERLAPS: list[tuple[dict[str, Any], list[str]]] = [
    # A member that also matches a pattern could be written a second time, with a value that only the pattern allows.
    ({"properties": {"ab": {"minimum": 3}}, "patternProperties": {"^a": {"type": "number"}}}, ["patternProperties"]),
    ({"properties": {"ab": False}, "patternProperties": {"b$": {}}}, ["patternProperties"]),
    ({"properties": {"ab": {}}, "allOf": [{"patternProperties": {"^a": INTEGER}}]}, []),
    ({"properties": {"ab": INTEGER}, "patternProperties": {"^a": INTEGER}}, []),
    ({"properties": {"ab": {}}, "patternProperties": {"^a": INTEGER}}, []),
    ({"properties": {"ab": {"minimum": 3}}, "patternProperties": {"^x": INTEGER}}, []),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "named"), OVERLAPS, ids=str)
def test_pattern_of_a_named_member_is_enforced_or_reported(schema: dict[str, Any], named: list[str]) -> None:
    schema = {"type": "object", "additionalProperties": False, **schema}
    assert not_enforced(schema) == named
    for text in walks(schema, range(20)):
        assert named or fits(schema, json.loads(text)), text


def test_members_that_a_condition_looked_at_are_unevaluated() -> None:
    condition = {"if": {"properties": {"a": {"const": "x"}}, "required": ["a"]}}
    members = answer_constraint({**condition, "else": {"properties": {"b": {}}}, "unevaluatedProperties": False})
    assert accepts(members, '{"a": "x"}')
    assert accepts(members, '{"b": 1}')
    assert not accepts(members, '{"a": "y"}')
    items = answer_constraint({"if": {"prefixItems": [{"const": "x"}]}, "unevaluatedItems": False})
    assert accepts(items, '["x"]')
    assert not accepts(items, '["y"]')


LISTED_NAMES = {"propertyNames": {"enum": ["a", "kind", "x"]}, "additionalProperties": INTEGER, "type": "object"}


def test_member_that_is_forbidden_has_no_unnamed_form() -> None:
    for schema, named in (
        ({**LISTED_NAMES, "dependentRequired": {"kind": ["a"]}}, []),
        ({**LISTED_NAMES, "properties": {"a": {}, "kind": False}}, []),
        ({**LISTED_NAMES, "propertyNames": {"maxLength": 4}, "properties": {"kind": False}}, ["propertyNames"]),
    ):
        assert not_enforced(schema) == named
        enforced = answer_constraint(schema)
        assert accepts(enforced, '{"a": 1, "x": 2}')
        assert not accepts(enforced, '{"kind": 1}')


@pytest.mark.parametrize("second", ["time", "uri", "uuid"])
def test_second_format_of_a_string_is_reported(second: str) -> None:
    form = form_of("JSON object")
    one = {"type": "string", "format": "date"}
    both = {"allOf": [one, {"format": second}]}
    assert (not_enforced(one), not_enforced(both)) == ([], ["format"])
    assert not_enforced({"type": "object", "propertyNames": one}) == []
    assert not_enforced({"type": "object", "propertyNames": both}) == ["propertyNames"]
    assert not_enforced_of_tool(form, tool_of({"type": "object", "properties": {"a": both}})) == ["format of a"]


def test_unsatisfiable_schema_is_refused_by_name() -> None:
    impossible = {"allOf": [{"type": "string"}, {"type": "integer"}]}
    for schema in (False, impossible, {"type": "integer", "minimum": 2, "maximum": 1}):
        with pytest.raises(
            BadOption, match=r"Sampling\(schema=\.\.\.\): the whole value has a schema that allows nothing"
        ):
            answer_constraint(schema)


# --- calls


def tool_of(schema: Any) -> Tool:
    (tool,) = tools_of([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    return tool


@pytest.mark.parametrize("shape", PUBLIC)
@every_class
def test_call_of_a_public_schema_is_enforced(name: str, shape: str) -> None:
    form, (schema, right, wrong) = form_of(name), PUBLIC[shape]
    tool = tool_of(schema)
    enforced, unenforced = required(form, [tool], parallel=False), not_enforced_of_tool(form, tool)
    for arguments in right:
        assert accepts(enforced, written(form, ("f", arguments))), arguments
    for arguments in wrong:
        if isinstance(arguments, dict) and not unenforced and not lost(form, arguments, schema):
            assert not accepts(enforced, written(form, ("f", arguments))), arguments


def lost(form: Any, arguments: dict[str, Any], schema: Any) -> bool:
    """Return whether the format cannot distinguish the arguments from valid ones, such as 5 from an unquoted "5"."""
    (call,) = CallReader(form).read(written(form, ("f", arguments)), {"f": schema}).calls
    return call.arguments != arguments


@pytest.mark.sample_cases(3)
@every_class
@settings(max_examples=sweeps.times(100, 8), deadline=None)
@given(schema=schemas(), seed=st.integers(0, 2**32))
@example(schema={"if": {"type": "object", "unevaluatedProperties": True}, "then": False}, seed=0)
@example(schema={"anyOf": [False, {"properties": {"a": {"type": "array", "contains": False}}}]}, seed=0)
@example(schema={"additionalProperties": {"type": "array", "contains": False}, "unevaluatedProperties": False}, seed=0)
def test_random_call_of_a_grammar_passes_validation(name: str, schema: Any, seed: int) -> None:
    form, tool = form_of(name), tool_of({**schema, "type": "object"})
    try:
        enforced = required(form, [tool], parallel=False)
    except BadOption:
        return
    text = walk(enforced, random.Random(seed), 30)
    if not text:
        return
    (call,) = CallReader(form).read(text, {"f": tool.parameters}).calls
    if str(call.error).endswith("is given twice"):
        return  # a grammar cannot forbid a repeated key that the schema does not name
    assert call.error is None, text
    if not holds_its_end(form, call.arguments):
        wrong = unexplained(tool.parameters, call.arguments, not_enforced_of_tool(form, tool))
        assert not wrong, (call.arguments, wrong)


@pytest.mark.parametrize("name", ["JSON object", "raw strings"])
@settings(max_examples=sweeps.times(300, 20), deadline=None)
@given(schema=schemas(), seed=st.integers(0, 2**32))
def test_random_grammar_allows_valid_arguments(name: str, schema: Any, seed: int) -> None:
    form, tool = form_of(name), tool_of({**schema, "type": "object"})
    drawn = [random_arguments(tool.parameters, random.Random(seed + number)) for number in range(2)]
    for arguments in (each for each in ({}, *drawn) if fits(tool.parameters, each)):
        enforced = required(form, [tool], parallel=False)
        forms = expected_arguments(tool.parameters, arguments)
        assert not forms or any(accepts(enforced, written(form, ("f", each))) for each in forms), (arguments, forms)


NOTHING_FITS: list[dict[str, Any]] = [
    {"required": ["a"], "maxProperties": 0},
    {"required": ["a", "b", "a"], "maxProperties": 1},
    {"allOf": [{"required": ["a"]}, {"maxProperties": 0}]},
    {"properties": {"a": {"type": "object", "required": ["x"], "maxProperties": 0}}, "required": ["a"]},
    {"propertyNames": False, "required": ["a"]},
    {"propertyNames": {"maxLength": 1}, "required": ["ab"]},
    {"additionalProperties": False, "properties": {"a": {}}, "minProperties": 2},
    {"additionalProperties": False, "patternProperties": {"^a": False}, "minProperties": 1},
    {"dependentRequired": {"a": ["b", "c"]}, "required": ["a"], "maxProperties": 2},
    {
        "properties": {"a": {}, "kind": {}},
        "unevaluatedProperties": False,
        "minProperties": 2,
        "propertyNames": {"maxLength": 2},
    },
    {
        "properties": {"a": {}, "kind": {}},
        "additionalProperties": False,
        "minProperties": 2,
        "propertyNames": {"enum": ["a"]},
    },
]


@pytest.mark.parametrize("schema", NOTHING_FITS, ids=as_json)
def test_schema_without_valid_objects_is_refused(schema: dict[str, Any]) -> None:
    whole = {**schema, "type": "object"}
    with pytest.raises(BadOption, match="no object fits its schema"):
        required(form_of("JSON object, escaped"), [tool_of(whole)], parallel=False)
    with pytest.raises(BadOption, match="a schema that allows nothing"):
        answer_constraint(whole)


@every_class
def test_two_unnamed_properties_are_checked_afterwards(name: str) -> None:
    form = form_of(name)
    for schema, unenforced in (
        ({"minProperties": 2}, True),
        ({"minProperties": 1}, False),
        ({"properties": {"a": {}}, "required": ["a"], "minProperties": 2}, False),
        ({"properties": {"a": {}}, "minProperties": 2}, True),
    ):
        tool = tool_of({**schema, "type": "object"})
        required(form, [tool], parallel=False)
        named = any("minProperties" in str(each) for each in not_enforced_of_tool(form, tool))
        assert named is unenforced, schema


READ: list[tuple[Any, Any]] = [
    ({"type": "string", "anyOf": [{"pattern": "^5"}, {"maxLength": 1}]}, "5"),
    ({"$ref": "#/$defs/number", "description": "A number."}, 5),
    ({"allOf": [{"type": ["string", "integer"]}, {"type": "integer"}]}, 5),
    ({"type": ["string", "null"], "not": {"const": "x"}}, "5"),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, 5),
    ({"if": {"type": "integer"}, "then": False, "else": {"type": "string"}}, "5"),
    ({"enum": ["5", "6"]}, "5"),
    ({"enum": [5, "auto"]}, 5),
    ({"type": "number", "minimum": 1}, 5),
    ({}, 5),
    (True, 5),
]


@pytest.mark.parametrize(("schema", "value"), READ, ids=str)
def test_bare_text_is_converted_by_all_keywords_together(schema: Any, value: Any) -> None:
    form = form_of("raw strings")
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": {"number": {"type": "integer"}}}
    (call,) = CallReader(form).read(written(form, ("f", {"a": "5"})), {"f": parameters}).calls
    assert call.arguments == {"a": value}
    assert type(call.arguments["a"]) is type(value)


DEPENDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # A schema, and arguments whose types depend on one another: with another type, the reader would read "5" as 5.
    ({"oneOf": [{"properties": {"page": STRING}, "required": ["page"]}, {"required": ["base"]}]}, {"page": "5"}),
    ({"oneOf": [{"properties": {"page": STRING}, "required": ["page"]}, {"required": ["base"]}]}, {"base": 5}),
    (
        {"oneOf": [
            {"properties": {"by": {"const": "id"}, "value": STRING}, "required": ["by", "value"]},
            {"properties": {"by": {"const": "number"}, "value": INTEGER}, "required": ["by", "value"]},
        ]},
        {"by": "id", "value": "5"},
    ),
    (
        {"oneOf": [
            {"properties": {"by": {"const": "id"}, "value": STRING}, "required": ["by", "value"]},
            {"properties": {"by": {"const": "number"}, "value": INTEGER}, "required": ["by", "value"]},
        ]},
        {"by": "number", "value": 5},
    ),
    (
        {"properties": {"mode": {"enum": ["zip", "count"]}, "of": {}}, "if": {"properties": {"mode": {"const": "zip"}}},
         "then": {"properties": {"of": STRING}}, "else": {"properties": {"of": INTEGER}}},
        {"mode": "zip", "of": "5"},
    ),
    ({"properties": {"a": {}, "b": {}}, "dependentSchemas": {"b": {"properties": {"a": STRING}}}}, {"a": "5", "b": 1}),
    ({"properties": {"a": {}, "b": {}}, "anyOf": [{"properties": {"a": STRING, "b": STRING}}]}, {"a": "5", "b": "1"}),
    ({"properties": {"a": {"type": ["string", "integer"]}}, "not": {"properties": {"a": INTEGER}}}, {"a": "5"}),
    ({"properties": {"a": {}}, "allOf": [{"anyOf": [{"properties": {"a": {"pattern": "^5$"}}}]}]}, {"a": 5}),
    ({"properties": {"a": {"maxLength": 3, "maximum": 3}}}, {"a": "5"}),
    ({"properties": {f"a{n}": {"not": INTEGER} for n in range(9)}}, {f"a{n}": "5" for n in range(9)}),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "arguments"), DEPENDS, ids=str)
@every_class
def test_types_that_depend_on_other_arguments_are_read(name: str, schema: Any, arguments: dict[str, Any]) -> None:
    form = form_of(name)
    (call,) = CallReader(form).read(written(form, ("f", arguments)), {"f": {"type": "object", **schema}}).calls
    assert call.arguments == arguments
    assert list(map(type, call.arguments.values())) == list(map(type, arguments.values()))


def test_an_object_that_does_not_fit_is_not_read_as_a_string() -> None:
    form = form_of("raw strings")
    schema = {"type": "object", "properties": {"a": {"properties": {"x": INTEGER}, "required": ["x"]}}}
    (call,) = CallReader(form).read(written(form, ("f", {"a": {}})), {"f": schema}).calls
    assert call.arguments == {"a": {}}
