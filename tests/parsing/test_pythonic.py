"""Calls in the pythonic format: calls, content and malformed calls."""

import random
import warnings
from typing import Any

import pytest

from runner.messages import ToolCall
from runner.parsing.parser import ParsedText
from runner.tools.tool import Tool
from tests.parsing.parsers import bundled


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


def note(value: Any = None) -> None:
    """Note something."""


TOOLS = [Tool(add), Tool(note)]


def parse(text: str, **options: Any) -> ParsedText:
    return bundled("pythonic").parse(text, **{"tools": TOOLS, **options})


def test_call_is_read() -> None:
    assert parse("[add(a=17, b=25)]") == ParsedText("", "", [ToolCall("call_0", "add", {"a": 17, "b": 25})])


def test_ids_continue_from_the_given_number() -> None:
    parsed = parse("[add(a=1, b=2), add(a=3, b=4)]", before=5)
    assert [call.id for call in parsed.calls] == ["call_5", "call_6"]


def test_text_before_the_calls_is_content() -> None:
    parsed = parse("I add.\n[add(a=1, b=2)]\n")
    assert parsed.content == "I add."
    assert len(parsed.calls) == 1


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("-3", -3),
        ("+3", 3),
        ("1.5e3", 1500.0),
        ("-0.5", -0.5),
        ("123456789012345678901234567890", 123456789012345678901234567890),
        ("True", True),
        ("false", False),
        ("None", None),
        ("null", None),
        ("'it is'", "it is"),
        ('"it\'s"', "it's"),
        (r'"a\n\"b\""', 'a\n"b"'),
        (r'"\d+"', r"\d+"),
        ('"[add(a=1)]"', "[add(a=1)]"),
        ('"a, b) ]"', "a, b) ]"),
        ('"中🙂"', "中🙂"),
        ("[1, [2, {'k': null}]]", [1, [2, {"k": None}]]),
        ("{'a': {'b': [true, -1]}, \"c\": ()}", {"a": {"b": [True, -1]}, "c": []}),
        ("{1: 'one'}", {"1": "one"}),
        ("(1, 2)", [1, 2]),
        ("{}", {}),
    ],
)
def test_literals_have_their_values(literal: str, value: object) -> None:
    assert parse(f"[note(value={literal})]").calls == [ToolCall("call_0", "note", {"value": value})]


def test_an_invalid_escape_is_read_without_a_warning() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert parse(r"[note(value='\d')]").calls[0].arguments == {"value": r"\d"}
    assert caught == []


def test_positional_arguments_get_the_names_of_the_parameters() -> None:
    assert parse("[add(17, b=25)]").calls[0].arguments == {"a": 17, "b": 25}


def test_white_space_is_allowed_outside_names_and_values() -> None:
    text = "[ add( a = 1 ,\n b=2 , ) ]"
    assert parse(text).calls == [ToolCall("call_0", "add", {"a": 1, "b": 2})]


def test_unnamed_value_belongs_to_the_first_free_parameter() -> None:
    assert parse("[add(a=1, 2)]").calls[0].arguments == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "an answer",
        "[1, 2]",
        "[]",
        "[citation needed]",
        "see [the page](https://example.org/add(a=1))",
        "the interval [f(x), g(x)]",
        "it is add(a=1, b=2)",
        "[add(a=1, b=2)] is how I would call it",
        "x[add] = [i for i in range(3)]",
        "[sin(x",
    ],
)
def test_brackets_without_calls_are_content(text: str) -> None:
    assert parse(text) == ParsedText(text, "", [])


def test_call_of_an_unknown_tool_can_be_answered() -> None:
    assert parse("[divide(a=1, b=2)]").calls == [ToolCall("call_0", "divide", {"a": 1, "b": 2})]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[add(a=1, b=", "the value of b: it is missing"),
        ("[add(a=1, b=2)", "')]' is missing after it"),
        ('[note(value="cut', "the value of value: a string is not closed"),
        ("[note(value=[1, 2)]", "the value of value: ',' is missing before ')]'"),
        ("[add(a=1 b=2)]", "')]' is missing after it"),
        ("[add(a=b, b=2)]", "the value of a: no value begins at 'b, b=2)]'"),
        ("[add(a=1+1, b=2)]", "')]' is missing after it"),
        ("[add(a=, b=2)]", "the value of a: no value begins at ', b=2)]'"),
        ("[add(a=1, a=2)]", "a is given twice"),
        ("[add(b=1, 2)]", "the argument 2 has no name"),
        ("[add(1, 2, 3)]", "there are more arguments than the 2 parameters"),
        ("[add(a=1,, b=2)]", "')]' is missing after it"),
        ("[add(a=1, b=1e999)]", "the value of b: the number 1e999 is too large"),
        ("[note(value={[]: 1})]", "the value of value: a key is missing in an object"),
        ("[note(value=__import__('os').getcwd())]", "the value of value: no value begins at \"__import__('os').get\""),
        ("[note(value=f'{add}')]", "the value of value: no value begins at \"f'{add}')]\""),
        ("[add(a=1, b=2), 3]", "')]' is missing after it"),
        (r"[note(value='\ud800')]", "a string in it contains half of a surrogate pair"),
    ],
)
def test_malformed_call_has_an_error_text(text: str, error: str) -> None:
    assert parse(text).calls[-1].error == error


def test_complete_calls_of_a_truncated_turn_are_read() -> None:
    first, second = parse("[add(a=1, b=2), add(a=3, b=").calls
    assert first == ToolCall("call_0", "add", {"a": 1, "b": 2})
    assert second.name == "add"
    assert second.error == "the value of b: it is missing"


def test_call_is_content_if_no_calls_are_allowed() -> None:
    text = "[add(a=1, b=2)]"
    assert parse(text, tool_choice="none") == ParsedText(text, "", [])
    assert parse(text, tools=[]) == ParsedText(text, "", [])


HUGE_LENGTH = 10**6
HUGE = {
    "open brackets": "[add(" * (HUGE_LENGTH // 5),
    "unknown openings": "[nope(" * (HUGE_LENGTH // 6),
    "nested lists": "[note(value=" + "[" * HUGE_LENGTH,
    "minus signs": "[note(value=" + "-" * HUGE_LENGTH + "1)]",
    "plus terms": "[note(value=" + "1+" * (HUGE_LENGTH // 2) + "1)]",
    "digits": "[note(value=" + "9" * HUGE_LENGTH + ")]",
    "backslashes": '[note(value="' + "\\" * HUGE_LENGTH,
    "quotes": "[note(value=" + "'\"" * (HUGE_LENGTH // 2),
    "commas": "[note(" + "," * HUGE_LENGTH + ")]",
    "closed mentions": "[add(a=1, b=2)] " * (HUGE_LENGTH // 16) + "end",
    "attributes": "[note(value=" + "a." * (HUGE_LENGTH // 2) + "a)]",
    "null characters": "[note(value=\0" + "\0" * HUGE_LENGTH + ")]",
}


@pytest.mark.parametrize("text", HUGE.values(), ids=HUGE.keys())
def test_megabyte_of_garbage_is_content_or_one_malformed_call(text: str) -> None:
    parsed = parse(text)
    assert parsed.content == text or len(parsed.calls) == 1
    assert all(call.error for call in parsed.calls)


def test_ten_thousand_calls_are_read() -> None:
    calls = [ToolCall(f"call_{n}", "add", {"a": n, "b": -n}) for n in range(10_000)]
    assert parse(bundled("pythonic").render(calls)).calls == calls


def test_random_garbage_never_raises() -> None:
    rng = random.Random(0)
    pieces = [
        "[",
        "]",
        "(",
        ")",
        "{",
        "}",
        "add",
        "note",
        "a=",
        "b=",
        "value=",
        ",",
        " ",
        "1",
        "-",
        "'",
        '"',
        "\\",
        "x",
        ":",
    ]
    for _ in range(3000):
        text = "[add(" * (rng.random() < 0.5) + "".join(rng.choices(pieces, k=rng.randrange(30)))
        parsed = parse(text)
        assert parsed.calls or parsed.content == text
