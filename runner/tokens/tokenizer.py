"""Tokenizers: text to ids and back, each an instance of our own that nobody else shares."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from runner.errors import BadModel

__all__ = ["Tokenizer", "VocabularyTokenizer", "load_tokenizer", "without_surrogates"]


class Tokenizer(Protocol):
    """What the runner needs of a vocabulary.

    Attributes:
        eos_id: the id that ends a turn by the vocabulary's own word, or None.
        special_ids: ids of control tokens, which no plain text encodes to by merging.
        size: number of ids, padding rows of the model not included.
        longest_token: bytes of the longest token, so that n bytes are at least n / longest_token ids.
        fingerprint: a hash that names the vocabulary and its rules.
        pieces: the bytes of each id, shape [size], where decoding is joining them (byte-level vocabularies); None
            where the text of an id depends on its neighbours.
    """

    eos_id: int | None
    special_ids: frozenset[int]
    size: int
    longest_token: int
    fingerprint: str
    pieces: Sequence[bytes] | None

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; control tokens written in it become control ids, none are added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens included; ids past the vocabulary decode to ""."""
        ...

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact name, such as "<|im_end|>"."""
        ...

    def normalize(self, text: str) -> str:
        """`text` as the vocabulary's normaliser leaves it (NFC for some); decode(encode(x)) is compared with it."""
        ...


class VocabularyTokenizer:
    """A vocabulary from the text of a tokenizer.json.

    Args:
        text: the file's content.
        eos_token: the name of the token that ends a turn, or None.

    Raises:
        ValueError: the text describes no tokenizer.
    """

    def __init__(self, text: str, *, eos_token: str | None = None) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing more precise
            raise ValueError(str(error)) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = json.loads(text)
        added = self._tokenizer.get_added_tokens_decoder()
        self.eos_id: int | None = self.token_id(eos_token) if eos_token is not None else None
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values(), default=-1) + 1
        self._normalizer = _visible_normalizer(settings.get("normalizer"))
        self.pieces: Sequence[bytes] | None = (
            _pieces(vocabulary, self.size) if _is_byte_level(settings.get("decoder")) else None
        )
        longest = max(map(len, self.pieces if self.pieces is not None else (name.encode() for name in vocabulary)))
        # Composing characters makes a text up to three times shorter before it is cut into tokens.
        self.longest_token = longest * (1 if self._normalizer is None else 3)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, none added; see `Tokenizer`."""
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError:
            return self._tokenizer.encode(without_surrogates(text), add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; see `Tokenizer`."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact name."""
        return self._tokenizer.token_to_id(token)

    def normalize(self, text: str) -> str:
        """`text` as the vocabulary's normaliser leaves it; see `Tokenizer`."""
        plain = without_surrogates(text)
        return plain if self._normalizer is None else self._normalizer.normalize_str(plain)


def load_tokenizer(folder: Path) -> VocabularyTokenizer:
    """The tokenizer of the model in `folder`: a new instance, which must stay in one thread.

    It is read from tokenizer.json itself, since classes that rebuild it from the model's type change some vocabularies.

    Raises:
        BadModel: there is no usable tokenizer.json.
    """
    path = folder / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
        return VocabularyTokenizer(text, eos_token=_eos_token(folder / "tokenizer_config.json"))
    except (OSError, ValueError) as error:
        raise BadModel(
            f"no tokenizer can be read from {path}: {error}. "
            f"Save one there with AutoTokenizer.from_pretrained(...).save_pretrained({str(folder)!r})."
        ) from error


def without_surrogates(text: str) -> str:
    """`text` with each lone surrogate, which no vocabulary has ids for, replaced by U+FFFD."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


_SURROGATES = re.compile("[\ud800-\udfff]")


def _eos_token(path: Path) -> str | None:
    if not path.is_file():
        return None
    token = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else None


def _is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    if decoder is None:
        return False
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return all(step["type"] == "ByteLevel" for step in steps)


def _byte_names() -> dict[int, int]:
    """Code points of the characters in which byte-level vocabularies write bytes, to the bytes (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + index: byte for index, byte in enumerate(others)}


def _pieces(vocabulary: Mapping[str, int], size: int) -> list[bytes]:
    names = _byte_names()
    written = {chr(point) for point in names}
    pieces = [b""] * size
    for name, token_id in vocabulary.items():
        # A token with any other character stands for its own text, as added tokens do.
        pieces[token_id] = name.translate(names).encode("latin-1") if written.issuperset(name) else name.encode()
    return pieces


def _visible_normalizer(settings: Mapping[str, Any] | None) -> tokenizers.normalizers.Normalizer | None:
    """The part of a normaliser that decoding does not undo: writing spaces as "▁" is undone, NFC is not."""
    if settings is None:
        return None
    steps = settings["normalizers"] if settings["type"] == "Sequence" else [settings]
    kept = [step for step in steps if step["type"] != "Prepend" and step.get("content") != "\u2581"]
    if not kept:
        return None
    bare = {"type": "BPE", "vocab": {}, "merges": []}
    carrier = {"version": "1.0", "normalizer": {"type": "Sequence", "normalizers": kept}, "model": bare}
    normalizer: tokenizers.normalizers.Normalizer | None = tokenizers.Tokenizer.from_str(json.dumps(carrier)).normalizer
    return normalizer
