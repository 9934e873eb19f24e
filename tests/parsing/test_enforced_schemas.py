"""JSON schemas in grammars of learnt formats, and tools whose calls a format cannot write."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import xgrammar

from runner.errors import BadOption
from runner.parsing.argument_rules import GrammarRequirement, NoGrammar, ends_of_strings
from runner.parsing.call_grammar import constraint, enforceable
from runner.parsing.schema_grammar import answer_constraint
from runner.parsing.turn_format import CallFormat, TaggedArguments
from runner.tools.schema_faults import uncallable
from runner.tools.tool import Tool
from tests.parsing.enforced import (
    ADD,
    BYTES,
    END,
    TOOLS,
    accepts,
    every_class,
    form_of,
    required,
    written,
)


def schema_tool(name: str, parameters: dict[str, Any]) -> Tool:
    return Tool(print, name=name, description="A tool.", parameters={"type": "object", **parameters}, raw=True)


@every_class
@pytest.mark.parametrize(
    "bounds",
    [{"minimum": 1, "maximum": 3}, {"exclusiveMinimum": 0, "exclusiveMaximum": 4}],
    ids=["inclusive", "exclusive"],
)
def test_integer_stays_within_its_bounds(name: str, bounds: dict[str, int]) -> None:
    tool = schema_tool("pick", {"properties": {"number": {"type": "integer", **bounds}}, "required": ["number"]})
    form, enforced = form_of(name), required(form_of(name), [tool])
    taken = [number for number in range(-1, 12) if accepts(enforced, written(form, ("pick", {"number": number})))]
    assert taken == [1, 2, 3]


RARE: dict[str, tuple[list[str], list[str]]] = {
    # The page lists these valid values as values that no grammar allows.
    "date": (["2024-02-28", "2024-01-30"], ["2024-02-29"]),
    "time": (["12:00:00Z", "12:00:00.123456+01:00"], ["12:00:00z", "12:00:00.1234567Z", "23:59:60Z"]),
    "date-time": (["2024-02-28T12:00:00Z"], ["2024-02-28t12:00:00Z", "2024-02-29T12:00:00Z"]),
    "email": (["a+b.c_d-e@f.org"], ["a!b@f.org", "a#b@f.org", "a$b@f.org", "a%b@f.org"]),
}


@pytest.mark.parametrize("name", RARE)
def test_rare_values_of_a_format_cannot_be_written(name: str) -> None:
    enforced = answer_constraint({"type": "string", "format": name})
    common, rare = RARE[name]
    assert [text for text in (*common, *rare) if accepts(enforced, json.dumps(text))] == common


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth > 1 else []


def test_indented_calls_end_at_a_depth_and_answers_do_not() -> None:
    form, tool = form_of("JSON list, indented"), schema_tool("f", {"properties": {"a": {}}})
    enforced = required(form, [tool])
    taken = [depth for depth in (1, 8, 9, 10) if accepts(enforced, written(form, ("f", {"a": nested(depth)})))]
    assert taken == [1, 8]
    for indent in (None, 2):
        assert accepts(answer_constraint({}), json.dumps(nested(20), indent=indent))


@every_class
def test_equal_reference_names_of_two_tools_stay_separate(name: str) -> None:
    form = form_of(name)
    tools = [
        schema_tool(
            tool,
            {
                "properties": {"x": {"$ref": "#/$defs/X"}, "more": {"type": "array", "items": {"$ref": "#/$defs/X"}}},
                "required": ["x"],
                "$defs": {"X": {"type": kind}},
            },
        )
        for tool, kind in (("one", "integer"), ("two", "boolean"))
    ]
    enforced = required(form, tools)
    for tool, right, wrong in (("one", 1, True), ("two", True, 1)):
        assert accepts(enforced, written(form, (tool, {"x": right, "more": [right, right]})))
        assert not accepts(enforced, written(form, (tool, {"x": wrong})))
        assert not accepts(enforced, written(form, (tool, {"x": right, "more": [wrong]})))


@every_class
def test_additional_arguments_are_accepted_if_the_schema_allows(name: str) -> None:
    form = form_of(name)
    named = {"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": {"type": "boolean"}}
    enforced = required(form, [schema_tool("f", named)])
    right: list[dict[str, Any]] = [{"a": 1}, {"a": 1, "b": True, "c": False}]
    wrong: list[dict[str, Any]] = [{"a": 1, "b": 2}, {"b": True}]
    assert [accepts(enforced, written(form, ("f", arguments))) for arguments in right + wrong] == [True] * 2 + [
        False
    ] * 2
    free = required(form, [schema_tool("f", {"additionalProperties": True})])
    anything: list[dict[str, Any]] = [{}, {"x": 1}, {"x": [1, {"y": None}], "z": "a b"}]
    assert all(accepts(free, written(form, ("f", arguments))) for arguments in anything)


@every_class
def test_keys_and_values_of_an_enum_are_written_exactly(name: str) -> None:
    form = form_of(name)
    key, values = "sa-y.$", ['"', "\\", "\n", "'", 5, None, [1, "a"], {"b": 1.5}]
    enforced = required(form, [schema_tool("odd", {"properties": {key: {"enum": values}}, "required": [key]})])
    for value in values:
        assert accepts(enforced, written(form, ("odd", {key: value}))), value
    assert not accepts(enforced, written(form, ("odd", {key: "other"})))


@every_class
def test_members_are_in_the_order_of_the_template(name: str) -> None:
    inner = {
        "type": "object",
        "properties": {"z": {"type": "integer"}, "B": {"type": "integer"}},
        "required": ["z", "B"],
    }
    properties = {"zone": {"type": "integer"}, "area": inner}
    form = form_of(name)
    enforced = required(form, [schema_tool("f", {"properties": properties, "required": ["zone", "area"]})])
    text = written(form, ("f", {"zone": 1, "area": {"z": 2, "B": 3}}))
    assert accepts(enforced, text)
    assert (text.index("area") < text.index("zone")) is (name == "own notation")


def test_plain_string_cannot_contain_its_own_end() -> None:
    form = form_of("raw strings")
    (end,) = ends_of_strings(form)
    enforced = required(form, TOOLS, "note")
    assert end == "</parameter>"
    assert accepts(enforced, written(form, ("note", {"text": "a </parameter b", "done": True})))
    assert not accepts(enforced, written(form, ("note", {"text": "a </parameter> b", "done": True})))


LONGER = (
    '", "',
    '"}',
    '"]',
    '": ',
    '\\"',
    "',",
    "')",
    '")',
    "a,",
    'x"',
    "</",
    "</parameter>",
    "\n</",
    '\n"',
    '<|"|>',
    ">\n",
    " <",
    "]]>",
    "&lt;",
)


@every_class
def test_masks_equal_accepted_ids_past_the_end_of_strings_too(name: str) -> None:
    form = form_of(name)
    ids = [*BYTES, *(longer.encode() for longer in LONGER), b""]
    vocabulary = xgrammar.TokenizerInfo(ids, vocab_size=len(ids), stop_token_ids=[len(ids) - 1])
    enforced = required(form, TOOLS, "note")
    matcher = xgrammar.GrammarMatcher(
        xgrammar.GrammarCompiler(vocabulary, max_threads=1).compile_grammar(enforced.value)
    )
    mask = xgrammar.allocate_token_bitmask(1, len(ids))
    for byte in written(
        form, ("note", {"text": 'a "b" c', "tags": ["x", "<y>"], "scores": {"k": 1}, "done": True})
    ).encode():
        matcher.fill_next_token_bitmask(mask)
        allowed = [bool(int(mask[0][number // 32]) >> number % 32 & 1) for number in range(END, len(ids) - 1)]
        assert allowed == [taken(matcher, number) for number in range(END, len(ids) - 1)]
        assert matcher.accept_token(byte)


def taken(matcher: Any, number: int) -> bool:
    if not matcher.accept_token(number):
        return False
    matcher.rollback(1)
    return True


# --- not enforceable


def test_choice_without_a_tool_lists_the_tools() -> None:
    form = form_of("JSON object")
    with pytest.raises(BadOption, match=r"tool_choice='fly': no such tool may be called here. Tools: add."):
        constraint(form, ADD, "fly")
    with pytest.raises(BadOption, match="Tools: none"):
        constraint(form, [], "required")


def tagged(**changes: Any) -> CallFormat:
    form = form_of("raw strings")
    assert isinstance(form.arguments, TaggedArguments)
    return replace(form, arguments=replace(form.arguments, **changes))


def test_argument_that_a_template_cannot_write_is_named() -> None:
    styles = form_of("raw strings").arguments.styles  # type: ignore[union-attr]  # the arguments are tagged
    without = tagged(styles={kind: style for kind, style in styles.items() if kind != "integer"})
    with pytest.raises(BadOption, match="the argument a of add has a type that the chat template cannot write"):
        constraint(without, ADD, "required")
    with pytest.raises(BadOption, match="stop takes no arguments, and the chat template has no way to write a call"):
        constraint(tagged(none=None), TOOLS, "stop")
    nothing = schema_tool("f", {"properties": {"a": False}, "required": ["a"]})
    with pytest.raises(BadOption, match="no arguments fit the tool f"):
        constraint(form_of("JSON object"), [nothing], "required")


NOTHING_FITS: list[dict[str, Any]] = [
    {"properties": {"a": {"type": "integer", "minimum": 3, "maximum": 1}}, "required": ["a"]},
    {"properties": {"a": {"not": {}}}, "required": ["a"]},
    {"properties": {"b": {}}, "required": ["a"], "additionalProperties": False},
    {"properties": {"b": {}}, "allOf": [{"required": ["a"]}], "additionalProperties": False},
]


@pytest.mark.parametrize("schema", NOTHING_FITS, ids=str)
def test_tool_that_nothing_fits_blocks_no_other_tool(schema: dict[str, Any]) -> None:
    form, bad = form_of("JSON object"), schema_tool("bad", schema)
    for choice in ("required", "auto"):
        alone = constraint(form, ADD, choice)
        assert alone is not None
        assert constraint(form, [bad, *ADD], choice) == alone
    assert constraint(form, [bad], "auto") is None
    for tools, choice in (([bad], "required"), ([bad, *ADD], "bad")):
        with pytest.raises(BadOption, match="since no value fits its argument 'a'"):
            constraint(form, tools, choice)
    (sentence,) = uncallable([*ADD, bad])
    assert sentence.startswith("no call of the tool 'bad' passes its check: no object fits its schema, since")


def test_tool_that_a_template_cannot_write_blocks_no_other_tool() -> None:
    form, stop = tagged(none=None), TOOLS[-1]
    assert required(form, [stop, *ADD]) == required(form, ADD)
    with pytest.raises(BadOption, match="stop takes no arguments"):
        constraint(form, [stop], "required")


def test_unwritable_optional_argument_is_omitted() -> None:
    styles = form_of("raw strings").arguments.styles  # type: ignore[union-attr]  # the arguments are tagged
    form = tagged(styles={kind: style for kind, style in styles.items() if kind != "array"})
    assert accepts(required(form, TOOLS, "note"), written(form, ("note", {"text": "a", "done": True})))


def test_format_without_an_end_of_strings_is_not_enforceable() -> None:
    endless = replace(tagged(separator="", tail=""), close="", between=None)
    assert enforceable(endless) == "the chat template writes strings without quotes, and no text that ends them"
    with pytest.raises(NoGrammar) as refused:
        ends_of_strings(endless)
    assert refused.value.requirement is GrammarRequirement.STRINGS_END


def test_absent_property_does_not_count_as_named() -> None:
    schema = {"minProperties": 1, "dependentRequired": {"kind": []}, "propertyNames": {"maxLength": 2}}
    tool = schema_tool("f", {"properties": {}, **schema})
    enforced = required(form_of("raw strings in CDATA"), [tool], parallel=False)
    assert not accepts(enforced, '<function name="f</function>')
