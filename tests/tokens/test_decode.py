"""Incremental decoding: the joined pieces are the text of all ids, and no piece contains half a character."""

import functools
import json
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.decode import IncrementalDecoder
from runner.tokens.tokenizer import Tokenizer, VocabularyTokenizer
from tests.tokens.vocabularies import NAMES
from tests.tokens.vocabularies import vocabulary as real_vocabulary

pytestmark = [pytest.mark.sample_cases(5), pytest.mark.slow]

# The demo vocabulary has no ids for the other bytes. Another test covers them.
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


def test_finish_returns_the_open_bytes_and_resets_the_decoder() -> None:
    decoder = IncrementalDecoder(ByteTokenizer())
    assert decoder.feed("é".encode()[:1]) == ""
    assert decoder.finish() == "\ufffd"
    assert decoder.feed(b"a") == "a"
    assert decoder.finish() == ""


REPLACE = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
FALLBACK = [REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}]


def words(decoder: dict[str, object] | None) -> VocabularyTokenizer:
    """Return a vocabulary of all bytes, a few words, and a gap among its ids."""
    names = [*(f"<0x{value:02X}>" for value in range(256)), "\u2581", "a", "b", "\u2581a", "\u2581b", "ab"]
    vocab = {name: i for i, name in enumerate(names)} | {"\u2581\u2581": len(names) + 2, "\ufffd": len(names) + 3}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": True}
    return VocabularyTokenizer(json.dumps({"version": "1.0", "added_tokens": [], "decoder": decoder, "model": model}))


SENTENCEPIECE = words({"type": "Sequence", "decoders": [*FALLBACK, STRIP]})


@given(
    words=st.lists(
        st.one_of(st.integers(256, 261).map(lambda i: [i]), st.text("é你🙂", max_size=3).map(str.encode).map(list))
    )
)
def test_joined_pieces_are_the_text_without_byte_level_vocabulary(words: list[list[int]]) -> None:
    assert SENTENCEPIECE.pieces is None
    assert SENTENCEPIECE.words is not None
    ids = [token_id for word in words for token_id in word]
    assert "".join(pieces(SENTENCEPIECE, [[token_id] for token_id in ids])) == SENTENCEPIECE.decode(ids)


def test_endless_broken_bytes_are_shown_and_do_not_pile_up() -> None:
    decoder = IncrementalDecoder(SENTENCEPIECE)
    shown = "".join(decoder.feed([0xFF]) for _ in range(500)) + decoder.finish()
    assert shown == "\ufffd" * 500


def together(tokenizer: Tokenizer, deltas: Sequence[Sequence[int]]) -> str:
    decoder = IncrementalDecoder(tokenizer)
    return "".join([*(decoder.feed(delta) for delta in deltas), decoder.finish()])


def cut(ids: Sequence[int], borders: int) -> list[Sequence[int]]:
    """Return `ids` cut after each place whose bit is set in `borders`."""
    ends = [at + 1 for at in range(len(ids) - 1) if borders >> at & 1]
    return [ids[start:end] for start, end in zip([0, *ends], [*ends, len(ids)], strict=True)]


def splits(ids: Sequence[int], rng: random.Random) -> Iterator[list[Sequence[int]]]:
    """Return every way to cut up to ten ids, and 500 ways to cut more."""
    if len(ids) <= 10:
        return (cut(ids, borders) for borders in range(2 ** max(0, len(ids) - 1)))
    return (cut(ids, rng.getrandbits(len(ids) - 1)) for _ in range(500))


DECODERS = {
    "nothing dropped": {"type": "Sequence", "decoders": FALLBACK},
    "a space dropped": {"type": "Sequence", "decoders": [*FALLBACK, STRIP]},
    "two spaces dropped": {"type": "Sequence", "decoders": [*FALLBACK, {**STRIP, "start": 2}]},
    "no bytes": {"type": "Sequence", "decoders": [REPLACE, {"type": "Fuse"}, STRIP]},
    "replaced alone": REPLACE,
    "metaspace": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
    "word pieces": {"type": "WordPiece", "prefix": "a", "cleanup": True},
    "stripped each": {"type": "Sequence", "decoders": [REPLACE, STRIP]},
    "none": None,
}


@functools.cache
def named(name: str) -> Tokenizer:
    if name == "bytes":
        return ByteTokenizer()
    return real_vocabulary(name) if name in NAMES else words(DECODERS[name])  # type: ignore[arg-type]  # every decoder is named


@functools.cache
def telling(name: str) -> tuple[int, ...]:
    """Return ids on which decoders differ: parts of characters, bytes, spaces, control tokens, unused ids."""
    tokenizer = named(name)
    texts = ("é你🙂 a", " ", "  x", "\u2581", "\ufffd", "\n", "नमस्ते", "👩‍👩‍👧", "<0xE2>", "e\u0301")
    ids = {token_id for text in texts for token_id in tokenizer.encode(text)}
    ids |= {token_id for value in (0x20, 0x41, 0x80, 0xC3, 0xE2, 0xF0, 0xFF) if (token_id := byte_id(tokenizer, value))}
    return (*sorted(ids), *sorted(tokenizer.control_ids)[:3], tokenizer.size, tokenizer.size + 5)


def byte_id(tokenizer: Tokenizer, value: int) -> int | None:
    """Return the id of one byte, or None if there is none."""
    if tokenizer.pieces is not None:
        return next((i for i, piece in enumerate(tokenizer.pieces) if piece == bytes([value])), None)
    return tokenizer.token_id(f"<0x{value:02X}>")


def sampled(name: str, rng: random.Random, length: int) -> list[int]:
    """Return ids as a model may sample them: any of the vocabulary, and often ids on which decoders differ."""
    size = named(name).size
    return [rng.choice(telling(name)) if rng.random() < 0.7 else rng.randrange(size + 2) for _ in range(length)]


EVERY = ("bytes", *NAMES, *DECODERS)


@pytest.mark.parametrize("name", EVERY)
def test_every_split_of_ten_ids_decodes_to_the_same_text(name: str) -> None:
    tokenizer, rng = named(name), random.Random(name)
    for length in (0, 1, 2, 3, 5, 8, 10, 10, 10, 10):
        ids = sampled(name, rng, length)
        whole = tokenizer.decode(ids)
        for deltas in splits(ids, rng):
            assert together(tokenizer, deltas) == whole, deltas


@pytest.mark.parametrize("name", EVERY)
def test_many_ways_to_cut_many_ids_give_the_text_of_all(name: str) -> None:
    tokenizer, rng = named(name), random.Random(name)
    for ids in (sampled(name, rng, 40), tokenizer.encode("Ça va: 你好 🙂\n  x = 'नमस्ते' 👩‍👩‍👧 " * 2)):
        whole = tokenizer.decode(ids)
        for deltas in splits(ids, rng):
            assert together(tokenizer, deltas) == whole, deltas


@pytest.mark.parametrize("name", EVERY)
@given(data=st.data())
def test_any_ids_in_any_deltas_give_the_text_of_all(name: str, data: st.DataObject) -> None:
    tokenizer = named(name)
    token = st.one_of(st.sampled_from(telling(name)), st.integers(0, tokenizer.size + 2))
    deltas = data.draw(st.lists(st.lists(token, max_size=5), max_size=12))
    assert together(tokenizer, deltas) == tokenizer.decode([token_id for delta in deltas for token_id in delta])


@given(st.lists(st.one_of(st.integers(256, 266), st.sampled_from([0x20, 0x41, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xFF]))))
@example([0xC3, 0xA9, 0xFF])  # one wrong byte makes the whole run unreadable
@example([0xC3, 999, 0xA9])  # an id past the vocabulary does not end a run
@example([0xC3, 262, 0xA9])  # an id that the vocabulary leaves out does not end a run either
@example([999, 256, 256, 257])  # the first space is the first shown one
def test_runs_of_bytes_end_where_the_library_ends_them(ids: list[int]) -> None:
    assert together(SENTENCEPIECE, [[token_id] for token_id in ids]) == SENTENCEPIECE.decode(ids)


def test_run_of_bytes_is_returned_with_the_word_after_it() -> None:
    decoder = IncrementalDecoder(SENTENCEPIECE)
    assert [decoder.feed([number]) for number in "é你".encode()] == [""] * 5
    assert decoder.feed([257]) == "é你a"
    assert decoder.finish() == ""


def test_leading_space_is_dropped_again_after_finish() -> None:
    decoder = IncrementalDecoder(SENTENCEPIECE)
    assert [decoder.feed([259]) + decoder.finish(), decoder.feed([259, 0xC3]) + decoder.finish()] == ["a", "a\ufffd"]
    assert decoder.feed([259, 259]) == "a a"


@pytest.mark.parametrize("name", NAMES)
def test_real_vocabularies_need_no_window(name: str) -> None:
    """Work per id is constant: each id is decoded once, from its own piece."""
    tokenizer = named(name)
    assert (tokenizer.pieces is None) != (tokenizer.words is None)
