"""Every grammar of every template can reach its end with the stop ids of an engine, and its mask is never empty."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
import xgrammar

from runner.errors import BadOption
from runner.options import Constraint, ConstraintKind
from runner.parsing.call_grammar import constraint, harmony_constraint
from runner.parsing.cut_points import CutPoints
from runner.parsing.harmony import CALLS
from runner.parsing.learning.calls import _ends_of_turn
from runner.parsing.learning.probe_renders import FormatProber
from runner.parsing.turn_format import CallFormat, ContentFormat, LiteralText, TurnFormat
from runner.tools.tool import Tool
from tests import sweeps
from tests.conformance.corpus import corpus, every_control_token, is_special
from tests.parsing.enforced import BY_ITSELF, BYTES, OPENED, add, form_of, stop

R7B = "CohereForAI-c4ai-command-r7b-12-2024-tool_use"


def ends_of(name: str, form: CallFormat) -> set[str]:
    """Return the control tokens that end a turn of this template, as in a model's generation_config."""
    entry = next(entry for entry in corpus() if entry.name == name)
    special = frozenset(token for token in every_control_token() if is_special(token))
    marks = CutPoints(frozenset(every_control_token()))
    found = {
        mark for mark in marks.split(_ends_of_turn(FormatProber(entry.renderer(), marks, special))) if mark in special
    }
    return {*found, *filter(None, [form.stop]), "</s>"}


class Walker:
    """Samples from a grammar in a vocabulary of bytes and control tokens."""

    def __init__(self, tokens: Mapping[str, int], stops: set[str]) -> None:
        pieces = [*BYTES, *(name.encode() for name in tokens)]
        self._size = len(pieces)
        self._stops = sorted(tokens[name] for name in stops)
        info = xgrammar.TokenizerInfo(pieces, vocab_size=self._size, stop_token_ids=self._stops)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)

    def ends(self, enforced: Constraint, rng: random.Random, most: int = 3000) -> bool:
        """Return whether a walk reaches a stop id; an empty mask fails the test."""
        if enforced.kind is ConstraintKind.STRUCTURAL_TAG:
            compiled = self._compiler.compile_structural_tag(enforced.value)
        else:
            compiled = self._compiler.compile_grammar(enforced.value)
        matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=self._stops)
        mask = xgrammar.allocate_token_bitmask(1, self._size)
        said: list[int] = []
        for _ in range(most):
            if not matcher.fill_next_token_bitmask(mask):
                mask.fill_(-1)
            words = [int(word) & 0xFFFFFFFF for word in mask[0]]
            allowed = [each for each in range(self._size) if words[each // 32] >> each % 32 & 1]
            assert allowed, f"nothing is left after {bytes(b for b in said if b < 256)!r}"
            if set(allowed) & set(self._stops):
                return True
            # Control tokens and closing characters come first, since random letters rarely end a text.
            closing = [each for each in allowed if each >= len(BYTES) or each in b")]}>\"'\n0|<"]
            each = rng.choice(closing if closing and rng.random() < 0.8 else allowed)
            assert matcher.accept_token(each)
            said.append(each)
        return False


def assert_every_grammar_ends(name: str, form: CallFormat, rng: random.Random) -> int:
    """Walk through all grammars of a format; return their number."""
    stops = ends_of(name, form)
    texts = TurnFormat(form, None, ContentFormat("", "")).texts()
    tags = sorted({mark for text in texts for mark in CutPoints(frozenset(every_control_token())).split(text)})
    names = [mark for mark in dict.fromkeys([*tags, "<think>", "</think>", *sorted(stops)]) if len(mark) > 1]
    names = [mark for mark in names if CutPoints().is_tag(mark) or mark in every_control_token()]
    tokens = {mark: len(BYTES) + index for index, mark in enumerate(names)}
    walker, walked = Walker(tokens, stops), 0
    tools = [Tool(add), Tool(stop)]
    for choice in ("auto", "required", "add"):
        for thought in (None, OPENED, BY_ITSELF):
            for known in ({}, tokens):
                try:
                    enforced = constraint(form, tools, choice, thought=thought, control_tokens=known, stops=stops)
                except BadOption as refused:
                    if "takes no arguments" not in str(refused) and not begins_with_a_stop(form, stops):
                        raise
                    continue
                if enforced is None:
                    continue
                assert any(walker.ends(enforced, rng) for _ in range(6)), (name, choice, thought)
                walked += 1
    return walked


def begins_with_a_stop(form: CallFormat, stops: set[str]) -> bool:
    """Return whether the end of turns also precedes calls, as in GigaChat 3: no engine can support both."""
    return any(mark in form.begin for mark in stops)


SWEEP = sweeps.part([entry.name for entry in corpus()], 24)


def test_every_grammar_of_every_template_ends() -> None:
    from tests.parsing.learnt_formats import learnt

    rng, walked = sweeps.random_of("ends"), 0
    for name in SWEEP:
        form = learnt(name)
        if form is not None:
            walked += assert_every_grammar_ends(name, form, rng)
    assert walked > len(SWEEP)


def test_learnt_close_ends_before_a_stop_token() -> None:
    from tests.parsing.learnt_formats import learnt

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
