"""Text that the grammars of learnt formats accept, according to the real xgrammar."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import xgrammar
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from runner.options import Constraint, ConstraintKind
from runner.parsing.argument_rules import ends_of_strings
from runner.parsing.call_grammar import constraint, enforceable
from runner.parsing.call_reader import CallReader
from runner.parsing.call_writer import Unwritable
from runner.parsing.notations import Cdata, Nested
from runner.parsing.turn_format import CallFormat, ReasoningFormat, TaggedArguments
from runner.tools.tool import Tool
from tests import sweeps
from tests.conformance.corpus import corpus
from tests.parsing.enforced import (
    ADD,
    BY_ITSELF,
    END,
    OPENED,
    TOOLS,
    Call,
    accepts,
    add,
    compiled,
    every_class,
    form_of,
    required,
    written,
)
from tests.parsing.learnt_formats import CLASSES, learnt

NUMBERS = st.integers(-(10**30), 10**30)
FLOATS = st.floats(-1e307, 1e307, allow_subnormal=False)
MARKUP = (
    "</b>",
    "it's",
    'say "x"',
    "a\n b",
    "{'a': [1, 2]}",
    "true",
    "42",
    "None",
    "</parameter",
    "&lt;",
    "a\\nb",
    "<![CDATA[",
    "]]",
)
TEXTS = st.text(max_size=12) | st.sampled_from(MARKUP)
KEYS = st.text("abc_xyz", min_size=1, max_size=6)
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


def fields(needed: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Generate objects with keys in the order of the schema; optional keys may be missing."""
    names = [*needed, *optional]
    return st.fixed_dictionaries(needed, optional=optional).map(
        lambda values: {name: values[name] for name in names if name in values}
    )


LEAVES: st.SearchStrategy[Any] = fields({"label": TEXTS}, {"children": st.just([])})
BRANCHES = fields({"label": TEXTS}, {"children": st.lists(LEAVES, max_size=2)})
ARGUMENTS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "add": fields({"a": NUMBERS, "b": NUMBERS}, {}),
    "paint": fields(
        {"colour": st.sampled_from(["red", 'pale "blue"', "it's"])},
        {
            "mode": st.sampled_from(["fast", 2, True, None]),
            "at": st.none() | fields({"x": FLOATS}, {"y": FLOATS}),
            "alpha": FLOATS.map(abs),
        },
    ),
    "plant": fields(
        {"tree": fields({"label": TEXTS}, {"children": st.lists(BRANCHES, max_size=2)})}, {"times": st.integers(1, 12)}
    ),
    "note": fields(
        {},
        {
            "text": TEXTS,
            "tags": st.none() | st.lists(TEXTS, max_size=3),
            "scores": st.none() | st.dictionaries(KEYS, NUMBERS, max_size=3),
            "pair": st.tuples(NUMBERS, TEXTS).map(list),
            "done": st.booleans(),
            "anything": ANYTHING,
            "few": st.lists(NUMBERS, min_size=1, max_size=2),
        },
    ),
    "stop": st.just({}),
}
CALLS = st.sampled_from(sorted(ARGUMENTS)).flatmap(lambda name: st.tuples(st.just(name), ARGUMENTS[name]))


def holds_its_end(form: CallFormat, value: Any) -> bool:
    """Return whether a string contains its own end, which no format without quotes can express."""
    if isinstance(value, Mapping):
        return any(holds_its_end(form, each) for each in value.values())
    if isinstance(value, list):
        return any(holds_its_end(form, each) for each in value)
    return isinstance(value, str) and any(end in value for end in forbidden(form))


def forbidden(form: CallFormat) -> Sequence[str]:
    styles = form.arguments.styles.values() if isinstance(form.arguments, TaggedArguments) else ()
    nested = [style.notation.close_string for style in styles if isinstance(style.notation, Nested)]
    cdata = ["]]>" for style in styles if isinstance(style.notation, Cdata)]
    return [*ends_of_strings(form), *nested, *cdata]


@pytest.mark.sample_cases(3)
@every_class
@settings(max_examples=sweeps.times(150, 25))
@given(calls=st.lists(CALLS, min_size=1, max_size=3))
def test_valid_calls_are_accepted_as_the_template_writes_them(
    name: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    form = form_of(name)
    assume(not any(holds_its_end(form, arguments) for _, arguments in calls))
    text = written(form, *(calls if form.between is not None else calls[:1]))
    assert accepts(required(form, TOOLS), text), text
    if form.trigger:
        assert accepts(required(form, TOOLS, "auto"), f"I look it up.{form.after_content or ''}{text}"), text


SWEEP = sweeps.part([entry.name for entry in corpus()], 16)


def test_every_learnt_format_is_enforceable_and_accepts_its_text() -> None:
    source = sweeps.random_of("enforcing")
    for name in SWEEP:
        form = learnt(name)
        if form is None:
            continue
        assert enforceable(form) is None, name
        numbers = {"a": source.randrange(-99, 99), "b": source.randrange(10**9)}
        calls: list[Call] = [
            ("add", numbers),
            ("note", {"text": "a plain\ntext", "tags": ["x", "y z"], "done": True}),
            ("stop", {}),
        ]
        for call in calls:
            try:
                text = written(form, call)
            except Unwritable:
                continue
            assert accepts(required(form, TOOLS), text), (name, text)
        for wrong in wrong_texts(form, written(form, calls[0])):
            assert not accepts(required(form, TOOLS, parallel=False), wrong), (name, wrong)


def wrong_texts(form: CallFormat, right: str) -> list[str]:
    """Generate text that resembles a call of `add` but is not one."""
    calls: list[Call] = [
        ("subtract", {"a": 1, "b": 2}),
        ("add", {"a": 1}),
        ("add", {"b": 2}),
        ("add", {"a": 1, "b": 2, "c": 3}),
        ("add", {"a": 1, "z": 2}),
        ("add", {"a": 1, "b": True}),
        ("add", {"a": 1, "b": "two"}),
        ("add", {"a": 1, "b": 2.5}),
        ("add", {"a": 1, "b": [2]}),
        ("stop", {"a": 1}),
    ]
    wrong = [written(form, call) for call in calls]
    return [*wrong, right[:-1], right[: len(right) // 2], right[:1], "", f"{right}x", f"{right}{right}", f"x{right}"]


@every_class
def test_text_other_than_valid_calls_is_refused(name: str) -> None:
    form = form_of(name)
    right = written(form, ("add", {"a": 1, "b": 2}))
    assert accepts(required(form, TOOLS, parallel=False), right)
    for wrong in wrong_texts(form, right):
        assert not accepts(required(form, TOOLS, parallel=False), wrong), wrong


CLOSING = set(b")]}>\"'\n")


def walk(enforced: Constraint, rng: random.Random, length: int) -> str:
    """Return random text of the grammar: any allowed byte, and after `length` bytes one that closes something."""
    matcher = xgrammar.GrammarMatcher(compiled(enforced))
    mask = xgrammar.allocate_token_bitmask(1, END + 1)
    text = bytearray()
    while True:
        matcher.fill_next_token_bitmask(mask)
        words = [int(word) & 0xFFFFFFFF for word in mask[0]]
        allowed = [byte for byte in range(END + 1) if words[byte // 32] >> byte % 32 & 1]
        assert allowed, f"a dead end after {bytes(text)!r}"
        # Half a character is chosen only if a literal needs it.
        allowed = [byte for byte in allowed if byte == 10 or 32 <= byte < 127 or byte == END] or allowed
        closing = [byte for byte in allowed if byte in CLOSING or byte == END]
        byte = rng.choice(closing if closing and len(text) > length and rng.random() < 0.7 else allowed)
        if END in allowed and len(text) > length:
            byte = END
        assert matcher.accept_token(byte)
        if byte == END:
            return text.decode()
        text.append(byte)
        if len(text) > 4000:  # random text rarely finds the end of a plain string
            return ""


@pytest.mark.sample_cases(3)
@every_class
@settings(max_examples=sweeps.times(60, 15))
@given(seed=st.integers(0, 2**32), length=st.integers(0, 100), index=st.integers(0, len(TOOLS) - 1))
def test_accepted_text_is_read_as_valid_calls(name: str, seed: int, length: int, index: int) -> None:
    form, tool = form_of(name), TOOLS[index]
    text = walk(required(form, [tool]), random.Random(seed), length)
    assume(text)
    reading = CallReader(form).read(text, {tool.name: tool.parameters})
    assert reading.content == ""
    assert reading.calls
    for call in reading.calls:
        assert call.error is None, text
        assert call.name == tool.name
        tool.arguments(call.arguments)


@every_class
def test_turn_without_parallel_calls_has_one_call(name: str) -> None:
    form = form_of(name)
    call = ("add", {"a": 1, "b": 2})
    one = written(form, call)
    barrier = [Tool(add, parallel=False)]
    for enforced in (required(form, ADD, parallel=False), required(form, barrier)):
        assert accepts(enforced, one)
        assert form.between is None or not accepts(enforced, written(form, call, call))
    assert form.between is None or accepts(required(form, ADD), written(form, call, call))


@every_class
def test_named_tool_is_the_only_allowed_one(name: str) -> None:
    form = form_of(name)
    assert accepts(required(form, TOOLS, "stop"), written(form, ("stop", {})))
    assert not accepts(required(form, TOOLS, "stop"), written(form, ("add", {"a": 1, "b": 2})))


# --- free text


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "JSON object without a trigger"])
def test_auto_allows_any_text_and_enforces_schemas_of_calls(name: str) -> None:
    form = form_of(name)
    enforced = required(form, ADD, "auto")
    assert enforced.kind is ConstraintKind.STRUCTURAL_TAG
    one = written(form, ("add", {"a": 1, "b": 2}))
    for text in ("", "just words", f"words {form.trigger[:-1]}", one, f"a {one} b"):
        assert accepts(enforced, text), text
    for text in (
        form.trigger,
        f"words {form.trigger}",
        written(form, ("subtract", {"a": 1, "b": 2})),
        written(form, ("add", {"a": 1})),
    ):
        assert not accepts(enforced, text), text
    assert accepts(enforced, f"{one} and {one}") is (form.between is not None)
    assert not accepts(required(form, ADD, "auto", parallel=False), f"{one} and {one}")


def test_auto_without_a_trigger_enforces_nothing() -> None:
    bare = form_of("JSON object without a trigger")
    assert constraint(bare, TOOLS, "auto") is None
    assert constraint(bare, TOOLS, "required") is not None
    assert constraint(form_of("JSON object"), TOOLS, "none") is None
    assert constraint(form_of("JSON object"), [], "auto") is None


@every_class
def test_required_call_follows_the_end_of_open_reasoning(name: str) -> None:
    form = form_of(name)
    enforced = required(form, ADD, thought=ReasoningFormat("<think>", "\n</think>\n\n", opened_by_prompt=True))
    one = written(form, ("add", {"a": 1, "b": 2}))
    for text in (f"I add <them>.\n</think>\n\n{one}", f"</think>{one}", f"{one}</think>\n{one}"):
        assert accepts(enforced, text), text
    for text in (one, "I think", f"I </think> so {one}", f"a</think>b</think>{one}", f"a</think>{' ' * 20}{one}"):
        assert not accepts(enforced, text), text


@every_class
def test_model_may_reason_before_a_required_call(name: str) -> None:
    form = form_of(name)
    enforced = required(form, ADD, thought=BY_ITSELF)
    one = written(form, ("add", {"a": 1, "b": 2}))
    for text in (one, f"<think>\nI add <them>.\n</think>\n\n{one}", f"<think></think>{one}"):
        assert accepts(enforced, text), text
    for text in (
        "<think>\nI think",
        f"so {one}",
        f"<think>{one}",
        f"</think>{one}",
        f"<think></think><think></think>{one}",
    ):
        assert not accepts(enforced, text), text


@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "one"])
def test_auto_ignores_triggers_in_reasoning_of_the_model(parallel: bool) -> None:
    form = form_of("JSON object")
    enforced = required(form, ADD, "auto", parallel=parallel, thought=BY_ITSELF)
    call = written(form, ("add", {"a": 1, "b": 2}))
    thought = "<think>\nI could say <tool_call> here, or <tool_call>{}.\n</think>\n\n"
    for text in (
        call,
        f"I add.\n{call}",
        f"{thought}{call}",
        f"{thought}I add.\n{call}",
        thought,
        thought[:30],
        "So <b>",
    ):
        assert accepts(enforced, text), text
    assert accepts(enforced, f"{thought}{call}\n{call}") == parallel
    assert accepts(enforced, f"{call}\n{call}") == parallel
    wrong = written(form, ("add", {"a": "1", "b": 2}))
    for text in (wrong, f"{thought}{wrong}", f"{thought}{call}{wrong}", f"{thought}<tool_call>so"):
        assert not accepts(enforced, text), text


def test_auto_ignores_triggers_in_reasoning_of_the_prompt() -> None:
    form = form_of("JSON object")
    enforced = required(form, ADD, "auto", thought=OPENED)
    one = written(form, ("add", {"a": 1, "b": 2}))
    for text in ("still thinking", f"with {form.trigger}?", "so</think>words", f"{form.trigger}</think> {one}"):
        assert accepts(enforced, text), text
    assert not accepts(enforced, f"so</think>{form.trigger}words")


# --- grammars in engines


def test_grammar_of_a_format_and_its_tools_is_built_once() -> None:
    form = form_of("raw strings")
    again = replace(form)
    # the constraint exists
    assert constraint(form, TOOLS, "required").value is constraint(again, TOOLS, "required").value  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # imports of vLLM warn
@every_class
def test_vllm_takes_every_grammar_and_structural_tag(name: str) -> None:
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    from runner.engines.vllm.settings import constraint_arguments

    form = form_of(name)
    for choice, thought in itertools.product(("required", "auto"), (None, OPENED, BY_ITSELF)):
        enforced = constraint(form, TOOLS, choice, thought=thought)
        if enforced is not None:
            parameters = StructuredOutputsParams(**constraint_arguments(enforced))
            validate_xgrammar_grammar(SamplingParams(structured_outputs=parameters))
