"""Call formats are learnt from renders alone, deterministically and with proven limitations."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.parsing.call_writer import WrittenCall, id_for, write_calls
from runner.parsing.learning import learnt_format, probe_renders
from runner.parsing.learning.calls import learn_calls
from runner.parsing.learning.format_check import equal_with_types
from runner.parsing.learning.learnt_format import FormatVerdict, LearntFormat, learn_format
from runner.parsing.learning.probe_renders import MAX_RENDERS, FormatProber, FormatRequirement, ProbeCall
from runner.parsing.learning.reader_check import RenderedTurns
from runner.parsing.limitations import CallLimitation
from runner.parsing.turn_format import CallFormat, Slot
from runner.parsing.turn_reader import TurnReader
from runner.tokens.template import ChatTemplate, Renderer
from tests import sweeps
from tests.conformance import turn_formats
from tests.conformance.corpus import corpus
from tests.parsing.learnt_formats import CLASSES

pytestmark = pytest.mark.sample_cases(3)

ROWS = turn_formats.recorded()
LEARNT = [row.template for row in ROWS if row.verdict != FormatVerdict.REFUSED and "<|channel|>" not in row.thought]
EXACT = [row.template for row in ROWS if row.verdict == FormatVerdict.EXACT]


@functools.cache
def renderer_of(name: str) -> Renderer:
    return next(entry for entry in corpus() if entry.name == name).renderer()


@functools.cache
def learnt_of(name: str) -> LearntFormat:
    return learn_format(renderer_of(name))


def calls_of(name: str) -> CallFormat:
    calls = learnt_of(name).format.calls
    assert calls is not None
    return calls


@functools.cache
def settled_prober_of(name: str) -> FormatProber:
    """Return a prober that has determined its settings for calls."""
    prober = learnt_format.prober_of(renderer_of(name))
    learn_calls(prober)
    return prober


def prober_of(name: str) -> FormatProber:
    """Return a prober that has used none of its renders."""
    return replace(settled_prober_of(name), renders=0)


@pytest.mark.parametrize("name", sweeps.part(LEARNT, 12))
def test_learnt_format_contains_no_word_of_the_probes(name: str) -> None:
    assert "zq" not in json.dumps(learnt_of(name).as_json()["format"])


@pytest.mark.parametrize("name", sweeps.part(LEARNT, 12))
def test_learning_is_deterministic_and_bounded_in_renders(name: str) -> None:
    again = learn_format(renderer_of(name))
    assert again == learnt_of(name)
    assert again.renders <= MAX_RENDERS
    assert LearntFormat.from_json(again.as_json()) == again


@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "openai-gpt-oss-120b"])
def test_too_many_renders_leave_a_format_without_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = learnt_of(name)
    for limit in range(0, known.renders, 1 if sweeps.whole() else 7):
        monkeypatch.setattr(probe_renders, "MAX_RENDERS", limit)
        bounded = learn_format(renderer_of(name))
        assert (bounded.verdict, bounded.missing) == (FormatVerdict.REFUSED, FormatRequirement.BOUNDED), limit
    monkeypatch.setattr(probe_renders, "MAX_RENDERS", known.renders)
    assert learn_format(renderer_of(name)) == known


def test_harmony_template_with_wrong_arguments_is_refused() -> None:
    text = next(entry for entry in corpus() if entry.name == "openai-gpt-oss-120b").text
    wrong = text.replace("tool_call.arguments|tojson", 'tool_call.arguments|tojson|replace("1", "2")')
    assert wrong != text
    refused = learn_format(ChatTemplate(wrong, name="wrong").renderer())
    assert (refused.verdict, refused.missing) == (FormatVerdict.REFUSED, FormatRequirement.INVERTED)
    assert refused.why


# The template writes instructions after every turn, and indents after Unicode line ends.
OWN_INSTRUCTIONS = {"CohereForAI-c4ai-command-r-plus-tool_use"}
UNICODE_BREAKS = set("\x85\u2028\u2029")


def text_of(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


# JSON cannot contain half a surrogate pair.
CHARACTERS = st.characters(exclude_categories=["Cs"])
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.\-]{0,11}", fullmatch=True)


def values(form: CallFormat) -> st.SearchStrategy[Any]:
    """Generate any JSON value, with control characters, and with the format's own marks in strings."""
    marks = [each for each in (form.begin, form.trigger, form.close, form.close.strip(), form.between) if each]
    signs = [
        *marks,
        "\n",
        "\r\n",
        "\t",
        "\0",
        "\x1b",
        "\x85",
        "\u2028",
        '"',
        "'",
        "\\",
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        ",",
        " ",
    ]
    texts = st.text(CHARACTERS, max_size=12) | st.lists(st.sampled_from(signs), max_size=6).map("".join)
    return st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(10**20), 10**20)
        | st.floats(allow_nan=False, allow_infinity=False)
        | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=2),
        max_leaves=5,
    )


def said_in(form: CallFormat, name: str) -> st.SearchStrategy[list[ProbeCall]]:
    arguments = st.dictionaries(NAMES, values(form), max_size=3)
    if name in OWN_INSTRUCTIONS:
        arguments = arguments.filter(lambda each: not UNICODE_BREAKS.intersection(text_of(each)))
    return st.lists(st.builds(ProbeCall, NAMES, arguments), min_size=1, max_size=1 if form.between is None else 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", sweeps.part(EXACT, 16))
@settings(max_examples=20)
@given(data=st.data())
def test_renders_of_exact_templates_are_read_exactly(name: str, data: st.DataObject) -> None:
    form, prober, whole = calls_of(name), prober_of(name), learnt_of(name).format
    said = data.draw(said_in(form, name))
    rendered = RenderedTurns(prober, whole.reasoning).said(*said)
    assert rendered is not None
    written = write_calls(
        form, [WrittenCall(each.name, each.arguments, prober.id_of(each, n)) for n, each in enumerate(said)]
    )
    # Templates with arguments as text use our encoder, which writes this exponent without its zero.
    assert written.replace("e-0", "e-") in rendered.replace("e-0", "e-")
    reading = TurnReader(whole).read(rendered, {each.name: {} for each in said})
    assert [(call.name, call.error) for call in reading.calls] == [(each.name, None) for each in said]
    assert all(equal_with_types(call.arguments, each.arguments) for call, each in zip(reading.calls, said, strict=True))
    assert reading.content == "" or name in OWN_INSTRUCTIONS


UNTYPED = [row.template for row in ROWS if CallLimitation.UNTYPED in row.limitations]


@pytest.mark.parametrize("name", sweeps.part(UNTYPED, 8))
def test_untyped_template_renders_a_number_like_its_text(name: str) -> None:
    number, text = (prober_of(name).turn(ProbeCall("look_up", {"query": value})) for value in (5, "5"))
    assert number == text != None  # noqa: E711  # one comparison checks both


CLOSING = [row.template for row in ROWS if CallLimitation.CLOSING_IN_STRING in row.limitations]
SEVERAL = [row.template for row in ROWS if row.template in CLOSING and CallLimitation.ONE_CALL not in row.limitations]


@pytest.mark.parametrize("name", sweeps.part(SEVERAL, 8))
def test_end_of_calls_in_a_string_renders_like_two_calls(name: str) -> None:
    # Some templates write strings that contain "<" in another form, so all strings here contain one.
    one, other = ProbeCall("look_up", {"query": "<zqone"}), ProbeCall("look_up", {"query": "<zqother"})
    both = prober_of(name).turn(one, other)
    assert both is not None
    within = both[both.index("<zqone") : both.rindex("<zqother") + len("<zqother")]
    assert prober_of(name).turn(ProbeCall("look_up", {"query": within})) == both


@pytest.mark.parametrize("name", ["Cohere2MoE", "CohereLabs-command-a-plus-05-2026-w4a4"])
def test_text_before_an_answer_is_skipped_after_open_reasoning(name: str) -> None:
    form = learnt_of(name).format
    assert form.reasoning is not None
    assert form.reasoning.opened_by_prompt
    reading = TurnReader(form).read(f"Hm.{form.reasoning.close}<|START_TEXT|>Done.")
    assert (reading.reasoning, reading.content) == ("Hm.", "Done.")


def test_close_of_reasoning_is_not_text_before_an_answer() -> None:
    form = learnt_of("meituan-longcat-LongCat-2.0").format
    assert form.reasoning is not None
    assert form.content.open == ""


def test_format_depends_on_template_options() -> None:
    text = (
        "{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{%- if m.tool_calls %}{% for c in m.tool_calls %}"
        "{% if quick %}[[{{ c.function.name }}:{{ c.function.arguments | tojson }}]]"
        "{% else %}<call>{{ c.function | tojson }}</call>{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
        "{%- if add_generation_prompt %}<|assistant|>{{ '<think></think>' if quick else '<think>' }}{% endif %}"
    )
    template = ChatTemplate(text, name="by options")
    slow, quick = (learn_format(template.renderer(options=options)).format for options in ({}, {"quick": True}))
    assert slow.calls is not None
    assert quick.calls is not None
    assert (slow.calls.trigger, quick.calls.begin) == ("<call>", "[[")
    assert slow.reasoning is not None
    assert slow.reasoning.opened_by_prompt
    assert quick.reasoning is None or not quick.reasoning.opened_by_prompt


TURNED_ROUND = [
    ("GLM-4.7-Flash", "enable_thinking"),
    ("Qwen3.5-4B", "enable_thinking"),
    ("LGAI-EXAONE-EXAONE-4.0-32B", "enable_thinking"),
    ("deepseek-ai-DeepSeek-V4", "thinking"),
    ("moonshotai-Kimi-K2.5", "thinking"),
]


@pytest.mark.parametrize(("name", "option"), TURNED_ROUND)
def test_template_is_learnt_under_both_values_of_an_option(name: str, option: str) -> None:
    renderer = renderer_of(name)
    on, off = (
        learn_format(renderer.template.renderer({**renderer.options, option: value}, renderer.now)).format
        for value in (True, False)
    )
    assert on.calls is not None
    assert on.calls == off.calls
    call = write_calls(on.calls, [WrittenCall("look_up", {"query": "x"}, id_for(on.calls, "look_up", 0))])
    said = f"Hm.</think>\n\n{call}"
    thinking, plain = TurnReader(on).read(said), TurnReader(off).read(call)
    assert on.reasoning is not None
    assert on.reasoning.opened_by_prompt
    assert (thinking.reasoning, thinking.content) == ("Hm.", "")
    # If the prompt already closed the reasoning, everything is content.
    assert off.reasoning is None or not off.reasoning.opened_by_prompt
    assert (plain.reasoning, plain.content) == ("", "")
    for reading in (thinking, plain):
        assert [(call.name, call.arguments, call.error) for call in reading.calls] == [
            ("look_up", {"query": "x"}, None)
        ]


@pytest.mark.parametrize("name", ["NousResearch-Hermes-4-14B", "NousResearch-Hermes-4.3-36B"])
def test_call_limitations_depend_on_template_options(name: str) -> None:
    renderer = renderer_of(name)
    limitations = [
        learn_format(renderer.template.renderer({**renderer.options, "thinking": value}, renderer.now)).limitations
        for value in (True, False)
    ]
    assert limitations[0] != limitations[1]


LOOP = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}BODY{% endfor %}{% endfor %}"
)
REFUSED = {
    "nothing of a call": ("", FormatRequirement.SHOWN),
    "only the name": ("<call>{{ c.function.name }}</call>", FormatRequirement.SHOWN),
    "strings end nowhere": (
        "<c>{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }} {{ v }} {% endfor %})</c>",
        FormatRequirement.INVERTED,
    ),
    "values backwards": (
        "<call>{{ c.function.name }} {% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v | string | reverse }}"
        "</{{ k }}>{% endfor %}</call>",
        FormatRequirement.SHOWN,
    ),
}


def test_header_on_an_earlier_line_does_not_open_reasoning() -> None:
    text = (
        "{% for m in messages %}{% if m.reasoning_content %}<|thoughts|>\n<think>{{ m.reasoning_content }}</think>"
        "{% endif %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    )
    reasoning = learn_format(ChatTemplate(text, name="with a header").renderer()).format.reasoning
    assert reasoning is not None
    assert (reasoning.open, reasoning.close) == ("<think>", "</think>")


def test_id_that_contains_the_name_is_one_slot() -> None:
    assert [each for each in calls_of(CLASSES["name in the id"]).call if isinstance(each, Slot)] == [
        Slot.ID,
        Slot.ARGUMENTS,
    ]


def test_mark_after_every_call_ends_the_call_and_not_the_turn() -> None:
    body = '<|call|>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}<|end_call|>'
    calls = learn_format(ChatTemplate(LOOP.replace("BODY", body), name="marked").renderer()).format.calls
    assert calls is not None
    assert (calls.between, calls.close, calls.stop) == ("<|end_call|><|call|>", "<|end_call|>", "")


@pytest.mark.parametrize("what", REFUSED)
def test_unlearnable_template_is_refused_with_its_requirement(what: str) -> None:
    body, missing = REFUSED[what]
    learnt = learn_format(ChatTemplate(LOOP.replace("BODY", body), name=what).renderer())
    assert learnt.verdict is FormatVerdict.REFUSED
    assert learnt.missing is missing
    assert learnt.why
