"""A tail from a shortened history equals the tail of the whole history, however a template looks back."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jinja2.nodes
import pytest

from runner.messages import Message
from runner.tokens.bridging.locality import Locality, _proven
from runner.tokens.bridging.prompt_renderer import PromptRenderer
from runner.tokens.bridging.refusal import Unbridgeable
from runner.tokens.bridging.tail import Tail
from runner.tokens.lookback.proof import Lookback, Proofs
from runner.tokens.probe_messages import ANSWER, QUESTION
from runner.tokens.template import ChatTemplate, Renderer, ToolSchema, environment
from runner.tokens.turn_shape import AnsweredTurn, Arrival, TurnShape
from tests import sweeps
from tests.conformance.corpus import Entry, corpus
from tests.conformance.sweep import is_tool_capable
from tests.tokens.bridging import ADD, chatml

pytestmark = [pytest.mark.slow, pytest.mark.sample_cases(5)]

FOLDER = Path(__file__).parent / "looking_back"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
CONTROLS = [name for name in NAMES if name.startswith("neg_")]
# their templates raise on some histories, and otherwise no tail depends on the history
RAISING = ("guard_markup", "strict_blank")


class Case(NamedTuple):
    """A turn, and the messages that answer it."""

    history: list[Message]
    new: list[Message]
    turn: int


class Written(NamedTuple):
    """A template that looks back, or seems to, and conversations in which this matters."""

    renderer: Renderer
    tools: Sequence[ToolSchema]
    conversations: Sequence[list[Message]]


@functools.cache
def written(name: str) -> Written:
    given = json.loads((FOLDER / f"{name}.json").read_text())
    text = (FOLDER / f"{name}.jinja").read_text()
    renderer = ChatTemplate(text, name=name, variables={"bos_token": "<s>"}).renderer()
    return Written(renderer, given["tools"], given["conversations"])


def cases(conversation: Sequence[Message]) -> Iterator[Case]:
    """Yield every answered turn of a conversation."""
    turns = [index for index, message in enumerate(conversation) if message["role"] == "assistant"]
    for number, (turn, following) in enumerate(zip(turns, [*turns[1:], len(conversation)], strict=True)):
        if conversation[turn + 1 : following]:
            yield Case([*conversation[: turn + 1]], [*conversation[turn + 1 : following]], number)


def tail_of(locality: Locality, case: Case, tools: Sequence[ToolSchema]) -> Tail | None:
    try:
        return locality.tail(AnsweredTurn(case.history, case.new, tools, case.turn))
    except Unbridgeable:
        return None


def whole(renderer: Renderer, case: Case, tools: Sequence[ToolSchema]) -> str | None:
    """Return the tail of the whole history, or None if the template raises an error on it."""
    try:
        return Locality(PromptRenderer(renderer)).whole_tail(AnsweredTurn(case.history, case.new, tools)).text
    except Unbridgeable:
        return None


@pytest.mark.parametrize("name", NAMES)
def test_every_tail_is_that_of_the_whole_history(name: str) -> None:
    renderer, tools, conversations = written(name)
    locality, made = Locality(PromptRenderer(renderer)), 0
    for case in (case for conversation in conversations for case in cases(conversation)):
        tail, right = tail_of(locality, case, tools), whole(renderer, case, tools)
        if right is None:  # a history that the template refuses has no right tail
            assert name in RAISING
        elif tail is None:  # the template reads the turn's own call: refused by name
            real = renderer.render([*case.history, *case.new], tools=tools)
            calls = case.history[-1].get("tool_calls")
            assert not real.endswith(right.partition(case.new[0]["content"])[2] if calls else right)
        else:
            assert tail.text == right, case
            made += 1
    assert made > 20


@pytest.mark.parametrize("name", sorted({*NAMES} - {*CONTROLS, *RAISING}))
def test_conversations_separate_templates_that_look_back(name: str) -> None:
    # Otherwise the test above would hold for any template.
    renderer, tools, conversations = written(name)
    short: list[Message] = [{"role": "user", "content": "Continue."}]
    differing = [
        case
        for conversation in conversations
        for case in cases(conversation)
        if whole(renderer, case, tools) != whole(renderer, Case([*short, case.history[-1]], case.new, 0), tools)
    ]
    assert differing


@pytest.mark.parametrize("name", NAMES)
def test_no_tail_depends_on_what_others_asked_before(name: str) -> None:
    renderer, tools, conversations = written(name)
    everything = [case for conversation in conversations for case in cases(conversation)]
    alone = [tail_of(Locality(PromptRenderer(renderer)), case, tools) for case in everything]
    for seed in range(2):
        shared, order = Locality(PromptRenderer(renderer)), list(range(len(everything)))
        random.Random(seed).shuffle(order)
        for index in order:
            tail, first = tail_of(shared, everything[index], tools), alone[index]
            assert (tail and (tail.text, tail.local)) == (first and (first.text, first.local))


def test_templates_that_seem_to_look_back_are_mostly_proven() -> None:
    proven = [name for name in CONTROLS if any(local for _, local in _local_tails(name))]
    assert len(proven) >= 5


def _local_tails(name: str) -> Iterator[tuple[Case, bool]]:
    renderer, tools, conversations = written(name)
    locality = Locality(PromptRenderer(renderer))
    for case in (case for conversation in conversations for case in cases(conversation)):
        tail = tail_of(locality, case, tools)
        yield case, tail is not None and tail.local


# --- public templates, with their own words in every place


@pytest.mark.parametrize("part", sweeps.part(range(8), 8))
def test_public_templates_words_in_the_past_change_no_tail_unseen(part: int) -> None:
    seen = local = 0
    for entry in corpus()[part::8]:
        for case, tools, renderer in _with_own_words(entry):
            tail, right = tail_of(Locality(PromptRenderer(renderer)), case, tools), whole(renderer, case, tools)
            if tail is not None and right is not None:
                assert tail.text == right, (entry.name, case)
                seen, local = seen + 1, local + tail.local
    assert seen > 200
    assert local > seen / 2


def _with_own_words(entry: Entry) -> Iterator[tuple[Case, Sequence[ToolSchema], Renderer]]:
    renderer, rng = entry.renderer(), random.Random(entry.name)
    tools = [ADD] if is_tool_capable(entry) else []
    words = _own_words(entry.text)
    for _ in range(2):
        for case in list(cases(_conversation(rng, words, tools=bool(tools))))[1:]:
            yield case, tools, renderer


def _own_words(text: str) -> list[str]:
    """Return the constants that a template compares with contents, searches in contents, or removes from contents."""
    constants = environment().parse(text).find_all(jinja2.nodes.Const)
    return sorted({each.value for each in constants if isinstance(each.value, str) and 0 < len(each.value) < 60})


def _conversation(rng: random.Random, words: Sequence[str], *, tools: bool) -> list[Message]:
    def said(text: str) -> str:
        if not words or rng.random() < 0.4:
            return text
        word = rng.choice(words)
        return rng.choice([word, f"{text} {word}", f"{word} {text}", text + word + text])

    messages: list[Any] = [{"role": "user", "content": said("A question?")}]
    if rng.random() < 0.5:
        messages.insert(0, {"role": "system", "content": said("Be brief.")})
    for number in range(rng.randint(2, 4)):
        turn: dict[str, Any] = {"role": "assistant", "content": said("An answer.")}
        if rng.random() < 0.3:
            turn["reasoning_content"] = said("A thought.")
        if tools and rng.random() < 0.5:
            call_id = f"call{number:05}"
            function = {"name": "add", "arguments": {"a": rng.choice([17, "x"])}}
            turn |= {"content": "", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}
            messages += [turn, {"role": "tool", "content": said("42"), "tool_call_id": call_id, "name": "add"}]
        else:
            messages += [turn, {"role": "user", "content": said("And more?")}]
    return messages


# --- proofs for small templates

USER = TurnShape(system=False, calls=0, reasoning=False, text=True, new=(Arrival("user", False, False),), tools=b"")
TOOL = TurnShape(system=False, calls=1, reasoning=False, text=False, new=(Arrival("tool", False, True),), tools=b"")
CHATML = chatml()
QWEN = next(entry.text for entry in corpus() if entry.name == "Qwen-Qwen3-0.6B")


def past(text: str, shape: TurnShape = USER) -> Lookback:
    return Proofs(ChatTemplate(text, name="inline").renderer()).past(shape, [ADD])


def writing(expression: str) -> str:
    """Return a template that writes this before the generation prompt."""
    return CHATML.replace("{% if add_generation_prompt %}", f"{expression}{{% if add_generation_prompt %}}")


@pytest.mark.parametrize("shape", [USER, TOOL], ids=["user", "tool"])
@pytest.mark.parametrize("name", ["hermes", "pythonic"])
def test_the_templates_that_come_with_us_do_not_look_back(name: str, shape: TurnShape) -> None:
    proofs = Proofs(ChatTemplate.load(name).renderer())
    assert proofs.past(shape, [ADD]) is Lookback.NONE
    assert not proofs.words_matter(shape, [ADD])


@pytest.mark.parametrize(("clock", "proofs"), [("", 1), ("{{ strftime_now('%d') }}", 2)], ids=["no clock", "clock"])
def test_runs_share_proofs_of_templates_without_a_clock(clock: str, proofs: int) -> None:
    before = _proven.cache_info().misses
    for day in (1, 2):
        renderer = ChatTemplate(writing(clock + "{# shared #}"), name="inline").renderer({}, datetime(2026, 1, day))
        assert Locality(PromptRenderer(renderer)).is_local(AnsweredTurn([QUESTION, ANSWER], [QUESTION]))
    assert _proven.cache_info().misses - before == proofs


@pytest.mark.parametrize("shape", [USER, TOOL], ids=["user", "tool"])
def test_last_question_found_from_the_end_is_the_same_for_all_pasts(
    shape: TurnShape,
) -> None:
    assert "last_query_index" in QWEN
    assert past(QWEN, shape) is Lookback.NONE


@pytest.mark.parametrize(
    "expression",
    [
        "{{ '(long)' if messages | length > 22 }}",
        "{{ '(odd)' if messages | length % 2 }}",
        "{{ messages[2].content if messages | length > 4 }}",
        "{% for m in messages %}{{ '(named)' if m.name is defined }}{% endfor %}",
        "{% for m in messages if m.role == 'tool' %}{{ '.' }}{% endfor %}",
        "{{ '(again)' if (messages | map(attribute='content') | unique | list | length) < (messages | length) }}",
        "{% set ns = namespace(seen=false) %}{% for m in messages %}{% if 'secret' in m.content %}"
        "{% set ns.seen = true %}{% endif %}{% endfor %}{{ '(seen)' if ns.seen }}",
        "{{ messages[-6].content if messages | length > 5 }}",
        "{% for m in messages[::-1] %}{% if loop.index == 5 %}{{ m.role }}{% endif %}{% endfor %}",
        "{{ cycler('a', 'b').next() }}",
        "{% if cycler is defined %}{{ '(long)' if messages | length > 5 }}{% endif %}",
        "{{ messages[-1].content | trim if messages | length > 5 else messages[-1].content | lower }}",
        "{{ messages[-1].content.lstrip() if messages | length > 5 else messages[-1].content.rstrip() }}",
        "{{ messages[1:] | join(attribute='role') }}",
        "{{ messages[-5] | default(boolean=true) }}",
        "{% macro told(ns) %}{% set ns.long = messages | length > 5 %}{% endmacro %}"
        "{% set ns = namespace(long=false) %}{{ told(ns) }}{{ '(long)' if ns.long }}",
        "{% macro deep(n) %}{{ deep(n + messages | length) if n < 9 }}{% set outer.x = n %}{% endmacro %}"
        "{% set outer = namespace(x=0) %}{{ deep(messages | length) }}{{ outer.x }}",
        "{% for m in messages %}{% set x = loop.index %}{% if loop.last %}{{ x }}{% endif %}{% endfor %}",
        "{% filter replace('a', messages | length | string) | upper | trim %}a{% endfilter %}",
    ],
)
def test_expression_that_reads_the_past_is_never_proven(expression: str) -> None:
    assert past(writing(expression)) is Lookback.POSSIBLE


@pytest.mark.parametrize(
    "expression",
    [
        "{{ '(never)' if messages | length < 1 }}",
        "{{ messages[-1].content }}",
        "{{ messages[-2].role }}",
        "{{ '(begun)' if 'secret' in messages[0].content }}",
        "{% for m in messages %}{% if loop.last %}{{ m.role }}{% endif %}{% endfor %}",
        "{% for m in messages %}{% set dropped = m.content | length %}{% endfor %}{{ dropped }}",
        "{{ (messages | selectattr('role', 'equalto', 'user') | list | last).content }}",
        "{% filter replace('a', 'b') | upper | trim %}a{% endfilter %}",
        "{{ messages | map(attribute='role') | list | last | upper | trim }}",
    ],
)
def test_begin_turn_and_new_messages_alone_are_proven(expression: str) -> None:
    assert past(writing(expression)) is Lookback.NONE


@pytest.mark.parametrize("sign", [">", "!=", "<=", "=="])
def test_comparison_of_the_message_count_is_proven_below_the_least(sign: str) -> None:
    # A question, the turn, and its answer exist after every history.
    assert past(writing(f"{{{{ '(more)' if messages | length {sign} 2 }}}}")) is Lookback.NONE
    assert past(writing(f"{{{{ '(more)' if messages | length {sign} 3 }}}}")) is Lookback.POSSIBLE


@pytest.mark.parametrize(
    "condition", ["messages | length > 22", "raise_exception is defined and messages | length > 22"]
)
def test_past_that_raises_differs_from_one_that_changes_a_tail(condition: str) -> None:
    assert past(writing(f"{{{{ raise_exception('long') if {condition} }}}}")) is Lookback.REFUSES


@pytest.mark.parametrize("unknown", ["x | no_such_filter", "x is no_such_test"])
def test_unknown_filter_on_some_pasts_counts_as_a_refusal(unknown: str) -> None:
    branch = f"{{% if messages | length > 22 %}}{{{{ {unknown} }}}}{{% endif %}}"
    assert past(writing("{% set x = messages[-1].content %}" + branch)) is Lookback.REFUSES


def test_a_template_that_is_not_followed_is_not_proven() -> None:
    assert past(writing("{% call(x) f() %}{% endcall %}")) is Lookback.POSSIBLE
    assert past(writing("{% for m in messages recursive %}{% endfor %}")) is Lookback.POSSIBLE


@pytest.mark.parametrize(
    ("body", "matter"),
    [
        ("{{ m.content }}", False),
        ("{{ m.content | trim }}", False),
        ("{{ m.content.split('</think>')[-1].lstrip('\\n') }}", False),
        ("{{ m.content }}{{ '.' if not m.content.endswith('.') }}", True),
        ("{{ m.content }}{{ m.content | length }}", True),
        ("{% if m.content | trim %}{{ m.content }}{% endif %}", True),  # contents of white space alone are left out
        ("{% if m.content %}{{ m.content }}{% endif %}", False),
        ("{{ (m.content + '.') | trim }}", False),
        ("{{ (m.content + '\\n') | trim }}", False),
        ("{{ (m.content + '\\n.') | trim }}", True),  # after white space alone the line break is also removed
        ("{{ (m.content + '\\n.').lstrip() }}", True),
        ("{{ (m.content + '..').strip('.') }}", False),
        ("{{ (m.content + '.a').lstrip('.') }}", True),
        ("{{ m.content or 'A' }}", False),
        # A content is not empty, but a filter may leave nothing of it, also in one of two branches.
        ("{{ m.content }}{{ 'A' if (m.content | trim) and m.content }}", True),
        ("{{ m.content }}{{ 'A' if m.content and (m.content | trim) }}", True),
        ("{{ m.content }}{{ 'A' if (m.content if messages | length > 3 else m.content | trim) }}", True),
        ("{% set c = m.content | trim %}{% if messages[3] %}{% set c = m.content %}{% endif %}{{ c or 'A' }}", True),
        ("{% set c = m.content %}{% if messages[3] %}{% set c = m.content %}{% endif %}{{ c or 'A' }}", False),
    ],
)
def test_words_that_change_the_text_after_them_are_found(body: str, matter: bool) -> None:
    renderer = ChatTemplate(chatml(body=body), name="inline").renderer()
    assert Proofs(renderer).words_matter(USER, []) is matter


EMPTY = USER._replace(text=False)
BARE = TOOL._replace(bare=True)
SHOWS_ARGUMENTS = "{{ m.content }}{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}"


@pytest.mark.parametrize(
    ("text", "shape", "matter"),
    [
        (CHATML, EMPTY, False),
        (chatml(body="{{ m.content | trim }}"), EMPTY, False),
        (chatml(body="{{ m.content or 'A' }}"), EMPTY, True),
        (chatml(body="{{ m.content }}{{ 'A' if not m.content }}"), EMPTY, True),
        (writing("{{ 'A' if not messages[-2].content }}"), USER, False),
        (writing("{{ 'A' if not messages[-2].content }}"), EMPTY, True),
        (writing("{{ 'A' if messages[-2].content == '' }}"), EMPTY, True),
        (chatml(body=SHOWS_ARGUMENTS), TOOL, False),
        (chatml(body=SHOWS_ARGUMENTS), BARE, True),  # nothing is proven for this template
        (chatml(body=SHOWS_ARGUMENTS + "{{ 'A' if m.tool_calls[0].function.arguments | length > 1 }}"), TOOL, True),
    ],
)
def test_words_that_matter_are_found_for_turns_of_each_shape(text: str, shape: TurnShape, matter: bool) -> None:
    assert Proofs(ChatTemplate(text, name="inline").renderer()).words_matter(shape, [ADD]) is matter


def test_the_past_that_matters_to_empty_words_alone_is_found() -> None:
    text = writing("{{ 'A' if not messages[-2].content and messages | length > 5 }}")
    proofs = Proofs(ChatTemplate(text, name="inline").renderer())
    assert proofs.past(EMPTY, []) is Lookback.NONE  # for the render with a sentinel
    assert proofs.past_matters_to_words(EMPTY, [])
    assert not proofs.past_matters_to_words(USER, [])
