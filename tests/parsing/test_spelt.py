"""A name of a control token that a model spelt with letters is no control token, wherever it stands."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runner.parsing.spelt import Spelling
from runner.tokens.byte_tokenizer import ByteTokenizer

NAMES = ("<tool_call>", "<think>", "</think>")
TOKENIZER = ByteTokenizer(list(NAMES))
TOKENS = {name: TOKENIZER.encode(name)[0] for name in NAMES}


def letters(text: str) -> list[int]:
    return list(text.encode())


parts = st.lists(st.tuples(st.sampled_from([*NAMES, "é", "a ", "<", "_call>"]), st.booleans()), max_size=12)


@given(parts)
def test_only_names_that_were_sampled_as_one_id_are_left_whole(said: list[tuple[str, bool]]) -> None:
    ids: list[int] = []
    for text, spelt in said:
        ids += letters(text) if spelt or text not in TOKENS else [TOKENS[text]]
    text = TOKENIZER.decode(ids)
    spelling = Spelling(text, ids, TOKENS, TOKENIZER.decode)
    for name, token_id in TOKENS.items():
        assert spelling.text.count(name) == ids.count(token_id)
    assert spelling.healed(spelling.text) == text
