"""Calls read in the formats that templates write, where what stands around them is less than a template writes."""

from __future__ import annotations

import time

import pytest

from runner.parsing.reading import CallReader, ReadCall
from runner.parsing.turn_format import CallFormat
from runner.parsing.writing import WrittenCall, write_calls
from tests.parsing.written_turns import format_of

MINIMAX = "MiniMaxAI-MiniMax-M2"


def calls_of(name: str) -> CallFormat:
    form = format_of(name).calls
    assert form is not None
    return form


def test_a_call_ends_where_one_without_arguments_follows() -> None:
    form = calls_of(MINIMAX)
    said = [WrittenCall("f", {"a": "x"}, ""), WrittenCall("g", {}, ""), WrittenCall("h", {"a": "y"}, "")]
    reading = CallReader(form).read(write_calls(form, said))
    assert reading.calls == [ReadCall("f", {"a": "x"}), ReadCall("g", {}), ReadCall("h", {"a": "y"})]


@pytest.mark.parametrize("name", [MINIMAX, "moonshotai-Kimi-K2-Instruct", "deepseek-ai-DeepSeek-V3.2"])
def test_a_section_that_was_left_open_at_the_end_of_the_turn_has_its_calls(name: str) -> None:
    form = calls_of(name)
    text = write_calls(form, [WrittenCall("f", {"a": "x"}, "functions.f:0")])
    last = form.post.strip()
    assert text.rstrip() != text[: text.rindex(last) + len(last)]
    reading = CallReader(form).read(text[: text.rindex(last) + len(last)])
    assert [(call.name, call.arguments, call.error) for call in reading.calls] == [("f", {"a": "x"}, None)]


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
