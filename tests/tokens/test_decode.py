"""Incremental decoding: the pieces joined are the text of all ids, and none holds half a character."""

import json

from hypothesis import given
from hypothesis import strategies as st

from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.decode import IncrementalDecoder
from runner.tokens.tokenizer import Tokenizer, VocabularyTokenizer

# The demo vocabulary has no ids for the other bytes; what it does then is a test of its own.
TEXT = st.text(st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d"))


def pieces(tokenizer: Tokenizer, deltas: list[list[int]]) -> list[str]:
    decoder = IncrementalDecoder(tokenizer)
    return [*(decoder.feed(delta) for delta in deltas), decoder.finish()]


@given(data=st.data())
def test_pieces_joined_are_the_text_of_all_ids_whatever_was_sampled(tokenizer: Tokenizer, data: st.DataObject) -> None:
    token = st.one_of(st.integers(0, tokenizer.size + 3), st.sampled_from(tokenizer.encode("é你🙂 a")))
    deltas = data.draw(st.lists(st.lists(token, max_size=4), max_size=12))
    assert "".join(pieces(tokenizer, deltas)) == tokenizer.decode([i for delta in deltas for i in delta])


@given(text=TEXT)
def test_no_piece_of_a_valid_text_holds_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    said = text.replace("\ufffd", "")
    shown = pieces(tokenizer, [[token_id] for token_id in tokenizer.encode(said)])
    assert "".join(shown) == said
    assert shown[-1] == ""
    assert "\ufffd" not in "".join(shown)


def test_a_character_comes_with_its_last_byte() -> None:
    decoder = IncrementalDecoder(ByteTokenizer())
    first, second, third = "你".encode()
    assert [decoder.feed([first]), decoder.feed([second]), decoder.feed([third])] == ["", "", "你"]


def test_control_tokens_are_shown_as_they_stream(vocabulary: VocabularyTokenizer) -> None:
    decoder = IncrementalDecoder(vocabulary)
    assert decoder.feed(vocabulary.encode("a<|im_end|>")) == "a<|im_end|>"


def test_finish_shows_what_was_open_and_begins_anew() -> None:
    decoder = IncrementalDecoder(ByteTokenizer())
    assert decoder.feed("é".encode()[:1]) == ""
    assert decoder.finish() == "\ufffd"
    assert decoder.feed(b"a") == "a"
    assert decoder.finish() == ""


def sentencepiece() -> VocabularyTokenizer:
    """A vocabulary whose first word loses its space when decoded, with bytes for what it does not know."""
    names = [*(f"<0x{value:02X}>" for value in range(256)), "\u2581", "a", "b", "\u2581a", "\u2581b", "ab"]
    decoder = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    model = {"type": "BPE", "vocab": {name: i for i, name in enumerate(names)}, "merges": [], "byte_fallback": True}
    return VocabularyTokenizer(json.dumps({"version": "1.0", "added_tokens": [], "decoder": decoder, "model": model}))


SENTENCEPIECE = sentencepiece()


@given(
    words=st.lists(
        st.one_of(st.integers(256, 261).map(lambda i: [i]), st.text("é你🙂", max_size=3).map(str.encode).map(list))
    )
)
def test_pieces_joined_are_the_text_of_a_vocabulary_that_is_not_byte_level(words: list[list[int]]) -> None:
    assert SENTENCEPIECE.pieces is None
    ids = [token_id for word in words for token_id in word]
    assert "".join(pieces(SENTENCEPIECE, [[token_id] for token_id in ids])) == SENTENCEPIECE.decode(ids)


def test_endless_broken_bytes_are_shown_and_do_not_pile_up() -> None:
    decoder = IncrementalDecoder(SENTENCEPIECE)
    shown = "".join(decoder.feed([0xFF]) for _ in range(500)) + decoder.finish()
    assert shown == "\ufffd" * 500
