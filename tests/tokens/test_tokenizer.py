"""Tokenizers: exact in both directions, without added ids and without shared state."""

import json
from array import array
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.errors import BadModel
from runner.tokens import tokenizer as tokenizer_module
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.tokenizer import Tokenizer, VocabularyTokenizer, load_tokenizer
from tests import sweeps
from tests.tokens.vocabularies import NAMES, vocabulary

# The demo vocabulary has no ids for the other bytes. Another test covers them.
TEXT = st.text(st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d"))
CHATML = "<|im_start|>user\nWhat is é? 你<|im_end|>\n"


@given(text=TEXT)
def test_decoding_returns_the_encoded_text(tokenizer: Tokenizer, text: str) -> None:
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
    with pytest.raises(ValueError, match="is not a control token: give one of"):
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


def test_writing_spaces_as_underlines_does_not_change_the_text(demo_model_folder: Path) -> None:
    prepend = {"type": "Prepend", "prepend": "\u2581"}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    tokenizer = changed(demo_model_folder, normalizer={"type": "Sequence", "normalizers": [prepend, replace]})
    assert tokenizer.normalize("a b") == "a b"


FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
OVERLAPPING = ["<|a|>", "<|a|>b", "x<|a", "<|a|", "|>", "<|c|>", " <|c|>", "a|><|c", "<b<"]
PIECES = ["word ", " ", "\n", "b", "x", "<", "<|", "|>", "é", "e\u0301", "\u2581", "1234 ", "\ud800"]


def pieces_of(names: list[str]) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from([*names, *PIECES]), max_size=24).map("".join)


def encode_parts_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "MIN_SHARED_CHARS", 1)


def ids_of_the_whole(tokenizer: VocabularyTokenizer, text: str) -> list[int]:
    text = text.replace("\ud800", "\ufffd")
    ids: list[int] = tokenizer._tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("name", NAMES)
def test_parts_encoded_by_themselves_have_the_ids_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encode_parts_of_any_length(monkeypatch)
    tokenizer = vocabulary(name)
    assert tokenizer._split is not None
    names = [tokenizer.decode([token_id]) for token_id in sorted(tokenizer.control_ids)[:40]]

    @settings(max_examples=sweeps.times(500, 40))
    @given(text=pieces_of(names))
    def check(text: str) -> None:
        assert tokenizer.encode(text) == tokenizer.encode(text) == ids_of_the_whole(tokenizer, text)

    check()


@pytest.mark.parametrize("prefixed", [False, True], ids=["bytes", "sentencepiece"])
@given(data=st.data())
def test_tokens_that_look_at_their_neighbours_cut_no_text(prefixed: bool, data: st.DataObject) -> None:
    parts = tokenizers.normalizers, tokenizers.pre_tokenizers
    library = tokenizers.Tokenizer(tokenizers.models.BPE(small_vocabulary(), [("a", "b"), ("a", "|"), ("|", ">")]))
    library.normalizer = data.draw(st.sampled_from([parts[0].NFC(), parts[0].Lowercase(), parts[0].Prepend("x")]))
    library.pre_tokenizer = parts[1].Metaspace(prepend_scheme="first") if prefixed else parts[1].ByteLevel()
    for name in data.draw(st.lists(st.sampled_from(OVERLAPPING), unique=True, min_size=1)):
        flags = dict.fromkeys(data.draw(st.lists(st.sampled_from(FLAGS), unique=True)), True)
        library.add_tokens([tokenizers.AddedToken(name, **({"normalized": False} | flags))])
    tokenizer = VocabularyTokenizer(library.to_str())
    text = data.draw(pieces_of(OVERLAPPING))
    with pytest.MonkeyPatch.context() as patch:
        encode_parts_of_any_length(patch)
        assert tokenizer.encode(text) == ids_of_the_whole(tokenizer, text)


def small_vocabulary() -> dict[str, int]:
    letters = sorted({*tokenizers.pre_tokenizers.ByteLevel.alphabet(), "\u2581", "é", "ab", "a|", "|>"})
    return {letter: index for index, letter in enumerate(letters)}


def test_a_system_message_that_prompts_share_is_encoded_once(demo_model_folder: Path) -> None:
    tokenizer = load_tokenizer(demo_model_folder)
    system = f"<|im_start|>system\n{'Add the numbers. ' * 40}<|im_end|>\n"
    for question in range(5):
        text = f"{system}<|im_start|>user\nWhat is {question} + 1?<|im_end|>\n"
        assert tokenizer.encode(text) == ids_of_the_whole(tokenizer, text)
    assert tokenizer._shared.cache_info().misses == 1
    assert tokenizer._shared.cache_info().hits == 4
