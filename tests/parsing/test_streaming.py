"""Streamed turns have the same result as complete ones, and no invented parts."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.parsing.call_reader import CallReader, DecidedCalls, ReadCall
from runner.parsing.events import ContentPiece, Event, FinishedCall, ReasoningPiece
from runner.parsing.notations import Json, Raw
from runner.parsing.streaming import TurnStream
from runner.parsing.turn_format import (
    CallFormat,
    Container,
    ContentFormat,
    IdStyle,
    LiteralText,
    ReasoningFormat,
    Slot,
    TaggedArguments,
    TurnFormat,
    ValueStyle,
    WholeArguments,
)
from runner.parsing.turn_reader import TurnReader
from tests import sweeps
from tests.parsing.learnt_formats import CLASSES
from tests.parsing.written_turns import WrittenTurn, format_of, formats, schemas_of, turns, write_turn

pytestmark = pytest.mark.sample_cases(3)

every_class = pytest.mark.parametrize("name", CLASSES.values(), ids=CLASSES)


def pieces(text: str, seed: int, longest: int = 7) -> Iterator[str]:
    source = random.Random(seed)
    at = 0
    while at < len(text):
        length = source.randint(1, longest)
        yield text[at : at + length]
        at += length


def events_of(stream: TurnStream, deltas: Sequence[str]) -> list[Event]:
    return [event for delta in deltas for event in stream.feed(delta)]


def calls_of(events: Sequence[Event]) -> list[ReadCall]:
    return [event.call for event in events if isinstance(event, FinishedCall)]


def joined(events: Sequence[Event], kind: type[ContentPiece] | type[ReasoningPiece]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def spoilt(text: str, form: TurnFormat, how: int, seed: int) -> str:
    """Generate `text`, cut or damaged at some position."""
    source = random.Random(seed)
    at = source.randrange(len(text) + 1)
    assert form.calls is not None
    marks = ["", '"', "}", "]", "\n", "  ", form.calls.trigger, form.calls.close, form.calls.post, "<", "</think>"]
    match how:
        case 1:
            return text[:at]
        case 2:
            return text[:at] + source.choice(marks) + text[at:]
        case 3:
            return text[:at] + source.choice(marks) + text[at + source.randint(1, 3) :]
        case _:
            return text


def assert_events_as_read(form: TurnFormat, turn: WrittenTurn, how: int, known: bool, seed: int) -> None:
    if form.reasoning is not None:
        form = dataclasses.replace(form, reasoning=dataclasses.replace(form.reasoning, opened_by_prompt=bool(seed % 2)))
    reader = TurnReader(form)
    text = spoilt(write_turn(form, turn), form, how, seed)
    schemas = schemas_of(turn) if known else None
    whole = reader.read(text, schemas)

    stream = TurnStream(reader, schemas)
    events = list[Event]()
    for piece in pieces(text, seed):
        events += stream.feed(piece)
    events += stream.finish()

    assert stream.reading == whole
    assert calls_of(events) == whole.calls
    assert joined(events, ReasoningPiece) == whole.reasoning
    content = joined(events, ContentPiece)
    assert (content.lstrip() if whole.calls else content) == (whole.content.lstrip() if whole.calls else whole.content)


any_turn = given(turn=turns, how=st.integers(0, 3), known=st.booleans(), seed=st.integers(0, 2**32))


@every_class
@settings(max_examples=sweeps.times(100, 30), deadline=None)
@any_turn
def test_pieces_give_the_same_events_as_the_complete_text(
    name: str, turn: WrittenTurn, how: int, known: bool, seed: int
) -> None:
    assert_events_as_read(format_of(name), turn, how, known, seed)


@pytest.mark.slow
@settings(max_examples=sweeps.times(60, 30), deadline=None)
@any_turn
def test_pieces_give_the_same_events_in_formats_of_the_corpus(
    turn: WrittenTurn, how: int, known: bool, seed: int
) -> None:
    for form in formats(one_in=12).values():
        assert_events_as_read(form, turn, how, known, seed)


def assert_nothing_unsaid(form: TurnFormat, turn: WrittenTurn, seed: int) -> None:
    reader, schemas = TurnReader(form), schemas_of(turn)
    text = write_turn(form, turn)
    said = reader.read(text, schemas).calls
    cuts = set(random.Random(seed).sample(range(len(text) + 1), min(len(text), 25)))
    stream, calls = TurnStream(reader, schemas), list[ReadCall]()
    for at, sign in enumerate(text, 1):
        calls += calls_of(stream.feed(sign))
        assert calls == said[: len(calls)]
        if at in cuts:
            ended = [call for call in reader.read(text[:at], schemas).calls if call.error is None]
            assert ended == said[: len(ended)]


@every_class
@settings(max_examples=sweeps.times(50, 15), deadline=None)
@given(turn=turns, seed=st.integers(0, 2**32))
def test_truncated_turn_has_no_invented_call(name: str, turn: WrittenTurn, seed: int) -> None:
    assert_nothing_unsaid(format_of(name), turn, seed)


@pytest.mark.slow
@settings(max_examples=sweeps.times(40, 15), deadline=None)
@given(turn=turns, seed=st.integers(0, 2**32))
def test_truncated_turn_of_the_corpus_has_no_invented_call(turn: WrittenTurn, seed: int) -> None:
    for form in formats(one_in=12).values():
        assert_nothing_unsaid(form, turn, seed)


def test_white_space_in_a_trigger_is_read_the_same_in_pieces() -> None:
    form = dataclasses.replace(
        TOOL_CALL,
        begin='<call of="',
        call=(Slot.NAME, LiteralText('">'), Slot.ARGUMENTS),
        between='</call>\n<call of="',
        close="</call>",
        trigger='<call of="',
    )
    text = '<call of="f">{}</call>\n<call   of="g">{}</call>'
    stream = stream_of(form)
    assert calls_of(events_of(stream, list(text)) + stream.finish()) == [ReadCall("f", {})]
    assert stream.reading == TurnReader(TurnFormat(form, THINK, ContentFormat("", ""))).read(text)


TOOL_CALL = CallFormat(
    begin="<tool_call>\n",
    call=(Slot.NAME, Slot.ARGUMENTS),
    between="\n</tool_call>\n<tool_call>\n",
    close="\n</tool_call>",
    arguments=WholeArguments(Json()),
    container=None,
    trigger="<tool_call>",
    after_content="\n",
    before_content=None,
    id_pieces=None,
    ids=IdStyle.ANY,
    stop="",
)
TAGGED = TaggedArguments(
    head=">\n<parameter=",
    separator="</parameter>\n<parameter=",
    tail="</parameter>",
    none=">",
    styles={"string": ValueStyle(">", Raw(), ""), "integer": ValueStyle(">", Json(), "")},
)
THINK = ReasoningFormat("<think>", "</think>", opened_by_prompt=False)


OPENED = dataclasses.replace(THINK, opened_by_prompt=True)


def stream_of(
    calls: CallFormat | None = TOOL_CALL, *, reasoning: ReasoningFormat = THINK, content_open: str = ""
) -> TurnStream:
    return TurnStream(TurnReader(TurnFormat(calls, reasoning, ContentFormat(content_open, ""))), {"f": {}})


def test_only_a_possible_begin_of_a_mark_is_held_back() -> None:
    stream = stream_of()
    assert stream.feed("I look <tool") == [ContentPiece("I look")]
    assert stream.feed("s up, a <") == [ContentPiece(" <tools up, a")]
    assert stream.feed(" b") == [ContentPiece(" < b")]


def test_call_is_emitted_when_its_close_arrives() -> None:
    stream = stream_of()
    assert stream.feed('so\n<tool_call>\nf{"a": 1}\n</tool_call') == [ContentPiece("so")]
    assert stream.feed(">") == [FinishedCall(ReadCall("f", {"a": 1}))]
    assert stream.feed("\nand") == [ContentPiece("\nand")]
    assert stream.finish() == []
    assert stream.reading.content == "so\nand"


def test_close_inside_a_string_does_not_end_a_call() -> None:
    stream = stream_of()
    assert stream.feed('<tool_call>\nf{"a": "</tool_call>') == []
    assert stream.feed(' b"}\n</tool_call>') == [FinishedCall(ReadCall("f", {"a": "</tool_call> b"}))]


def test_unreadable_call_is_emitted_at_the_end() -> None:
    stream = stream_of()
    assert stream.feed("<tool_call>\nf{a</tool_call> so") == []
    at_end = stream.finish()
    assert [call.name for call in calls_of(at_end)] == ["f"]
    assert calls_of(at_end)[0].error is not None
    assert joined(at_end, ContentPiece) == "so"


def test_turn_truncated_inside_a_call_reports_an_error() -> None:
    stream = stream_of()
    assert stream.feed('<tool_call>\nf{"a": ') == []
    (call,) = calls_of(stream.finish())
    assert call.error is not None


def test_reasoning_is_emitted_in_pieces_without_marks() -> None:
    stream = stream_of()
    assert stream.feed("\n<thi") == []
    assert stream.feed("nk>\nhm, ") == [ReasoningPiece("hm,")]
    assert stream.feed("so</th") == [ReasoningPiece(" so")]
    assert stream.feed("ink>\n\n") == []
    assert stream.feed("yes ") == [ContentPiece("yes")]
    assert stream.finish() == [ContentPiece(" ")]


def test_reasoning_opened_by_the_prompt_needs_no_mark() -> None:
    assert stream_of(reasoning=OPENED).feed("hm</think>yes") == [ReasoningPiece("hm"), ContentPiece("yes")]


def test_call_inside_reasoning_is_ignored() -> None:
    stream = stream_of(reasoning=OPENED)
    events = [*stream.feed('hm <tool_call>\nf{"a": 1}\n</tool_call>'), *stream.finish()]
    assert calls_of(events) == []


def test_close_without_an_opening_mark_is_dropped() -> None:
    assert stream_of().feed("</think>\n\nyes") == [ContentPiece("yes")]


def test_mark_before_content_is_not_part_of_it() -> None:
    stream = stream_of(content_open="<|START|>")
    assert stream.feed("<think>hm</think><|STA") == [ReasoningPiece("hm")]
    assert stream.feed("RT|>yes") == [ContentPiece("yes")]


def test_reasoning_without_opening_mark_is_found_by_its_close() -> None:
    closed = ReasoningFormat("", "[BEGIN]", opened_by_prompt=False)
    stream = stream_of(reasoning=closed)
    assert stream.feed("hm [BEG") == []
    assert stream.feed("IN]yes") == [ReasoningPiece("hm"), ContentPiece("yes")]
    stream = stream_of(reasoning=closed)
    assert stream.feed("yes [BEG") == []
    assert stream.finish() == [ContentPiece("yes [BEG")]


BARE = dataclasses.replace(
    TOOL_CALL,
    begin="[",
    call=(LiteralText('{"name": "'), Slot.NAME, LiteralText('", "arguments": '), Slot.ARGUMENTS, LiteralText("}")),
    between=", ",
    close="]",
    container=Container(("name",), ("arguments",), None),
    trigger="",
)
BARE_CALL = '[{"name": "f", "arguments": {"a": 1}}]'


def test_calls_without_trigger_are_emitted_at_the_end() -> None:
    stream = stream_of(BARE)
    assert stream.feed("so\n" + BARE_CALL) == [ContentPiece("so")]
    assert stream.finish() == [FinishedCall(ReadCall("f", {"a": 1}))]


def test_name_of_a_tool_in_a_line_may_begin_calls() -> None:
    stream = stream_of(BARE)
    assert stream.feed("so [1] [ {") == [ContentPiece("so [1]")]
    assert stream.feed('"name": "fo') == [ContentPiece(' [ {"name": "fo')]
    assert stream.feed(" " + BARE_CALL) == []
    assert stream.finish() == [FinishedCall(ReadCall("f", {"a": 1}))]
    assert stream.reading.content == 'so [1] [ {"name": "fo'


@pytest.mark.parametrize(
    ("arguments", "unit"),
    [
        (WholeArguments(Json()), '</tool_call> {["\\" </b> '),
        (TAGGED, "</tool_call> <b>{[\"' </function>\n</tool_call>\n<parameter=x> "),
    ],
    ids=["JSON", "raw"],
)
def test_long_argument_full_of_marks_takes_linear_time(
    arguments: WholeArguments | TaggedArguments, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tagged = isinstance(arguments, TaggedArguments)
    form = dataclasses.replace(TOOL_CALL, arguments=arguments)
    value = unit * (64_000 // len(unit))
    body = f">\n<parameter=a>{value}</parameter>" if tagged else Json().encode({"a": value})
    text = f"<tool_call>\nf{body}\n</tool_call>"
    read: list[int] = []
    decided = CallReader.decided

    def counted(self: CallReader, text: str, *rest: Any, **more: Any) -> DecidedCalls:
        read.append(len(text))
        return decided(self, text, *rest, **more)

    monkeypatch.setattr(CallReader, "decided", counted)
    stream = stream_of(form)
    events = events_of(stream, list(pieces(text, 0)))

    assert calls_of(events) == [ReadCall("f", {"a": value})]
    assert sum(read) < 2 * len(text)
