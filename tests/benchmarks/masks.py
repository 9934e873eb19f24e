"""Enforced calls by class of format: cost of an id's token mask, and of compiling the grammar."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import xgrammar

from runner.options import Constraint, ConstraintKind
from runner.parsing.argument_rules import ends_of_strings
from runner.parsing.call_grammar import constraint
from runner.parsing.call_writer import WrittenCall, id_for, write_calls
from runner.parsing.cut_points import CutPoints
from runner.parsing.grammar_compiler import TokenGrammarCompiler
from runner.parsing.turn_format import CallFormat, ContentFormat, ReasoningFormat, TurnFormat
from runner.tools.tool import Tool
from tests.benchmarks.figures import Figure, main, on_one_core
from tests.parsing.learnt_formats import CLASSES, learnt
from tests.parsing.many_tools import MANY_TOOLS, arguments_of
from tests.tokens.vocabularies import vocabulary

ROUND_COUNT = 5
CODE_REPEAT_COUNT = 12
FORMATS: tuple[str, ...] = tuple(CLASSES)
VOCABULARY_SIZE = 151_936
CODE = "def f(x):\n    return x < 3 and '</p>' or \"a\\b\"\n\tif not x: {1: [2, 3]}  # it's é\n"


def write_file(
    path: str, text: str, lines: list[str], count: int = 0, flag: bool = False, more: str | None = None
) -> None:
    """Write a file."""


def run(command: str, seconds: float = 10.0) -> None:
    """Run a command."""


TOOLS = [Tool(write_file), Tool(run)]


OPENED = ReasoningFormat("<think>", "</think>", opened_by_prompt=True)


def measure() -> Iterator[Figure]:
    """Enforced calls by class of format, on a vocabulary of 151,936 logits, by processor time."""
    on_one_core()
    bench = _Bench()
    for name in FORMATS:
        form = learnt(CLASSES[name])
        assert form is not None
        calls = _written(form)
        yield from bench.figures(name, constraint(form, TOOLS, "required"), calls)
        marks = bench.marks_of(form)
        if marks:
            as_ids = _Bench(marks)
            enforced = constraint(form, TOOLS, "required", control_tokens=as_ids.marks)
            yield from as_ids.figures(f"{name}, its marks as ids", enforced, calls)
        many = constraint(form, MANY_TOOLS, "required")
        yield from bench.figures(f"{name}, {len(MANY_TOOLS)} tools", many, _one_of_many(form), under=(100, 2_000))
        if name == "raw strings":
            yield from bench.figures(
                f"{name}, after a thought", _after_thought(form), f"{CODE * CODE_REPEAT_COUNT}</think>\n\n{calls}"
            )
            yield from bench.figures(
                f"{name}, in free text", constraint(form, TOOLS, "auto"), f"{CODE * CODE_REPEAT_COUNT}{calls}"
            )


def _after_thought(form: CallFormat) -> Constraint | None:
    return constraint(form, TOOLS, "required", thought=OPENED)


def _written(form: CallFormat) -> str:
    text = CODE * CODE_REPEAT_COUNT
    for end in ends_of_strings(form):
        text = text.replace(end, "")
    arguments: Mapping[str, Any] = {
        "path": "a.py",
        "text": text,
        "lines": CODE.split("\n") * 3,
        "count": 17,
        "more": "x",
    }
    call = WrittenCall("write_file", arguments, id_for(form, "write_file", 0) or "abcdef123")
    return write_calls(form, [call])


def _one_of_many(form: CallFormat) -> str:
    return write_calls(form, [WrittenCall("act_117", arguments_of(117), id_for(form, "act_117", 0) or "abcdef123")])


class _Bench:
    """The vocabulary in the form in which vLLM passes it to xgrammar."""

    def __init__(self, marks: Sequence[str] = ()) -> None:
        """Load the vocabulary, with `marks` as additional control tokens."""
        self._tokenizer = vocabulary("qwen")
        own = self._tokenizer._tokenizer
        names = [own.id_to_token(token_id) or "" for token_id in range(own.get_vocab_size())]
        self.marks = {mark: len(names) + index for index, mark in enumerate(marks)}
        names += marks
        stop = self._tokenizer.token_id("<|im_end|>")
        self._info = xgrammar.TokenizerInfo(
            names, xgrammar.VocabType.BYTE_LEVEL, vocab_size=VOCABULARY_SIZE, stop_token_ids=[stop]
        )
        self._mask = xgrammar.allocate_token_bitmask(1, VOCABULARY_SIZE)

    def marks_of(self, form: CallFormat) -> list[str]:
        """The tags of a format, which are control tokens in vocabularies made for it."""
        texts = TurnFormat(form, None, ContentFormat("", "")).texts()
        return sorted({mark for text in texts for mark in CutPoints().split(text) if CutPoints().is_tag(mark)})

    def _ids(self, text: str) -> list[int]:
        if not self.marks:
            return self._tokenizer.encode(text)
        parts = re.split(f"({'|'.join(map(re.escape, sorted(self.marks, key=len, reverse=True)))})", text)
        encoded = ([self.marks[part]] if part in self.marks else self._tokenizer.encode(part) for part in parts)
        return [token_id for ids in encoded for token_id in ids]

    def figures(
        self, name: str, enforced: Constraint | None, text: str, under: tuple[float, float] = (50, 600)
    ) -> Iterator[Figure]:
        """Times of a mask in us and of compiling in ms, with their limits."""
        assert enforced is not None
        ids = self._ids(text)
        compiling, filling = [], []
        for _ in range(ROUND_COUNT):
            # A new compiler, since a compiler caches its results.
            compiler = TokenGrammarCompiler(xgrammar.GrammarCompiler(self._info, max_threads=8))
            began = time.process_time()
            compiled = _compiled(compiler, enforced)
            compiling.append((time.process_time() - began) * 1e3)
            filling.append(self._microseconds(compiled, ids))
        yield Figure(f"a mask and its id: {name}", "us", tuple(filling), under=under[0])
        yield Figure("  its grammar compiled", "ms", tuple(compiling), under=under[1])

    def _microseconds(self, compiled: Any, ids: list[int]) -> float:
        matcher = xgrammar.GrammarMatcher(compiled)
        began = time.thread_time()
        for token_id in ids:
            matcher.fill_next_token_bitmask(self._mask)
            assert matcher.accept_token(token_id)
        return (time.thread_time() - began) / len(ids) * 1e6


def _compiled(compiler: Any, enforced: Constraint) -> Any:
    if enforced.kind is ConstraintKind.STRUCTURAL_TAG:
        return compiler.compile_structural_tag(enforced.value)
    return compiler.compile_grammar(enforced.value)


if __name__ == "__main__":
    main(measure)
