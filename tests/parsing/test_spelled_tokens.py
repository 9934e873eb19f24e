"""The name of a control token that a model spelled in letters is plain text everywhere."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from runner.parsing.parser import TurnParser
from runner.parsing.spelled_tokens import SpelledTokens, SpelledTokenStream
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tools.tool import Tool
from tests.parsing.written_turns import format_of

NAMES = ("<tool_call>", "<think>", "</think>")
TOKENIZER = ByteTokenizer(list(NAMES))
TOKENS = {name: TOKENIZER.encode(name)[0] for name in NAMES}


def letters(text: str) -> list[int]:
    return list(text.encode())


SIGNS = ("\ufdd0", "\ufdd1\ufdd1", "".join(map(chr, range(0xFDD0, 0xFDF0))))

parts = st.lists(st.tuples(st.sampled_from([*NAMES, "é", "a ", "<", "_call>", *SIGNS]), st.booleans()), max_size=12)


@given(parts)
def test_only_names_sampled_as_one_id_stay_whole(said: list[tuple[str, bool]]) -> None:
    ids: list[int] = []
    for text, spelled in said:
        ids += letters(text) if spelled or text not in TOKENS else [TOKENS[text]]
    text = TOKENIZER.decode(ids)
    spelling = SpelledTokens(text, ids, TOKENS, TOKENIZER)
    for name, token_id in TOKENS.items():
        assert spelling.text.count(name) == ids.count(token_id)
    assert spelling.restored(spelling.text) == text


def test_streamed_text_is_broken_up_and_restored_exactly() -> None:
    text = "a\ufdd0 <tool_call>b\ufdd0\ufdd0"
    spelling = SpelledTokenStream(TOKENS)
    broken = "".join(spelling.feed(piece, -1) for piece in text)
    assert "<tool_call>" not in broken
    assert spelling.restored(broken) == text
    assert spelling.restored({"a": [broken, 1]}) == {"a": [text, 1]}


def test_escaped_noncharacter_is_not_our_sign() -> None:
    text = 'The <tool_call> is {"a": "x\\ufdd0y"}'
    spelling = SpelledTokens(text, letters(text), TOKENS, TOKENIZER)
    assert spelling.restored("x\ufdd0y") == "x\ufdd0y"


def test_turn_with_many_marks_is_decoded_once() -> None:
    class Counting(ByteTokenizer):
        decoded = 0

        def decode(self, ids: Sequence[int]) -> str:
            self.decoded += len(ids)
            return super().decode(ids)

    tokenizer = Counting(list(NAMES))
    ids = [*letters("<tool_call> "), *[TOKENS["<tool_call>"]] * 5000]
    spelling = SpelledTokens(TOKENIZER.decode(ids), ids, TOKENS, tokenizer)
    assert spelling.text.count("<tool_call>") == 5000
    assert tokenizer.decoded <= len(ids)


def echo(text: str) -> str:
    """Say it again."""
    return text


ECHO = Tool(echo)
MARKS = ("<tool_call>", "</tool_call>")
VOCABULARY = ByteTokenizer(list(MARKS))
OPEN, CLOSE = (VOCABULARY.encode(mark)[0] for mark in MARKS)


def read(template: str, ids: list[int]) -> list[tuple[str, object, str | None]]:
    """Return the calls of a turn, read as in an episode."""
    parser = TurnParser(format_of(template), dict(zip(MARKS, (OPEN, CLOSE), strict=True)))
    text = VOCABULARY.decode(ids)
    spelling = SpelledTokens(text, ids, parser.marker_tokens, VOCABULARY)
    parsed = parser.parse(spelling.text, [ECHO])
    return [(call.name, spelling.restored(call.arguments), call.error) for call in parsed.calls]


def test_spelled_close_inside_a_call_ends_it() -> None:
    call = '{"name": "echo", "arguments": {"text": "a </tool_call> b"}}'
    for close in ([CLOSE], letters("</tool_call>")):
        ids = [OPEN, *letters(f"\n{call}\n"), *close, *letters(" so")]
        assert read("Qwen-Qwen3-0.6B", ids) == [("echo", {"text": "a </tool_call> b"}, None)]
    assert read("Qwen-Qwen3-0.6B", letters(f"<tool_call>\n{call}\n</tool_call>")) == []


def test_unquoted_string_ends_at_a_spelled_end_of_the_call() -> None:
    ends = "\n</parameter>\n</function>\n</tool_call>"
    ids = [OPEN, *letters(f"\n<function=echo>\n<parameter=text>\na{ends} b\n</parameter>\n</function>\n"), CLOSE]
    assert read("Qwen-Qwen3-Coder-30B-A3B-Instruct", ids) == [("echo", {"text": "a"}, None)]
    ids = [OPEN, *letters("\n<function=echo>\n<parameter=text>\na </tool_call> b\n</parameter>\n</function>\n"), CLOSE]
    assert read("Qwen-Qwen3-Coder-30B-A3B-Instruct", ids) == [("echo", {"text": "a </tool_call> b"}, None)]
