"""Harmony, the format of gpt-oss, as templates and models write it."""

from __future__ import annotations

import random

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.engines.scripted.replies import ReplyEncoder
from runner.parsing.call_grammar import harmony_constraint
from runner.parsing.call_reader import ReadCall, Schemas
from runner.parsing.call_writer import Unwritable, WrittenCall, write_calls
from runner.parsing.cut_points import CutPoints
from runner.parsing.events import ContentPiece, Event, FinishedCall, ReasoningPiece, TurnReading
from runner.parsing.harmony import CALLS, HarmonyStream, learn_harmony, read_harmony
from runner.parsing.learning.format_check import STRINGS, check_calls, differences
from runner.parsing.learning.probe_renders import FormatProber, ProbeCall
from runner.parsing.limitations import CallLimitation
from runner.testing import Reply, call
from runner.tools.tool import Tool
from tests import sweeps
from tests.conformance.corpus import Entry, corpus
from tests.parsing.families import family
from tests.parsing.written_turns import VALUES

HARMONY = [entry for entry in corpus() if "<|channel|>" in entry.text and " to=" in entry.text]
OTHERS = [entry for entry in corpus() if entry not in HARMONY]
START = "<|start|>assistant"


def read(text: str, _: Schemas) -> TurnReading:
    return read_harmony(text)


def prober(entry: Entry) -> FormatProber:
    return FormatProber(entry.renderer(), CutPoints())


@pytest.mark.parametrize("entry", HARMONY, ids=lambda entry: entry.name)
def test_harmony_templates_are_recognized_written_and_read(entry: Entry) -> None:
    form = learn_harmony(entry.renderer())
    assert form == CALLS
    assert differences(prober(entry), form, read) == []
    assert check_calls(prober(entry), form, read) == {CallLimitation.ONE_CALL, CallLimitation.CONTENT_DROPPED}


@pytest.mark.parametrize("entry", HARMONY, ids=lambda entry: entry.name)
def test_render_is_read_as_its_messages(entry: Entry) -> None:
    for string in STRINGS.values():
        said = ProbeCall("look_up", {"query": string, "more": [1, {"a": None}]})
        for content in ("", "I look it up."):
            for followed in (False, True):
                text = prober(entry).turn(said, content=content, followed=followed)
                assert text is not None
                written = text.partition(START)[2].partition("<|start|>functions.")[0]
                # The templates have no content beside a call, and write it as reasoning.
                assert read_harmony(written) == TurnReading(content, "", [ReadCall(said.name, said.arguments)])
    answer = prober(entry).turn(content="It is 42.", thought={"thinking": "Well."})
    assert answer is not None
    assert read_harmony(answer.partition(START)[2]).content == "It is 42."
    assert read_harmony(answer.partition(START)[2]).reasoning in ("Well.", "")


@pytest.mark.parametrize("entry", sweeps.part(OTHERS, 12), ids=lambda entry: entry.name)
def test_other_templates_are_not_taken_for_harmony(entry: Entry) -> None:
    assert learn_harmony(entry.renderer()) is None


def test_harmony_is_recognized_by_its_render_and_not_by_name() -> None:
    text = next(entry.text for entry in HARMONY if entry.name == "openai-gpt-oss-120b")
    spelled = text.replace('else "json")', 'else "<|constrain|>json")')
    assert spelled != text
    renderer = Entry("other", spelled, ("other",), "other").renderer()
    form = learn_harmony(renderer)
    assert form is not None
    assert form != CALLS
    assert differences(FormatProber(renderer, CutPoints()), form, read) == []


CALL = [ReadCall("f", {"a": 1})]


@pytest.mark.parametrize(
    "header",
    [
        " to=functions.f<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.f<|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.f json<|message|>",
        "<|channel|>commentary json to=functions.f<|message|>",
        "<|channel|>analysis to=functions.f code<|message|>",
        " to=functions.f<|channel|>commentary<|message|>",
        " to=functions.f<|constrain|>json<|message|>",
        " to=functions.f<|message|>",
        "to=functions.f<|message|>\n",
        " to = functions.f <|channel|> commentary <|message|> ",
        "<|channel|>commentary to=f<|message|>",
    ],
)
@pytest.mark.parametrize("end", ["<|call|>", "", "\n<|call|>\n", "<|end|>", "<|return|>"])
def test_header_variants_of_models_are_read(header: str, end: str) -> None:
    assert read_harmony(f'{header}{{"a": 1}}{end}') == TurnReading("", "", CALL)
    before = f"<|channel|>analysis<|message|>hm<|end|>{START}"
    assert read_harmony(f'{before}{header}{{"a": 1}}{end}') == TurnReading("hm", "", CALL)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>final<|message|>yes<|return|>", TurnReading("", "yes", [])),
        ("<|channel|>final<|message|> yes", TurnReading("", "yes", [])),
        ("<|message|>yes<|return|>", TurnReading("", "yes", [])),
        ("yes, and to begin", TurnReading("", "yes, and to begin", [])),
        ("to begin", TurnReading("", "to begin", [])),
        (
            f"<|channel|>analysis<|message|>a<|end|>{START}<|channel|>analysis<|message|>b<|end|>"
            f"{START}<|channel|>commentary<|message|>I look.<|end|>{START} to=functions.f<|message|>{{}}<|call|>",
            TurnReading("a\nb", "I look.", [ReadCall("f", {})]),
        ),
        (
            f"<|channel|>commentary<|message|>one<|end|>{START}<|channel|>final<|message|>two<|return|>",
            TurnReading("", "one\ntwo", []),
        ),
        (
            f' to=functions.f<|message|>{{"a": 1}}<|call|>{START} to=functions.g<|message|>{{"b": 2}}<|call|>',
            TurnReading("", "", [*CALL, ReadCall("g", {"b": 2})]),
        ),
        (
            ' to=functions.f<|message|>{"a": 1}<|call|><|start|>functions.f to=assistant<|message|>made up<|end|>',
            TurnReading("", "", CALL),
        ),
        (
            ' to=functions.f<|message|>{"a": "<|call|><|end|>"}',
            TurnReading("", "", [ReadCall("f", {"a": "<|call|><|end|>"})]),
        ),
        (" to=functions.f<|message|><|call|>", TurnReading("", "", [ReadCall("f", {})])),
        ("<|channel|>analysis<|message|>hm, and then it was c", TurnReading("hm, and then it was c", "", [])),
        ("<|channel|>fin", TurnReading("", "", [])),
    ],
)
def test_messages_of_a_turn_are_read(text: str, expected: TurnReading) -> None:
    assert read_harmony(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        ' to=functions.f<|message|>{"a": <|call|>',
        ' to=functions.f<|message|>{"a": 1',
        ' to=functions.f<|message|>{"a": 1} so<|call|>',
        " to=functions.f<|message|>[1]<|call|>",
        " to=functions.f<|message|>",
        " to=functions.f<|channel|>comm",
    ],
)
def test_unreadable_call_has_an_error_and_its_name(text: str) -> None:
    (call,) = read_harmony(text).calls
    assert call.error is not None
    assert call.name == "f"


def test_text_after_an_unreadable_call_is_read() -> None:
    reading = read_harmony(f" to=functions.f<|message|>{{a<|call|>{START}<|channel|>final<|message|>so")
    assert [call.error is None for call in reading.calls] == [False]
    assert reading.content == "so"


# --- streaming

MESSAGES = st.one_of(
    st.sampled_from(["Well.", "\n a <b \n<|en", "", " to=f"]).map(lambda text: f"<|channel|>analysis<|message|>{text}"),
    st.sampled_from(["It is.", " one\n two ", "{"]).map(lambda text: f"<|channel|>final<|message|>{text}"),
    st.sampled_from(["I look.", ""]).map(lambda text: f"<|channel|>commentary<|message|>{text}"),
    st.dictionaries(st.sampled_from(["a", "b"]), VALUES).map(
        lambda arguments: write_calls(CALLS, [WrittenCall("f", arguments, "")])
    ),
    st.sampled_from(["plain < text", "to", "<", "<|mess", "{'a': 1}", ' to=functions.f<|message|>{"a": \'}']),
)
ENDS = st.sampled_from([f"<|end|>{START}", f"<|call|>{START}", "<|return|>", "<|call|>", START, "<|end|>", ""])
TEXTS = st.lists(st.tuples(MESSAGES, ENDS), max_size=4).map(lambda parts: "".join(map("".join, parts)))


@settings(max_examples=sweeps.times(2000, 300), deadline=None)
@given(text=TEXTS, cut=st.floats(0, 1), seed=st.integers(0, 2**32))
def test_pieces_give_the_same_events_as_the_complete_text(text: str, cut: float, seed: int) -> None:
    text = text[: int(len(text) * cut)] if seed % 2 else text
    source, at = random.Random(seed), 0
    stream, events = HarmonyStream(), list[Event]()
    while at < len(text):
        length = source.randint(1, 7)
        events += stream.feed(text[at : at + length])
        at += length
    events += stream.finish()

    whole = read_harmony(text)
    assert stream.reading == whole
    assert [event.call for event in events if isinstance(event, FinishedCall)] == whole.calls
    assert "".join(event.text for event in events if isinstance(event, ReasoningPiece)) == whole.reasoning
    assert "".join(event.text for event in events if isinstance(event, ContentPiece)) == whole.content


@settings(max_examples=sweeps.times(200, 30), deadline=None)
@given(arguments=st.dictionaries(st.sampled_from(["a", "b"]), VALUES))
def test_truncated_turn_has_no_invented_call(arguments: dict[str, object]) -> None:
    call = write_calls(CALLS, [WrittenCall("f", arguments, "")])
    text = f"{THOUGHT}{call}<|call|>"
    stream, events = HarmonyStream(), list[Event]()
    for at, sign in enumerate(text, 1):
        events += stream.feed(sign)
        ended = [call for call in read_harmony(text[:at]).calls if call.error is None]
        assert ended in ([], [ReadCall("f", arguments)])
    assert events[-1] == FinishedCall(ReadCall("f", arguments))


def test_call_is_emitted_when_its_end_arrives() -> None:
    stream = HarmonyStream()
    assert stream.feed("<|channel|>analysis<|message|>hm, ") == [ReasoningPiece("hm,")]
    assert stream.feed(f"so<|end|>{START} to=functions.f<|mess") == [ReasoningPiece(" so")]
    assert stream.feed('age|>{"a": 1}<|call') == []
    assert stream.feed("|>") == [FinishedCall(CALL[0])]


THOUGHT = f"<|channel|>analysis<|message|>hm<|end|>{START}"


def add(a: int, b: int = 0) -> int:
    """Add two integers."""
    return a + b


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        (THOUGHT + write_calls(CALLS, [WrittenCall("add", {"a": 1}, "")]), True),
        (THOUGHT + write_calls(CALLS, [WrittenCall("sub", {"a": 1}, "")]), False),
        (THOUGHT + write_calls(CALLS, [WrittenCall("add", {}, "")]), False),
        (THOUGHT + "<|channel|>final<|message|>no", False),
        ("<|channel|>final<|message|>no", False),
    ],
)
def test_call_after_reasoning_is_enforced(text: str, accepted: bool) -> None:
    enforced = harmony_constraint(CALLS, [Tool(add)], "required")
    assert enforced is not None
    stop = 256
    vocabulary = xgrammar.TokenizerInfo(
        [*(bytes([byte]) for byte in range(stop)), b""], vocab_size=stop + 1, stop_token_ids=[stop]
    )
    grammar = xgrammar.GrammarCompiler(vocabulary, max_threads=1).compile_grammar(enforced.value)
    matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
    assert (matcher.accept_string(text) and matcher.is_terminated()) == accepted


def test_harmony_turn_has_only_one_call() -> None:
    call = WrittenCall("f", {}, "")
    with pytest.raises(Unwritable):
        write_calls(CALLS, [call, call])


def test_scripted_content_beside_a_call_is_its_own_message() -> None:
    of = family("gpt-oss")
    ids = ReplyEncoder(of.tokenizer, of.template).encode(Reply("Let me see.", calls=[call("look_up", query="x")])).ids
    reading = read_harmony(of.tokenizer.decode(list(ids)))
    assert (reading.content, [each.name for each in reading.calls]) == ("Let me see.", ["look_up"])
