"""Safe encoding: content never becomes a control token, and ids are unchanged if content has no control text."""

import functools
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, example, given
from hypothesis import strategies as st

from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.tokenizer import Tokenizer, VocabularyTokenizer
from tests import sweeps
from tests.tokens.vocabularies import NAMES, spoken, vocabulary

BYTES = ByteTokenizer(["[INST]"], added_tokens=["<tool_call>", "</tool_call>", "<tool_call>x"])
EVERY = ("bytes", *NAMES)
Parts = Sequence[str]


def named(name: str) -> Tokenizer:
    return BYTES if name == "bytes" else vocabulary(name)


@functools.cache
def control(name: str) -> tuple[str, ...]:
    """Return the control tokens that a vocabulary's templates write, and a few others."""
    tokenizer = named(name)
    names = [tokenizer.decode([token_id]) for token_id in sorted(tokenizer.control_ids)]
    return tuple(names[:40] + [other for other in names[40:] if "SPECIAL" not in other and "place" not in other][:60])


def spelled(parts: Parts) -> tuple[str, list[tuple[int, int]]]:
    """Return scaffold and content in alternation, as a text and the spans of its content."""
    text, spans = "", []
    for index, part in enumerate(parts):
        if index % 2:
            spans.append((len(text), len(text) + len(part)))
        text += part
    return text, spans


def conversation(rng: random.Random, names: Sequence[str], said: Sequence[str]) -> list[str]:
    """Return scaffold of control tokens and words, and content whose words include `said`."""

    def scaffold() -> str:
        return "".join(rng.choice([*names, "user\n", "\n", " ", ""]) for _ in range(rng.randrange(4)))

    return [scaffold() if index % 2 == 0 else spoken(rng, said) for index in range(2 * rng.randrange(1, 4) + 1)]


def always_marked(tokenizer: Tokenizer, text: str, spans: Sequence[tuple[int, int]]) -> list[int]:
    """Encode in the way of content with control text, even if a plain encoding would be correct."""
    return (
        tokenizer._added.encode(text, spans)
        if isinstance(tokenizer, VocabularyTokenizer)
        else tokenizer.encode(text, spans)
    )


def stands_apart(names: Sequence[str], text: str, spans: Sequence[tuple[int, int]]) -> bool:
    """True if no control token of the plain encoding overlaps content."""
    found = _pattern(tuple(names)).finditer(text)
    return not any(m.start() < stop and start < m.end() for m in found for start, stop in spans)


def shown(name: str, text: str) -> str:
    """Return `text` without the vocabulary's own changes: SentencePiece writes a space after every control token."""
    return text.replace(" ", "") if name == "mistral_sentencepiece" else text


@functools.cache
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))


@functools.cache
def every_name(name: str) -> tuple[str, ...]:
    tokenizer = named(name)
    return tuple(tokenizer.decode([token_id]) for token_id in sorted(tokenizer.control_ids))


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize("name", EVERY)
def test_thousands_of_texts_without_control_text_keep_their_ids(name: str) -> None:
    tokenizer, rng = named(name), sweeps.random_of(name)
    seen = 0
    while seen < sweeps.times(2000, 300):
        # The parts are only beginnings and ends of control tokens. Whole tokens arise where two parts meet.
        text, spans = spelled(conversation(rng, control(name), [token[:-1] for token in control(name)[:20]]))
        if stands_apart(every_name(name), text, spans):
            assert always_marked(tokenizer, text, spans) == tokenizer.encode(text), (text, spans)
            seen += 1


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize("name", EVERY)
def test_control_text_in_content_is_ordinary_text(name: str) -> None:
    tokenizer, rng = named(name), sweeps.random_of(name)
    ends = every_name(name)
    for _ in range(sweeps.times(1000, 150)):
        parts = conversation(rng, control(name), control(name))
        text, spans = spelled(parts)
        ids = tokenizer.encode(text, spans)
        # If content is filled with a character that no control token has, it cannot be a part of a control token.
        scaffold, _ = spelled([part if index % 2 == 0 else "☃" * len(part) for index, part in enumerate(parts)])
        expected = [tokenizer.token_id(found) for found in _pattern(ends).findall(scaffold)]
        assert [token_id for token_id in ids if token_id in tokenizer.control_ids] == expected, (text, spans)
        assert shown(name, tokenizer.decode(ids)) == shown(name, tokenizer.normalize(text))


@pytest.mark.parametrize("name", NAMES)
def test_text_between_control_tokens_is_encoded_without_them(name: str) -> None:
    tokenizer, rng = vocabulary(name), sweeps.random_of(name)
    plain = tokenizers.Tokenizer(tokenizer._tokenizer.model)
    plain.normalizer, plain.pre_tokenizer = tokenizer._tokenizer.normalizer, tokenizer._tokenizer.pre_tokenizer
    added = tokenizer._tokenizer.get_added_tokens_decoder()
    plain.add_tokens([token for token_id, token in added.items() if token_id not in tokenizer.control_ids])
    for _ in range(sweeps.times(500, 100)):
        parts = conversation(rng, control(name), control(name))
        text, spans = spelled(parts)
        scaffold, _ = spelled([part if index % 2 == 0 else "☃" * len(part) for index, part in enumerate(parts)])
        expected, end = [], 0
        for found in _pattern(every_name(name)).finditer(scaffold):
            stretch, end = text[end : found.start()], found.end()
            expected += [*plain.encode(stretch, add_special_tokens=False).ids, tokenizer.token_id(found[0])]
        assert tokenizer.encode(text, spans) == [*expected, *plain.encode(text[end:], add_special_tokens=False).ids]


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize("name", EVERY)
@given(data=st.data())
def test_any_text_without_control_text_keeps_its_ids(name: str, data: st.DataObject) -> None:
    tokenizer = named(name)
    names = control(name)
    word = st.one_of(
        st.text(max_size=6), st.sampled_from(names).map(lambda n: n[1:]), st.sampled_from([" ", "\n", "<", "▁"])
    )
    said = st.lists(word, max_size=4).map("".join)
    scaffold = st.lists(st.one_of(st.sampled_from(names), word), max_size=4).map("".join)
    text, spans = spelled(data.draw(st.tuples(scaffold, said, scaffold, said, scaffold)))
    text = re.sub("[\ud800-\udfff]", "?", text)
    assume(stands_apart(every_name(name), text, spans))
    assert always_marked(tokenizer, text, spans) == tokenizer.encode(text, spans) == tokenizer.encode(text)


@pytest.mark.parametrize("name", EVERY)
def test_content_that_could_form_a_control_token_is_known_for_it(name: str) -> None:
    tokenizer = named(name)
    for token in every_name(name)[:200]:
        for at in range(1, len(token)):
            assert tokenizer.holds_control(f"words {token[:at]}")
            assert tokenizer.holds_control(f"{token[at:]} words")
            assert tokenizer.holds_control(f"  {token[at:]} words")
            assert tokenizer.holds_control(f"words {token[:at]} \n")
            assert tokenizer.holds_control(token[at:])
            assert tokenizer.holds_control(token[at : at + 3])
        assert tokenizer.holds_control(f"words {token} words")
        assert tokenizer.holds_control(token)


@pytest.mark.parametrize("name", EVERY)
# similar characters on purpose
@pytest.mark.parametrize("text", ["", " ", "The result is 42.", "def f(x):\n    return x[0] < 3\n", "你好，世界 é"])  # noqa: RUF001
def test_ordinary_content_is_known_to_be_harmless(name: str, text: str) -> None:
    assert not named(name).holds_control(text)


@pytest.mark.parametrize("name", EVERY)
def test_control_text_cut_by_the_border_of_content_gets_no_control_id(name: str) -> None:
    tokenizer = named(name)
    for token in control(name)[:20]:
        for at in range(1, len(token)):
            for parts in ((token[:at], token[at:]), ("", token[:at], token[at:]), (token[0], token[1:at], token[at:])):
                text, spans = spelled(parts)
                if parts[1] and parts[0] not in control(name):
                    assert not tokenizer.control_ids & set(tokenizer.encode(text, spans)), parts


@pytest.mark.parametrize("name", EVERY)
def test_two_contents_side_by_side_form_no_control_token(name: str) -> None:
    tokenizer = named(name)
    for token in control(name)[:20]:
        half = len(token) // 2
        ids = tokenizer.encode(token, [(0, half), (half, len(token))])
        assert not tokenizer.control_ids & set(ids)
        assert tokenizer.decode(ids) == tokenizer.normalize(token)


def test_empty_content_cuts_no_control_token() -> None:
    for name in EVERY:
        tokenizer = named(name)
        token = control(name)[0]
        assert tokenizer.encode(token, [(2, 2)]) == [tokenizer.token_id(token)]


@pytest.mark.parametrize("spans", [[(3, 2)], [(0, 3), (2, 4)], [(4, 5), (0, 1)], [(0, 99)], [(-1, 2)]], ids=str)
@pytest.mark.parametrize("name", ["bytes", "qwen"])
def test_invalid_spans_are_refused(name: str, spans: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="sorted, disjoint and within 13 characters"):
        named(name).encode("<|im_end|> b<", spans)


@pytest.mark.parametrize("name", EVERY)
def test_safe_encoding_leaves_later_plain_encoding_unchanged(name: str) -> None:
    tokenizer = named(name)
    token = control(name)[1]
    before = tokenizer.encode(f"a {token} b")
    tokenizer.encode(f"a {token} b", [(0, len(token) + 4)])
    assert tokenizer.encode(f"a {token} b") == before
    assert tokenizer.token_id(token) in before
    if isinstance(tokenizer, VocabularyTokenizer):
        assert tokenizer._tokenizer.encode_special_tokens is False


def test_lone_surrogates_in_content_become_replacement_characters() -> None:
    for name in EVERY:
        tokenizer, token = named(name), control(name)[0]
        text, spans = spelled(["", f"a\ud800{token}", token])
        assert tokenizer.decode(tokenizer.encode(text, spans)) == f"a\ufffd{token}{token}"


def test_bytes_have_tokens_that_are_added_but_not_special() -> None:
    ids = BYTES.encode("<tool_call>x<tool_call></tool_call>[INST]")
    assert ids == [262, 260, 261, 259]
    assert BYTES.control_ids == frozenset(range(256, 263))
    assert BYTES.special_ids == frozenset(range(256, 260))
    assert BYTES.fingerprint != ByteTokenizer(["[INST]", "<tool_call>", "</tool_call>", "<tool_call>x"]).fingerprint
    with pytest.raises(ValueError, match="are control tokens and in added_tokens"):
        ByteTokenizer(["<a>"], added_tokens=["<a>"])
    with pytest.raises(ValueError, match="empty"):
        ByteTokenizer(added_tokens=[""])


# The library's rules, on small vocabularies with each of them.

ALPHABET = (
    "a",
    "b",
    "A",
    "<x>",
    "<x",
    ">",
    "<y>",
    "<Y>",
    "<z>",
    "zz",
    "é",
    "e\u0301",
    " ",
    "  ",
    "\n",
    "\u00a0",
    "_",
    "▁",
)
LEARNT = ["?", "▁", "a", "b", "A", "<", "x", ">", "y", "Y", "z", "é", "e", "\u0301", " ", "\n", "\u00a0", "_", "Ġ", "Ċ"]


def small(
    *flags: str, normalizer: dict[str, Any] | None = None, splits: dict[str, Any] | None = None, **settings: Any
) -> VocabularyTokenizer:
    """Return a vocabulary of characters, with four added tokens that have the given flags."""
    names = ("<x>", "<y>", "<z>", "zz")
    given = {flag: flag in flags for flag in ("single_word", "lstrip", "rstrip", "normalized")}
    vocab = {name: index for index, name in enumerate(LEARNT)}
    model = {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]] if "ab" in vocab else [], "unk_token": "?"}
    added = [{"id": len(vocab) + i, "content": name, "special": i < 2, **given} for i, name in enumerate(names)]
    if "mixed" in flags:
        added = [{**token, "normalized": index % 2 == 1} for index, token in enumerate(added)]
    parts = {"added_tokens": added, "normalizer": normalizer, "pre_tokenizer": splits, "model": model} | settings
    return VocabularyTokenizer(json.dumps({"version": "1.0", **parts}))


NFC = {"type": "NFC"}
LOWER = {"type": "Lowercase"}
PREPEND: dict[str, Any] = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ],
}
FIRST = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
ALWAYS = {**FIRST, "prepend_scheme": "always"}
PREFIX = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}

SMALL: dict[str, Callable[[], VocabularyTokenizer]] = {
    "plain": lambda: small(),
    "lstrip": lambda: small("lstrip"),
    "rstrip": lambda: small("rstrip"),
    "both strips": lambda: small("lstrip", "rstrip"),
    "single words": lambda: small("single_word"),
    "single words that strip": lambda: small("single_word", "lstrip", "rstrip"),
    "normalised": lambda: small("normalized"),
    "normalised, NFC": lambda: small("normalized", normalizer=NFC),
    "normalised, lower case": lambda: small("normalized", normalizer=LOWER),
    "normalised, lower case, strips": lambda: small("normalized", "lstrip", "rstrip", normalizer=LOWER),
    "normalised, lower case, single words": lambda: small("normalized", "single_word", normalizer=LOWER),
    "normalised, prepended": lambda: small("normalized", normalizer=PREPEND),
    "mixed, prepended": lambda: small("mixed", normalizer=PREPEND),
    "mixed, prepended, strips": lambda: small("mixed", "lstrip", "rstrip", normalizer=PREPEND),
    "mixed, lower case": lambda: small("mixed", normalizer=LOWER),
    "prepended": lambda: small(normalizer=PREPEND),
    "prepended, rstrip": lambda: small("rstrip", normalizer=PREPEND),
    "first": lambda: small(splits=FIRST),
    "first, lstrip": lambda: small("lstrip", splits=FIRST),
    "normalised, first, lower case": lambda: small("normalized", splits=FIRST, normalizer=LOWER),
    "always": lambda: small(splits=ALWAYS),
    "prefix": lambda: small(splits=PREFIX),
}


@functools.cache
def small_named(rules: str) -> VocabularyTokenizer:
    return SMALL[rules]()


def overlaps_content(tokenizer: VocabularyTokenizer, text: str, spans: Sequence[tuple[int, int]]) -> bool:
    """True if a control token of the plain encoding overlaps content, apart from white space that it swallows."""
    encoding = tokenizer._tokenizer.encode(text, add_special_tokens=False)
    for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
        if token_id in tokenizer.control_ids:
            name = text[start:stop]
            first, last = stop - len(name.lstrip()), start + len(name.rstrip())
            if any(begin < last and first < end for begin, end in spans if begin < end):
                return True
    return False


@pytest.mark.parametrize("rules", SMALL)
@given(parts=st.lists(st.lists(st.sampled_from(ALPHABET), max_size=5).map("".join), min_size=1, max_size=5))
@example(parts=["<x>", "\u0301"])
@example(parts=["a", " ", "<y>b"])
@example(parts=["<y>", "é", "<x>"])
@example(parts=["zz", "a", "zz", "_", "zz"])
def test_every_rule_of_the_library_holds(rules: str, parts: list[str]) -> None:
    tokenizer = small_named(rules)
    text, spans = spelled(parts)
    if not overlaps_content(tokenizer, text, spans):
        assert tokenizer._added.encode(text, spans) == tokenizer.encode(text) == tokenizer.encode(text, spans)
    else:
        assert any(tokenizer.holds_control(text[start:stop]) for start, stop in spans)


@pytest.mark.parametrize("rules", SMALL)
@given(said=st.lists(st.sampled_from(ALPHABET), max_size=8).map("".join))
def test_no_rule_of_the_library_lets_content_through(rules: str, said: str) -> None:
    tokenizer = small_named(rules)
    for before, after in (("", ""), ("a", "b"), ("<", ">"), ("<x>", "zz"), (" ", "\n")):
        text, spans = spelled([before, said, after])
        alone = [
            found for part in (before, after) for found in tokenizer.encode(part) if found in tokenizer.control_ids
        ]
        ids = [found for found in tokenizer.encode(text, spans) if found in tokenizer.control_ids]
        assert len(ids) <= len(alone)


def unigram(**settings: Any) -> VocabularyTokenizer:
    vocab = [["<unk>", 0.0], ["<s>", 0.0], ["</s>", 0.0], *([char, -2.0] for char in "ab<>/s▁")]
    model = {"type": "Unigram", "unk_id": 0, "vocab": vocab}
    return small(model=model, added_tokens=_learnt("<s>", "</s>", "<unk>"), **settings)


def merging(**settings: Any) -> VocabularyTokenizer:
    vocab = {name: index for index, name in enumerate(["a", "<s>", "</s>", "<", ">", "/", "s", "<s", "s>", "</"])}
    merges = [["<", "s"], ["s", ">"], ["<s", ">"], ["<", "/"], ["</", "s>"]]
    model = {"type": "BPE", "vocab": vocab, "merges": merges}
    return small(model=model, added_tokens=_learnt("<s>", "</s>"), **settings)


def whole_words(**settings: Any) -> VocabularyTokenizer:
    vocab = {name: index for index, name in enumerate(["a", "<s>", "</s>", "<", ">", "/", "s"])}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "ignore_merges": True}
    return small(model=model, added_tokens=_learnt("<s>", "</s>"), **settings)


def _learnt(*names: str) -> list[dict[str, Any]]:
    ids = {"<unk>": 0, "<s>": 1, "</s>": 2}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [{"id": ids[name], "content": name, "special": True, **flags} for name in sorted(names, key=ids.__getitem__)]


@pytest.mark.parametrize("make", [unigram, merging, whole_words], ids=lambda make: make.__name__)
def test_learnt_control_tokens_are_not_made_of_content(
    make: Callable[[], VocabularyTokenizer],
) -> None:
    tokenizer = make()
    text, spans = spelled(["<s>", "a<s>a</s>", "</s>"])
    ids = tokenizer.encode(text, spans)
    assert [token_id for token_id in ids if token_id in tokenizer.control_ids] == [1, 2]
    assert "".join(tokenizer._tokenizer.id_to_token(token_id) or "" for token_id in ids) == text


@pytest.mark.parametrize("make", [unigram, merging, whole_words], ids=lambda make: make.__name__)
def test_text_normalised_to_a_control_word_is_ordinary_text(make: Callable[..., VocabularyTokenizer]) -> None:
    tokenizer = make(normalizer={"type": "NFKC"})
    text, spans = spelled(["<s>", "a\uff1cs\uff1ea"])  # wide brackets, which NFKC converts to plain ones
    assert [token_id for token_id in tokenizer.encode(text, spans) if token_id in tokenizer.control_ids] == [1]


def test_a_vocabulary_that_leaves_ids_out_keeps_its_ids() -> None:
    vocab = {name: 3 * index for index, name in enumerate(LEARNT)}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "?"}
    added = [{**token, "id": 3 * LEARNT.index("a")} for token in _learnt("<s>")]
    tokenizer = small(model=model, added_tokens=[{**added[0], "content": "<s>"}])
    text, spans = spelled(["<s>", "a<s>b", "<s>"])
    control_id = tokenizer.token_id("<s>")
    assert [token_id == control_id for token_id in tokenizer.encode(text, spans)].count(True) == 2


def test_added_white_space_controls_nothing() -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    added = [{"id": len(LEARNT) + i, "content": c, "normalized": True, **flags} for i, c in enumerate(["  ", "<x>"])]
    for tokenizer in (small(added_tokens=added), small(added_tokens=added, normalizer=PREPEND)):
        assert tokenizer.control_ids == {len(LEARNT) + 1}
        assert not tokenizer.holds_control("a  b")
        text, spans = spelled(["a", "  b   b", " <x>"])
        assert tokenizer._added.encode(text, spans) == tokenizer.encode(text)


def _chars() -> Iterator[str]:
    yield from map(chr, range(0x21, 0x250))
    yield from "中\u0301\u200d\u200c①ⓐ🙂ﬁ\u2028\u1680\u2167＿\x1c"  # noqa: RUF001  # similar characters on purpose


def test_neighbours_of_single_words_are_words_to_us_as_to_the_library() -> None:
    tokenizer = small_named("single words")
    for char in _chars():
        for parts in (["<x>", f"{char}a"], ["", f"a{char}", "<x>"]):
            text, spans = spelled(parts)
            assert tokenizer._added.encode(text, spans) == tokenizer.encode(text), char
