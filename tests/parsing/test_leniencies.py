"""Tolerated deviations of models, by the names on the page of models, and deviations that are errors."""

from __future__ import annotations

import re
from typing import Any

import pytest

from runner.parsing.call_reader import CallReader, ReadCall, Schemas
from runner.parsing.harmony import read_harmony
from tests.parsing.written_turns import format_of
from tests.repository import DOCS

HERMES = "Qwen-Qwen3-0.6B"
CODER = "Goekdeniz-Guelmez-JOSIE-2-4B-Preview"
KIMI = "moonshotai-Kimi-K2-Instruct"
MISTRAL = "Mistral-Small-3.2-24B-Instruct-2506"
OLMO = "allenai-Olmo-3-7B-Instruct"
GEMMA = "Gryphe-Gemma-4-31B-StyleTune"
SCHEMAS = {"f": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}}


def read(template: str, text: str, schemas: Schemas | None = SCHEMAS) -> list[ReadCall]:
    calls = format_of(template).calls
    assert calls is not None
    return CallReader(calls).read(text, schemas).calls


def hermes(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


def kimi(call: str) -> str:
    return f"<|tool_calls_section_begin|><|tool_call_begin|>{call}<|tool_call_end|><|tool_calls_section_end|>"


ONE = {"a": 1}
FORGIVEN: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    "white space": [
        (HERMES, '<tool_call>{ "name":"f",\n"arguments" :{"a":1} }</tool_call>', ONE),
        (CODER, "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>", ONE),
        (KIMI, kimi('\nfunctions.f:0\n<|tool_call_argument_begin|> {"a": 1} '), ONE),
    ],
    "other members": [(HERMES, '<tool_call>{"id": 7, "arguments": {"a": 1}, "name": "f"}</tool_call>', ONE)],
    "parameters for arguments": [(HERMES, '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', ONE)],
    "arguments as text": [(HERMES, hermes('"{\\"a\\": 1}"'), ONE)],
    "no arguments": [
        (HERMES, '<tool_call>{"name": "f"}</tool_call>', {}),
        (HERMES, hermes("null"), {}),
        (HERMES, hermes('""'), {}),
    ],
    "words of Python": [(HERMES, hermes('{"a": True, "b": None}'), {"a": True, "b": None})],
    "words of JSON": [(OLMO, "<function_calls>f(a=true, b=null)</function_calls>", {"a": True, "b": None})],
    "single quotes": [(HERMES, hermes("{'b': 'it is'}"), {"b": "it is"})],
    "Python's escapes": [(HERMES, hermes(r'{"b": "it\'s \x41\d"}'), {"b": r"it's A\d"})],
    "line breaks in strings": [(HERMES, hermes('{"b": "one\ntwo\tthree"}'), {"b": "one\ntwo\tthree"})],
    "tuples": [(HERMES, hermes('{"a": (1, 2), "b": (1,)}'), {"a": [1, 2], "b": [1]})],
    "keys without quotes": [(HERMES, hermes("{a: 1}"), ONE)],
    "a plus sign": [(HERMES, hermes('{"a": +1}'), ONE)],
    "a last comma": [
        (HERMES, hermes('{"a": [1,],}'), {"a": [1]}),
        (OLMO, "<function_calls>f(a=1,)</function_calls>", ONE),
    ],
    "values without names": [(OLMO, "<function_calls>f(1, 'x')</function_calls>", {"a": 1, "b": "x"})],
    "any number of a call": [(KIMI, kimi('functions.f:17<|tool_call_argument_begin|>{"a": 1}'), ONE)],
    "a repeated start mark": [(HERMES, "<tool_call>\n" + hermes('{"a": 1}'), ONE)],
    "no end mark at the end of the turn": [
        (HERMES, hermes('{"a": 1}').removesuffix("</tool_call>"), ONE),
        (
            KIMI,
            kimi('functions.f:0<|tool_call_argument_begin|>{"a": 1}').removesuffix("<|tool_calls_section_end|>"),
            ONE,
        ),
    ],
}


@pytest.mark.parametrize("name", FORGIVEN)
def test_tolerated_deviations_are_read_as_intended(name: str) -> None:
    for template, text, arguments in FORGIVEN[name]:
        (call,) = read(template, text)
        assert (call.error, call.name, call.arguments) == (None, "f", arguments)


def test_call_before_another_one_needs_no_close() -> None:
    unclosed = hermes('{"a": 1}').removesuffix("</tool_call>")
    assert [call.arguments for call in read(HERMES, unclosed + hermes('{"a": 2}'))] == [{"a": 1}, {"a": 2}]


HEADERS = [
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.f<|constrain|>json<|message|>",
    " to=functions.f<|channel|>commentary json<|message|>",
    "<|channel|>analysis to=f<|message|>",
]


@pytest.mark.parametrize("header", HEADERS)
def test_parts_of_a_harmony_header_may_be_in_any_order(header: str) -> None:
    (call,) = read_harmony(f'{header}{{"a": 1}}<|call|>').calls
    assert (call.error, call.name, call.arguments) == (None, "f", {"a": 1})


def test_models_page_names_the_tolerated_deviations() -> None:
    page = (DOCS / "models.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"\| accepted \|.*?\n\n", page, re.DOTALL)
    names = [line.split("|")[1].strip() for line in listed.splitlines()[2:] if line]
    apart = ["no end mark before the next call", "headers of harmony in any order"]
    assert sorted(names) == sorted([*FORGIVEN, *apart])


WRONG = {
    "zeros in front": (HERMES, hermes('{"a": 007}'), "007 is not a JSON number"),
    "underscores": (HERMES, hermes('{"a": 1_2}'), "1_2 is not a JSON number"),
    "two underscores": (HERMES, hermes('{"a": 1__2}'), "1__2 is not a JSON number"),
    "no digit after the point": (
        OLMO,
        "<function_calls>f(a=1.)</function_calls>",
        "the value of a: 1. is not a JSON number",
    ),
    "one value in parentheses": (HERMES, hermes('{"a": (1)}'), "parentheses around one value are not a list"),
    "a space in an escape": (
        HERMES,
        hermes(r'{"b": "\x 1"}'),
        r"\x in a string needs 2 hexadecimal digits after it, but has ''",
    ),
    "an escape that is cut": (
        HERMES,
        hermes(r'{"b": "a\/b\u12"}'),
        r"\u in a string needs 4 hexadecimal digits after it, but has '12'",
    ),
    "words after an object as text": (
        HERMES,
        hermes('"{\\"a\\": 1} so"'),
        "its arguments are a string with 'so' after the object",
    ),
    "no [CALL_ID]": (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}', "'[CALL_ID]' is missing after the name of a tool"),
    "no functions.": (
        KIMI,
        kimi('f:0<|tool_call_argument_begin|>{"a": 1}'),
        "'functions.' is missing in front of the name of a tool",
    ),
    "no number of the call": (
        KIMI,
        kimi('functions.f<|tool_call_argument_begin|>{"a": 1}'),
        "':' is missing after the name of a tool",
    ),
    "another format": (
        CODER,
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        "'<function=' is missing after '<tool_call>'",
    ),
    "no call:": (GEMMA, "<|tool_call>f{a:1}<tool_call|>", "'call:' is missing after '<|tool_call>'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_errors_of_calls_name_the_problem(what: str) -> None:
    template, text, why = WRONG[what]
    (call,) = read(template, text)
    assert call.error == why


@pytest.mark.parametrize("text", ["007", "1_2", "+49 30 1", "+49"])
def test_possible_text_stays_text_if_the_schema_has_no_type(text: str) -> None:
    (call,) = read(
        CODER, f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>", {}
    )
    assert call.arguments == {"a": text}
