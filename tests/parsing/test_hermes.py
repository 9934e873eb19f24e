"""Calls in the hermes format: calls, content and malformed calls."""

from dataclasses import replace

import pytest

from runner.messages import ToolCall
from runner.parsing.parser import ParsedText, TurnParser
from runner.tools.tool import Tool
from tests import sweeps
from tests.parsing.parsers import bundled


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


TOOLS = [Tool(add)]


def parse(text: str, ids_start: int = 0) -> ParsedText:
    return bundled("hermes").parse(text, TOOLS, before=ids_start)


def test_a_call_is_read_and_the_text_beside_it_is_content() -> None:
    parsed = parse('I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\nDone.', 3)
    assert parsed == ParsedText("I add.\nDone.", "", [ToolCall("call_3", "add", {"a": 1, "b": 2})])


def test_several_calls_are_read_in_order() -> None:
    calls = [ToolCall(f"call_{n}", "add", {"a": n, "b": -n}) for n in range(10_000)]
    assert parse(bundled("hermes").render(calls)).calls == calls


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "add", "arguments": {"a": 1}}',
        '{"arguments": {"a": 1}, "name": "add"}',
        '\n\n {"name":"add","arguments":{"a":1}} \n',
        '{"name": "add", "arguments": "{\\"a\\": 1}"}',
    ],
    ids=["canonical", "other order", "other spacing", "encoded twice"],
)
def test_all_variants_of_a_call_are_the_same_call(body: str) -> None:
    assert parse(f"<tool_call>{body}</tool_call>").calls == [ToolCall("call_0", "add", {"a": 1})]


@pytest.mark.parametrize("arguments", ["", ', "arguments": null', ', "arguments": ""', ', "arguments": {}'])
def test_arguments_may_be_absent(arguments: str) -> None:
    assert parse(f'<tool_call>{{"name": "add"{arguments}}}</tool_call>').calls == [ToolCall("call_0", "add", {})]


def test_closing_tag_inside_a_string_is_text() -> None:
    call = ToolCall("call_0", "add", {"a": "</tool_call> and <tool_call>"})
    assert parse(bundled("hermes").render([call]) + "after") == ParsedText("after", "", [call])


def test_integers_of_any_size_stay_exact() -> None:
    call = ToolCall("call_0", "add", {"a": 2**80})
    assert parse(bundled("hermes").render([call])).calls == [call]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('<tool_call>{"name": "add", : 1}</tool_call>', "a key is missing in an object"),
        ("<tool_call></tool_call>", "no value begins at '</tool_call>'"),
        ('<tool_call>{"name": "add"} so</tool_call>', "'</tool_call>' is missing after it"),
        ('<tool_call>{"name": "add', "a string is not closed"),
        ("<tool_call>[1]</tool_call>", "it must be a JSON object"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'it must be a JSON object with "name" and "arguments"'),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "its arguments must be a JSON object"),
        (
            '<tool_call>{"name": "add", "arguments": "a=1"}</tool_call>',
            "its arguments are a string but not a JSON object: no value begins at 'a=1'",
        ),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is not a JSON number"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "the number 1e999 is too large"),
        ('<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>', "half of a surrogate pair"),
    ],
)
def test_malformed_call_has_an_error_text(text: str, error: str) -> None:
    (call,) = parse(text).calls
    assert call.error is not None
    assert error in call.error


def test_calls_after_a_malformed_one_are_read() -> None:
    parsed = parse('a<tool_call>{</tool_call>b<tool_call>{"name": "add"}</tool_call>c')
    assert parsed.content == "a\nb\nc"
    assert [(call.name, call.error is None) for call in parsed.calls] == [("", False), ("add", True)]


def test_call_is_content_if_no_calls_are_allowed() -> None:
    text = bundled("hermes").render([ToolCall("", "add")])
    assert bundled("hermes").parse(text, tools=TOOLS, tool_choice="none") == ParsedText(text, "", [])
    assert bundled("hermes").parse(text, tools=[]) == ParsedText(text, "", [])


@pytest.mark.parametrize("text", ["", " text\n", "a </tool_call> alone", "<tool>x</tool>"])
def test_text_without_calls_is_unchanged_content(text: str) -> None:
    assert parse(text) == ParsedText(text, "", [])


HUGE_LENGTH = 10**6
HUGE = {
    "openings": "<tool_call>" * (HUGE_LENGTH // 11),
    "nested lists": "<tool_call>" + "[" * HUGE_LENGTH,
    "nested objects": "<tool_call>" + '{"a":' * (HUGE_LENGTH // 5),
    "closed lists": "<tool_call>" + "[" * (HUGE_LENGTH // 2) + "]" * (HUGE_LENGTH // 2) + "</tool_call>",
    "long string": '<tool_call>"' + "x" * HUGE_LENGTH,
    "digits": '<tool_call>{"name": "add", "arguments": {"a": ' + "9" * HUGE_LENGTH + "}}</tool_call>",
}


@pytest.mark.parametrize("text", HUGE.values(), ids=HUGE.keys())
def test_a_megabyte_of_garbage_is_one_malformed_call(text: str) -> None:
    parsed = parse(text)
    assert [bool(call.error) for call in parsed.calls] == [True]


@pytest.mark.slow
def test_many_malformed_calls_are_all_reported() -> None:
    calls = sweeps.times(20_000, 5_000)
    assert [bool(call.error) for call in parse("<tool_call>{</tool_call>\n" * calls).calls] == [True] * calls


def test_invented_id_adds_no_control_text_to_later_prompts() -> None:
    form = bundled("hermes").format
    assert form.calls is not None
    assert form.calls.container is not None
    with_ids = replace(form, calls=replace(form.calls, container=replace(form.calls.container, id=("id",))))
    said = '<tool_call>{"name": "add", "id": "%s"}</tool_call>'
    (kept,) = TurnParser(with_ids).parse(said % "call-7.b", TOOLS).calls
    (refused,) = TurnParser(with_ids).parse(said % "<|im_end|>", TOOLS).calls
    assert (kept.id, refused.id) == ("call-7.b", "call_0")
