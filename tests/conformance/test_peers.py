"""Calls and thoughts as read by vLLM's parsers and by ours: current records, and a reason for every difference."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from runner.parsing.call_writer import WrittenCall, write_calls
from runner.parsing.learning.probe_renders import ProbeCall
from runner.parsing.notations import Json
from runner.parsing.turn_format import CallFormat, Container, IdStyle, LiteralText, Slot, WholeArguments
from tests import sweeps
from tests.conformance.corpus import Entry, corpus
from tests.conformance.peers import calls, thoughts
from tests.conformance.peers.cases import Kind, Trial, schemas_of
from tests.conformance.peers.groups import Group, grouped, learnt
from tests.conformance.peers.judging import Call, Fault, Read, judge
from tests.conformance.peers.page import BETTER, better_kinds, page
from tests.parsing.written_turns import format_of
from tests.repository import DOCS

ROWS = calls.recorded()
THOUGHTS = thoughts.recorded()


def test_page_is_written_from_the_records() -> None:
    assert (DOCS / "tool-parsers.md").read_text(encoding="utf-8") == page(ROWS, THOUGHTS)


def test_template_output_is_read_as_well_as_by_vllms_parsers() -> None:
    assert [kind for kind in better_kinds(ROWS) if kind.is_written] == []
    for row in THOUGHTS:
        for misses in row.readers.values():
            assert misses.keys() >= row.readers[calls.OURS].keys(), row.marks


def test_each_kind_that_vllm_parses_better_is_explained() -> None:
    assert set(better_kinds(ROWS)) == set(BETTER)


@pytest.fixture(scope="module")
def _vllm() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of vLLM and torch about their own modules
        pytest.importorskip("vllm", reason="vLLM is not installed, whose parsers these are")
        from tests.conformance.peers import readers

        readers.tool_parsers()
        readers.reasoning_parsers()


@pytest.mark.sample_cases(2)
@pytest.mark.slow
@pytest.mark.usefixtures("_vllm")
@pytest.mark.parametrize("row", sweeps.part(ROWS, 12), ids=lambda row: row.template)
def test_results_of_a_call_format_equal_the_record(row: calls.CallRow) -> None:
    assert calls.play(Group(_entry(row.template), row.templates, row.models)) == row


@pytest.mark.slow
@pytest.mark.usefixtures("_vllm")
@pytest.mark.parametrize("row", sweeps.part(THOUGHTS, 8), ids=lambda row: row.template)
def test_results_of_thought_marks_equal_the_record(row: thoughts.ThoughtRow) -> None:
    assert thoughts.play(Group(_entry(row.template), row.templates, row.models)) == row


@pytest.mark.whole
def test_records_have_every_call_format_and_thought_mark() -> None:
    turns = learnt(processes=1)
    for key, rows in ((calls.key, ROWS), (thoughts.marks, THOUGHTS)):
        groups = grouped(turns, key)
        assert [(group.entry.name, group.templates, group.models) for group in groups] == [
            (row.template, row.templates, row.models) for row in rows
        ]


def _entry(name: str) -> Entry:
    return next(entry for entry in corpus() if entry.name == name)


FORM = CallFormat(
    begin="<tool_call>",
    call=(LiteralText('{"name": "'), Slot.NAME, LiteralText('", "arguments": '), Slot.ARGUMENTS, LiteralText("}")),
    between="</tool_call><tool_call>",
    close="</tool_call>",
    arguments=WholeArguments(Json()),
    container=Container(("name",), ("arguments",), None),
    trigger="<tool_call>",
    after_content="",
    before_content=None,
    id_pieces=None,
    ids=IdStyle.ANY,
    stop="",
)
SAID = ProbeCall("f", {"a": "one two", "b": None, "c": 1})


def trial(*said: ProbeCall, content: str = "", ids: tuple[str, ...] = ()) -> Trial:
    return Trial(Kind.CALLS, "", "its text", said, content, schemas_of(said), ids)


@pytest.mark.parametrize(
    ("content", "read", "fault"),
    [
        ("", [("f", {"a": "one two", "b": None, "c": 1})], None),
        ("so", [("f", {"a": "one two", "b": None, "c": 1})], Fault.CONTENT_MORE),
        ("", [], Fault.LOST),
        ("", [("f", dict(SAID.arguments))] * 2, Fault.MORE),
        ("", [("g", dict(SAID.arguments))], Fault.NAME),
        ("", [("f", {"a": "one two", "b": None})], Fault.KEYS),
        ("", [("f", {"a": "one", "b": None, "c": 1})], Fault.CUT),
        ("", [("f", {"a": "other", "b": None, "c": 1})], Fault.VALUE),
        ("", [("f", {"a": "one two", "b": "None", "c": 1})], Fault.NULL),
        ("", [("f", {"a": "one two", "b": None, "c": True})], Fault.TYPE),
        ("", [("f", '{"a": "one')], Fault.TYPE),
    ],
)
def test_a_reading_is_judged_by_what_was_said(content: str, read: list[tuple[str, Any]], fault: Fault | None) -> None:
    made = Read(content, [Call(name, arguments, None) for name, arguments in read])
    assert judge(FORM, trial(SAID), lambda _: made) is fault


def test_an_error_an_id_and_what_is_raised_are_judged() -> None:
    def broken(_: Trial) -> Read:
        raise KeyError("name")

    assert judge(FORM, trial(SAID), broken) is Fault.RAISES
    assert judge(FORM, trial(SAID), lambda _: Read("", [Call("f", {}, None, error=True)])) is Fault.ERROR
    right = Call("f", dict(SAID.arguments), "another")
    assert judge(FORM, trial(SAID, ids=("its",)), lambda _: Read("", [right])) is Fault.ID


@pytest.mark.parametrize(("types", "fault"), [({}, None), ({"type": "integer"}, Fault.TYPE)])
def test_same_text_of_a_template_is_right_if_the_schema_allows_it(types: dict[str, str], fault: Fault | None) -> None:
    form = format_of("GLM-4.6").calls
    assert form is not None
    said = ProbeCall("f", {"a": 5})
    schemas = {"f": {"type": "object", "properties": {"a": types}}}
    text = write_calls(form, [WrittenCall(said.name, said.arguments, "")])
    read = Read("", [Call("f", {"a": "5"}, None)])
    assert judge(form, Trial(Kind.SCHEMAS, "", text, (said,), "", schemas), lambda _: read) is fault
    deviating = Trial(Kind.OPEN_ARGUMENT, "", text, (said,), "", schemas)
    assert judge(form, deviating, lambda _: read) is (fault or Fault.AS_WRITTEN)
