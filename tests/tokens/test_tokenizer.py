"""Tokenizers: exact in both directions, nothing added, nothing shared."""

import json
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.errors import BadModel
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.tokenizer import Tokenizer, VocabularyTokenizer, load_tokenizer

# The demo vocabulary has no ids for the other bytes; what it does then is a test of its own.
TEXT = st.text(st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d"))
CHATML = "<|im_start|>user\nWhat is é? 你<|im_end|>\n"


@given(text=TEXT)
def test_decoding_gives_back_what_was_encoded(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == tokenizer.normalize(text) == text


@given(text=TEXT)
def test_longest_token_bounds_the_number_of_ids_from_below(tokenizer: Tokenizer, text: str) -> None:
    assert len(tokenizer.encode(text)) * tokenizer.longest_token >= len(text.encode())


def test_control_tokens_are_single_ids_and_none_are_added(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(CHATML)
    start, end = tokenizer.token_id("<|im_start|>"), tokenizer.token_id("<|im_end|>")
    assert start is not None
    assert tokenizer.eos_id == end
    assert [token_id for token_id in ids if token_id in tokenizer.special_ids] == [start, end]
    assert ids[0] == start
    assert tokenizer.encode("") == []


def test_ids_past_the_vocabulary_decode_to_nothing(tokenizer: Tokenizer) -> None:
    ids = array("i", [tokenizer.size, *tokenizer.encode("a"), tokenizer.size + 7])
    assert tokenizer.decode(ids) == "a"


def test_lone_surrogates_become_replacement_characters(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb" == tokenizer.normalize("a\ud800b")


def test_every_piece_is_what_its_id_decodes_to(tokenizer: Tokenizer) -> None:
    assert tokenizer.pieces is not None
    assert len(tokenizer.pieces) == tokenizer.size
    assert all(
        tokenizer.decode([token_id]) == piece.decode(errors="replace")
        for token_id, piece in enumerate(tokenizer.pieces)
    )


def test_unknown_tokens_have_no_id(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_id("<|no such token|>") is None


def test_further_control_tokens_of_bytes_are_cut_longest_first() -> None:
    tokenizer = ByteTokenizer(["<a>", "<a>b"], eos_token="<a>")
    assert tokenizer.encode("<a>b<a>c") == [260, 259, ord("c")]
    assert tokenizer.eos_id == 259
    assert tokenizer.fingerprint != ByteTokenizer(["<a>", "<a>b"]).fingerprint
    with pytest.raises(ValueError, match="not one of the control tokens"):
        ByteTokenizer(eos_token="</s>")


def test_two_loads_share_no_instance(demo_model_folder: Path) -> None:
    one, two = load_tokenizer(demo_model_folder), load_tokenizer(demo_model_folder)
    assert one._tokenizer is not two._tokenizer
    assert one.fingerprint == two.fingerprint


@pytest.mark.parametrize("content", [None, "{", '{"a": 1}'], ids=["missing", "no JSON", "no tokenizer"])
def test_a_folder_without_a_tokenizer_is_refused_with_the_fix(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BadModel, match=r"tokenizer\.json.*save_pretrained"):
        load_tokenizer(tmp_path)


def changed(folder: Path, **settings: object) -> VocabularyTokenizer:
    text = json.loads((folder / "tokenizer.json").read_text())
    return VocabularyTokenizer(json.dumps(text | settings))


def test_truncation_and_padding_of_the_file_are_switched_off(demo_model_folder: Path) -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 2}
    padding |= {"pad_type_id": 0, "pad_token": "<|im_end|>"}
    tokenizer = changed(demo_model_folder, truncation=truncation, padding=padding)
    assert tokenizer.decode(tokenizer.encode("one two three four")) == "one two three four"


def test_a_normaliser_shows_in_normalize(demo_model_folder: Path) -> None:
    tokenizer = changed(demo_model_folder, normalizer={"type": "NFC"})
    assert tokenizer.normalize("e\u0301") == "é" == tokenizer.decode(tokenizer.encode("e\u0301"))
    assert len(tokenizer.encode("e\u0301" * 99)) * tokenizer.longest_token >= 99 * 3


def test_writing_spaces_as_underlines_is_no_change_of_the_text(demo_model_folder: Path) -> None:
    prepend = {"type": "Prepend", "prepend": "\u2581"}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    tokenizer = changed(demo_model_folder, normalizer={"type": "Sequence", "normalizers": [prepend, replace]})
    assert tokenizer.normalize("a b") == "a b"
