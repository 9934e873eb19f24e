"""A name of a control token that a model spelt with letters is no control token, wherever it stands."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from runner.parsing.spelt import Spelling, StreamedSpelling
from runner.tokens.byte_tokenizer import ByteTokenizer

NAMES = ("<tool_call>", "<think>", "</think>")
TOKENIZER = ByteTokenizer(list(NAMES))
TOKENS = {name: TOKENIZER.encode(name)[0] for name in NAMES}


def letters(text: str) -> list[int]:
    return list(text.encode())


SIGNS = ("\ufdd0", "\ufdd1\ufdd1", "".join(map(chr, range(0xFDD0, 0xFDF0))))

parts = st.lists(st.tuples(st.sampled_from([*NAMES, "é", "a ", "<", "_call>", *SIGNS]), st.booleans()), max_size=12)


@given(parts)
def test_only_names_that_were_sampled_as_one_id_are_left_whole(said: list[tuple[str, bool]]) -> None:
    ids: list[int] = []
    for text, spelt in said:
        ids += letters(text) if spelt or text not in TOKENS else [TOKENS[text]]
    text = TOKENIZER.decode(ids)
    spelling = Spelling(text, ids, TOKENS, TOKENIZER)
    for name, token_id in TOKENS.items():
        assert spelling.text.count(name) == ids.count(token_id)
    assert spelling.healed(spelling.text) == text


def test_a_streamed_text_is_broken_and_healed_alike() -> None:
    text = "a\ufdd0 <tool_call>b\ufdd0\ufdd0"
    spelling = StreamedSpelling(TOKENS)
    broken = "".join(spelling.feed(piece, -1) for piece in text)
    assert "<tool_call>" not in broken
    assert spelling.healed(broken) == text
    assert spelling.healed({"a": [broken, 1]}) == {"a": [text, 1]}


def test_what_was_escaped_is_no_sign_of_ours() -> None:
    text = 'The <tool_call> is {"a": "x\\ufdd0y"}'
    spelling = Spelling(text, letters(text), TOKENS, TOKENIZER)
    assert spelling.healed("x\ufdd0y") == "x\ufdd0y"


def test_a_turn_of_many_marks_and_a_spelt_one_is_decoded_once() -> None:
    class Counting(ByteTokenizer):
        decoded = 0

        def decode(self, ids: Sequence[int]) -> str:
            self.decoded += len(ids)
            return super().decode(ids)

    tokenizer = Counting(list(NAMES))
    ids = [*letters("<tool_call> "), *[TOKENS["<tool_call>"]] * 5000]
    spelling = Spelling(TOKENIZER.decode(ids), ids, TOKENS, tokenizer)
    assert spelling.text.count("<tool_call>") == 5000
    assert tokenizer.decoded <= len(ids)
