"""Every grammar of every template can reach its end with the stop ids of an engine, and its mask is never empty."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import pytest
import xgrammar

from runner.errors import BadOption
from runner.options import Constraint, ConstraintKind
from runner.parsing.call_grammar import constraint, harmony_constraint
from runner.parsing.call_writer import Unwritable
from runner.parsing.cut_points import CutPoints
from runner.parsing.harmony import CALLS
from runner.parsing.learning.calls import _ends_of_turn
from runner.parsing.learning.probe_renders import FormatProber
from runner.parsing.schema_grammar import answer_constraint
from runner.parsing.turn_format import CallFormat, ContentFormat, LiteralText, TurnFormat
from runner.tools.tool import Tool
from tests import sweeps
from tests.conformance.corpus import corpus, every_control_token, is_special
from tests.parsing.enforced import BY_ITSELF, BYTES, OPENED, TOOLS, Call, add, form_of, stop, written
from tests.parsing.families import TEMPLATES
from tests.parsing.learnt_formats import learnt

BEGINS_WITH_A_STOP: Final = "GigaChat3-10B-A1.8B"
"""The only template that also writes the end of a turn before calls. No engine can support both uses."""

R7B = "CohereForAI-c4ai-command-r7b-12-2024-tool_use"


def ends_of(name: str, form: CallFormat) -> set[str]:
    """Return the control tokens that end a turn of this template, as a model's generation_config lists them."""
    entry = next(entry for entry in corpus() if entry.name == name)
    special = frozenset(token for token in every_control_token() if is_special(token))
    marks = CutPoints(frozenset(every_control_token()))
    found = {
        mark for mark in marks.split(_ends_of_turn(FormatProber(entry.renderer(), marks, special))) if mark in special
    }
    return {*found, *filter(None, [form.stop]), "</s>"}


class Walker:
    """Samples from a grammar, in a vocabulary of bytes and control tokens."""

    def __init__(self, tokens: Mapping[str, int], stops: Set[str]) -> None:
        pieces = [*BYTES, *(name.encode() for name in tokens)]
        self._size, self._tokens = len(pieces), tokens
        self._control = re.compile(f"({'|'.join(map(re.escape, sorted(tokens, key=len, reverse=True)))})")
        self._compiled: dict[Constraint, xgrammar.CompiledGrammar] = {}
        self._stops = sorted(tokens[name] for name in stops)
        info = xgrammar.TokenizerInfo(pieces, vocab_size=self._size, stop_token_ids=self._stops)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)

    def ends(self, enforced: Constraint, rng: random.Random, most: int = 3000) -> bool:
        """Return whether a walk reaches a stop id. An empty mask fails the test."""
        matcher = self._matcher(enforced)
        said: list[int] = []
        for _ in range(most):
            allowed = self._allowed(matcher)
            assert allowed, f"nothing is left after {bytes(b for b in said if b < 256)!r}"
            if set(allowed) & set(self._stops):
                return True
            # Control tokens and closing characters are preferred, since random letters rarely end a text.
            closing = [each for each in allowed if each >= len(BYTES) or each in b")]}>\"'\n0|<"]
            each = rng.choice(closing if closing and rng.random() < 0.8 else allowed)
            assert matcher.accept_token(each)
            said.append(each)
        return False

    def ends_after(self, enforced: Constraint, text: str) -> bool:
        """Return whether the grammar allows this text and then a stop id. Control tokens are single ids."""
        matcher = self._matcher(enforced)
        ids = [
            each
            for piece in self._control.split(text)
            for each in ([self._tokens[piece]] if piece in self._tokens else piece.encode())
        ]
        return all(map(matcher.accept_token, ids)) and bool(set(self._allowed(matcher)) & set(self._stops))

    def _matcher(self, enforced: Constraint) -> xgrammar.GrammarMatcher:
        if enforced not in self._compiled:
            is_tag = enforced.kind is ConstraintKind.STRUCTURAL_TAG
            compile = self._compiler.compile_structural_tag if is_tag else self._compiler.compile_grammar
            self._compiled[enforced] = compile(enforced.value)
        return xgrammar.GrammarMatcher(self._compiled[enforced], override_stop_tokens=self._stops)

    def _allowed(self, matcher: xgrammar.GrammarMatcher) -> list[int]:
        mask = xgrammar.allocate_token_bitmask(1, self._size)
        if not matcher.fill_next_token_bitmask(mask):
            mask.fill_(-1)
        words = [int(word) & 0xFFFFFFFF for word in mask[0]]
        return [each for each in range(self._size) if words[each // 32] >> each % 32 & 1]


def assert_every_grammar_ends(name: str, form: CallFormat, rng: random.Random) -> int:
    """Walk through all grammars of a format, and return their number."""
    stops = ends_of(name, form)
    tokens = tokens_of(form, stops)
    walker, walked = Walker(tokens, stops), 0
    tools = [Tool(add), Tool(stop)]
    for choice in ("auto", "required", "add"):
        for thought in (None, OPENED, BY_ITSELF):
            for known in ({}, tokens):
                try:
                    enforced = constraint(form, tools, choice, thought=thought, control_tokens=known, stops=stops)
                except BadOption:
                    if name != BEGINS_WITH_A_STOP:
                        raise
                    continue
                if enforced is None:
                    continue
                assert any(walker.ends(enforced, rng) for _ in range(6)), (name, choice, thought)
                walked += 1
    return walked


def tokens_of(form: CallFormat, stops: Set[str]) -> dict[str, int]:
    """Return an id for each control token of a format, and for each stop."""
    texts = TurnFormat(form, None, ContentFormat("", "")).texts()
    tags = sorted({mark for text in texts for mark in CutPoints(frozenset(every_control_token())).split(text)})
    names = [mark for mark in dict.fromkeys([*tags, "<think>", "</think>", *sorted(stops)]) if len(mark) > 1]
    known = (mark for mark in names if mark in stops or CutPoints().is_tag(mark) or mark in every_control_token())
    return {mark: len(BYTES) + index for index, mark in enumerate(known)}


SWEEP = sweeps.part([entry.name for entry in corpus()], 24)


def test_every_grammar_of_every_template_ends() -> None:
    rng, walked = sweeps.random_of("ends"), 0
    for name in SWEEP:
        form = learnt(name)
        if form is not None:
            walked += assert_every_grammar_ends(name, form, rng)
    assert walked > len(SWEEP)


STOPS: Final[Mapping[str, Set[str]]] = {
    # As in `generation_config.json`. The token that a template reads as `eos_token` is "</s>" in the corpus.
    "Llama 3.1": {"<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"},
    "Mistral 7B": {"</s>"},
    "Mistral Small 3.2": {"</s>"},
    "Ministral 3": {"</s>"},
    "DeepSeek V3.2": {"<\uff5cend\u2581of\u2581sentence\uff5c>"},
    "GLM 4.6": {"<|endoftext|>", "<|user|>", "<|observation|>"},
    "GLM 5": {"<|endoftext|>", "<|user|>", "<|observation|>"},
    "Kimi K2": {"<|im_end|>"},
    "Gemma 4": {"<eos>", "<turn|>", "<|tool_response>"},
    "FunctionGemma": {"<eos>", "<end_of_turn>", "<start_function_response>"},
    "Nemotron 3": {"</s>", "<|im_end|>"},
    "Nemotron Nano 2": {"</s>", "<SPECIAL_11>", "<SPECIAL_12>"},
    "MiniMax M2": {"[e~["},
    "Qwen3": {"<|im_end|>", "<|endoftext|>"},
    "Qwen3-Coder": {"<|im_end|>", "<|endoftext|>"},
    "Qwen3.5": {"<|im_end|>", "<|endoftext|>"},
    "Granite 4": {"<|end_of_text|>"},
    "Olmo 3": {"</s>", "<|im_end|>", "<|endoftext|>"},
    "LFM 2.5": {"<|im_end|>"},
    "Seed-OSS": {"</s>", "<seed:eos>"},
    "Apertus": {"<|assistant_end|>", "<|tools_suffix|>"},
    "EXAONE 4": {"[|endofturn|]"},
    "Command A": {"<|END_OF_TURN_TOKEN|>"},
}

CALLS_OF_TOOLS: Final[list[Call]] = [
    ("add", {"a": 1, "b": -2}),
    ("note", {"text": 'it\'s "so" <b>, [x] {y}'}),
    ("note", {"tags": ["a", "b]"], "scores": {"k": 1}, "anything": {"l": [None]}}),
    ("paint", {"colour": "red", "mode": None}),
    ("paint", {"colour": "it's", "mode": 2, "at": {"x": 0.5}}),
    ("plant", {"tree": {"label": "l", "children": [{"label": ""}]}, "times": 2}),
]


@pytest.mark.sample_cases(4)
@pytest.mark.parametrize("family", STOPS)
def test_calls_of_a_family_end_with_its_stop_ids(family: str) -> None:
    form = learnt(TEMPLATES[family])
    assert form is not None
    stops = STOPS[family]
    # In Command A, this token closes the text of an answer, before the turn ends.
    assert ends_of(TEMPLATES[family], form) - {"</s>", "<|END_TEXT|>"} <= stops
    tokens, allowed = tokens_of(form, stops), 0
    walker = Walker(tokens, stops)
    for choice in ("required", "auto"):
        enforced = constraint(form, TOOLS, choice, control_tokens=tokens, stops=stops)
        if enforced is None:
            continue
        for call in CALLS_OF_TOOLS:
            with suppress(Unwritable):
                text = written(form, call)
                before_stop = min((text.find(stop) for stop in stops if stop in text), default=len(text))
                assert walker.ends_after(enforced, text[:before_stop]), (choice, text)
                allowed += 1
    assert allowed >= 4


ANSWERS: Final[list[Any]] = [
    {"type": "string"},
    {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
    {"type": "object", "properties": {"a": {"type": ["string", "integer"]}}, "required": ["a"]},
]


@pytest.mark.parametrize("schema", ANSWERS, ids=str)
def test_grammar_of_an_answer_ends(schema: Any) -> None:
    walker = Walker({"<|im_end|>": len(BYTES)}, {"<|im_end|>"})
    assert any(walker.ends(answer_constraint(schema), random.Random(seed)) for seed in range(6))


def test_learnt_close_ends_before_a_stop_token() -> None:
    form = learnt(R7B)
    assert form is not None
    assert form.close == "\n]<|END_ACTION|>"
    assert_every_grammar_ends(R7B, form, random.Random(1))


def test_close_with_a_stop_token_is_cut_where_it_stands() -> None:
    form = form_of("JSON object")
    longer = replace(form, close=f"{form.close}<|im_end|>\n<|im_start|>", between=None)
    enforced = constraint(longer, [Tool(add)], "required", stops=("<|im_end|>",))
    assert enforced == constraint(replace(form, between=None), [Tool(add)], "required")


def test_separator_with_a_stop_token_leaves_one_call() -> None:
    form = form_of("JSON object")
    parted = replace(form, between="<|im_end|>")
    enforced = constraint(parted, [Tool(add)], "required", stops=("<|im_end|>",))
    assert enforced == constraint(form, [Tool(add)], "required", parallel=False)


def test_call_with_a_stop_token_inside_is_refused() -> None:
    form = form_of("JSON object")
    broken = replace(form, call=(LiteralText("<|im_end|>"), *form.call))
    with pytest.raises(BadOption, match="writes a stop token inside of a call"):
        constraint(broken, [Tool(add)], "required", stops=("<|im_end|>",))


def test_grammar_of_harmony_ends() -> None:
    names = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>"]
    tokens = {name: len(BYTES) + index for index, name in enumerate(names)}
    walker = Walker(tokens, {"<|call|>", "<|return|>"})
    for choice in ("auto", "required", "add"):
        enforced = harmony_constraint(CALLS, [Tool(add)], choice, tokens)
        assert enforced is not None
        assert any(walker.ends(enforced, random.Random(seed)) for seed in range(6)), choice
