"""Calls in learnt formats whose surrounding text is incomplete."""

from __future__ import annotations

import time

import pytest

from runner.parsing.call_reader import CallReader, CallsReading, ReadCall
from runner.parsing.call_writer import WrittenCall, write_calls
from runner.parsing.turn_format import CallFormat
from tests.parsing.written_turns import format_of

MINIMAX = "MiniMaxAI-MiniMax-M2"


def calls_of(name: str) -> CallFormat:
    form = format_of(name).calls
    assert form is not None
    return form


def test_call_ends_before_one_without_arguments() -> None:
    form = calls_of(MINIMAX)
    said = [WrittenCall("f", {"a": "x"}, ""), WrittenCall("g", {}, ""), WrittenCall("h", {"a": "y"}, "")]
    reading = CallReader(form).read(write_calls(form, said))
    assert reading.calls == [ReadCall("f", {"a": "x"}), ReadCall("g", {}), ReadCall("h", {"a": "y"})]


@pytest.mark.parametrize("name", [MINIMAX, "moonshotai-Kimi-K2-Instruct", "deepseek-ai-DeepSeek-V3.2"])
def test_unclosed_section_at_the_end_of_a_turn_keeps_its_calls(name: str) -> None:
    form = calls_of(name)
    text = write_calls(form, [WrittenCall("f", {"a": "x"}, "functions.f:0")])
    last = form.post.strip()
    assert text.rstrip() != text[: text.rindex(last) + len(last)]
    reading = CallReader(form).read(text[: text.rindex(last) + len(last)])
    assert [(call.name, call.arguments, call.error) for call in reading.calls] == [("f", {"a": "x"}, None)]


UNCLOSED = {
    "JSON": ("Qwen-Qwen3-0.6B", "</tool_call>"),
    "JSON list": ("Apriel-1.6-15b-Thinker-fixed", "]</tool_calls>"),
    "name and JSON": ("moonshotai-Kimi-K2-Instruct", "<|tool_call_end|><|tool_calls_section_end|>"),
    "raw strings": ("Goekdeniz-Guelmez-JOSIE-2-4B-Preview", "</tool_call>"),
    "own notation": ("Gryphe-Gemma-4-31B-StyleTune", "<tool_call|>"),
}


def closed_and_not(what: str) -> tuple[CallReader, str, str]:
    """Return the reader of a format, a call in it, and the same call without its close."""
    name, close = UNCLOSED[what]
    form = calls_of(name)
    text = write_calls(form, [WrittenCall("f", {"a": "x"}, "functions.f:0")]).rstrip()
    assert text.endswith(close)
    return CallReader(form), text, text.removesuffix(close)


def said(reading: CallsReading) -> tuple[str, list[tuple[str, object, str | None]]]:
    return reading.content, [(call.name, call.arguments, call.error) for call in reading.calls]


CALL = ("f", {"a": "x"}, None)


@pytest.mark.parametrize("what", UNCLOSED)
def test_complete_call_without_close_at_the_end_of_a_turn_is_read(what: str) -> None:
    reader, closed, unclosed = closed_and_not(what)
    assert said(reader.read(unclosed)) == ("", [CALL])
    assert said(reader.read(f"{closed}so\n{unclosed}\n")) == ("so", [CALL, CALL])


@pytest.mark.parametrize("what", ["JSON", "JSON list", "name and JSON"])
def test_complete_call_without_close_before_the_next_is_read(what: str) -> None:
    reader, closed, unclosed = closed_and_not(what)
    assert said(reader.read(f"{unclosed}\n{closed}")) == ("", [CALL, CALL])


@pytest.mark.parametrize("what", UNCLOSED)
def test_call_without_close_before_more_words_is_an_error(what: str) -> None:
    reader, _, unclosed = closed_and_not(what)
    assert reader.read(f"{unclosed} so").calls[0].error is not None


def test_call_that_may_get_more_arguments_is_incomplete() -> None:
    form = calls_of("GLM-4.6")
    text = write_calls(form, [WrittenCall("f", {"a": "x"}, "")]).removesuffix("\n</tool_call>")
    (call,) = CallReader(form).read(text).calls
    assert call.error == "'</tool_call>' is missing after it"


@pytest.mark.timing
@pytest.mark.parametrize(
    "name", [MINIMAX, "GLM-4.6", "Goekdeniz-Guelmez-JOSIE-2-4B-Preview", "allenai-Olmo-3-7B-Instruct"]
)
def test_long_white_space_is_read_in_linear_time(name: str) -> None:
    form = calls_of(name)
    written = write_calls(form, [WrittenCall("f", {"a": "x y"}, "")])
    for at in range(len(written)):
        text = written[:at] + " \n" * 10_000 + written[at:]
        began = time.perf_counter()
        CallReader(form).read(text)
        assert time.perf_counter() - began < 0.5, repr(written[:at])
