"""Enforced calls in a vocabulary in which each mark of a format is one id: only these ids are accepted, not letters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pytest
import xgrammar

from runner.options import Constraint, ConstraintKind
from runner.parsing.call_grammar import constraint, harmony_constraint
from runner.parsing.cut_points import CutPoints
from runner.parsing.harmony import CALLS, NEXT_MESSAGE
from runner.parsing.turn_format import CallFormat, ContentFormat, TurnFormat
from tests.parsing.enforced import BY_ITSELF, BYTES, OPENED, TOOLS, Call, every_class, form_of, written
from tests.parsing.learnt_formats import CLASSES

CALLED: list[Call] = [("add", {"a": 1, "b": -20}), ("note", {"text": "it's <b>\n", "tags": ["a", "b"]})]
FIRST = len(BYTES)


def tokens_of(form: CallFormat) -> dict[str, int]:
    """Return every tag of a format, each of which is one id."""
    texts = TurnFormat(form, None, ContentFormat("", "")).texts()
    tags = sorted({mark for text in texts for mark in CutPoints().split(text) if CutPoints().is_tag(mark)})
    return {tag: FIRST + index for index, tag in enumerate(tags)}


class Vocabulary:
    """A vocabulary of all bytes, followed by control tokens."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.tokens = tokens
        self.end = FIRST + len(tokens)
        pieces = [*BYTES, *(name.encode() for name in tokens), b""]
        self._size = len(pieces)
        info = xgrammar.TokenizerInfo(pieces, vocab_size=self._size, stop_token_ids=[self.end])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)

    def ids(self, text: str) -> list[int]:
        names = "|".join(map(re.escape, sorted(self.tokens, key=len, reverse=True)))
        parts = re.split(f"({names})", text) if names else [text]
        return [i for part in parts for i in ([self.tokens[part]] if part in self.tokens else list(part.encode()))]

    def accepts(self, enforced: Constraint, ids: Sequence[int]) -> bool:
        """Return whether the mask before each id, and before the end of the turn, contains it."""
        if enforced.kind is ConstraintKind.STRUCTURAL_TAG:
            compiled = self._compiler.compile_structural_tag(enforced.value)
        else:
            compiled = self._compiler.compile_grammar(enforced.value)
        matcher = xgrammar.GrammarMatcher(compiled)
        mask = xgrammar.allocate_token_bitmask(1, self._size)
        for token_id in [*ids, self.end]:
            matcher.fill_next_token_bitmask(mask)
            allowed = int(mask[0, token_id // 32]) >> (token_id % 32) & 1
            assert bool(allowed) == matcher.accept_token(token_id) or not allowed
            if not allowed:
                return False
        return True


def spellings(ids: Sequence[int], tokens: Mapping[str, int]) -> list[list[int]]:
    """Yield the same ids with one control token at a time in letters."""
    names = {token_id: name for name, token_id in tokens.items()}
    return [[*ids[:at], *names[each].encode(), *ids[at + 1 :]] for at, each in enumerate(ids) if each in names]


@every_class
@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "one"])
def test_required_call_accepts_mark_ids_and_not_their_letters(name: str, parallel: bool) -> None:
    form = form_of(name)
    vocabulary = Vocabulary(tokens_of(form))
    enforced = constraint(form, TOOLS, "required", parallel=parallel, control_tokens=vocabulary.tokens)
    assert enforced is not None
    for call in CALLED:
        ids = vocabulary.ids(written(form, call))
        assert vocabulary.accepts(enforced, ids)
        for spelled in spellings(ids, vocabulary.tokens):
            assert not vocabulary.accepts(enforced, spelled)


@every_class
def test_close_of_open_reasoning_must_be_an_id(name: str) -> None:
    form = form_of(name)
    vocabulary = Vocabulary({**tokens_of(form), "</think>": FIRST + len(tokens_of(form))})
    enforced = constraint(form, TOOLS, "required", thought=OPENED, control_tokens=vocabulary.tokens)
    assert enforced is not None
    ids = vocabulary.ids(f"I add <1>.</think>\n\n{written(form, CALLED[0])}")
    assert vocabulary.accepts(enforced, ids)
    for spelled in spellings(ids, vocabulary.tokens):
        assert not vocabulary.accepts(enforced, spelled)


def test_message_before_a_harmony_call_ends_with_an_id() -> None:
    vocabulary = Vocabulary(
        {name: FIRST + n for n, name in enumerate(["<|start|>", "<|channel|>", "<|message|>", "<|end|>"])}
    )
    enforced = harmony_constraint(CALLS, TOOLS, "required", vocabulary.tokens)
    assert enforced is not None
    ids = vocabulary.ids(f"<|channel|>analysis<|message|>I add.{NEXT_MESSAGE}{written(CALLS, CALLED[0])}")
    assert vocabulary.accepts(enforced, ids)
    for spelled in spellings(ids, vocabulary.tokens)[2:]:  # the marks in the header of the reasoning are plain text
        assert not vocabulary.accepts(enforced, spelled)


STRICT = [name for name in (*CLASSES,) if form_of(name).trigger in tokens_of(form_of(name))]


@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "one"])
@pytest.mark.parametrize("name", STRICT)
def test_trigger_id_inside_reasoning_does_not_begin_a_call(name: str, parallel: bool) -> None:
    form = form_of(name)
    own = tokens_of(form)
    vocabulary = Vocabulary({**own, "<think>": FIRST + len(own), "</think>": FIRST + len(own) + 1})
    tokens = vocabulary.tokens
    enforced = constraint(form, TOOLS, "auto", parallel=parallel, thought=BY_ITSELF, control_tokens=tokens)
    assert enforced is not None
    thought = [tokens["<think>"], *b"So ", tokens[form.trigger], *b" is one."]
    call = vocabulary.ids(written(form, CALLED[0]))
    assert vocabulary.accepts(enforced, thought)
    assert vocabulary.accepts(enforced, [*thought, tokens["</think>"], *b"I add. ", *call])
    assert not vocabulary.accepts(enforced, [*thought, tokens["</think>"], tokens[form.trigger], *b"you see"])
    assert not vocabulary.accepts(enforced, [*b"So ", tokens[form.trigger], *b" is one."])


@pytest.mark.parametrize("thought", [None, "</think>"], ids=["alone", "after reasoning"])
@pytest.mark.parametrize("name", STRICT)
def test_trigger_id_begins_a_strict_call_and_its_letters_do_not(name: str, thought: str | None) -> None:
    form = form_of(name)
    vocabulary = Vocabulary({**tokens_of(form), "</think>": FIRST + len(tokens_of(form))})
    tokens = vocabulary.tokens
    enforced = constraint(form, TOOLS, "auto", thought=OPENED if thought else None, control_tokens=tokens)
    assert enforced is not None
    begin = [] if thought is None else [*b"So.", tokens[thought]]
    call = vocabulary.ids(written(form, CALLED[0]))
    assert vocabulary.accepts(enforced, [*begin, *b"The mark is ", *form.trigger.encode(), *b", you see."])
    assert vocabulary.accepts(enforced, [*begin, *b"I add. ", *call])
    assert not vocabulary.accepts(enforced, [*begin, tokens[form.trigger], *b"you see"])
    assert not vocabulary.accepts(enforced, [*begin, *call[: len(call) // 2], *b"!!"])
    if thought is not None:  # inside reasoning, a mark does not begin a call
        assert vocabulary.accepts(enforced, [*b"So ", tokens[form.trigger], *b" is one."])
