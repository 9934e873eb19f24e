"""The bytes or words of each id of a vocabulary, read from the steps of its decoder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Words", "byte_pieces", "words"]


@dataclass(frozen=True, slots=True)
class Words:
    """A vocabulary of words and single bytes, as in SentencePiece.

    A run of byte ids decodes to text if all of it is valid UTF-8, and otherwise to one U+FFFD for each byte.
    """

    texts: Sequence[str | None]
    """The text of each id, shape [size]; None for ids outside the vocabulary, which are skipped."""
    bytes: Mapping[int, int]
    """The byte of each id that stands for one byte."""
    space: str
    """The character that may be dropped at the very beginning of a text."""
    dropped: int
    """Maximum number of such characters that are dropped."""
    rewritten: Sequence[tuple[str, str]]
    """Texts that decoding replaces everywhere, such as "▁" for a space, and their replacements."""


def byte_pieces(decoder: Mapping[str, Any] | None, vocabulary: Mapping[str, int], size: int) -> list[bytes] | None:
    """Return the bytes of each id, shape [size], if decoding only joins them; otherwise None.

    Args:
        decoder: the decoder's part of a tokenizer.json.
        vocabulary: ids by name, added tokens included.
        size: number of ids.
    """
    if not decoder or any(step["type"] != "ByteLevel" for step in _steps(decoder)):
        return None
    names = _byte_names()
    written = {chr(point) for point in names}
    pieces = [b""] * size
    for name, token_id in vocabulary.items():
        # A token with any other character, such as an added token, is its own text.
        pieces[token_id] = name.translate(names).encode("latin-1") if written.issuperset(name) else name.encode()
    return pieces


def words(decoder: Mapping[str, Any] | None, vocabulary: Mapping[str, int], size: int) -> Words | None:
    """Return the words of a vocabulary, as its decoder writes them.

    The result is None if there is no decoder, or if the decoder does more than replace texts, join bytes and strip
    leading spaces.
    """
    steps = _steps(decoder) if decoder else []
    shape = "".join(_letter(step) for step in steps)
    if not re.fullmatch("R*B?F?|R*B?FS", shape) or not steps:
        return None
    replaced = [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]
    texts: list[str | None] = [None] * size
    numbers = {}
    for name, token_id in vocabulary.items():
        text = name
        for old, new in replaced:
            text = text.replace(old, new)
        texts[token_id] = text
        if "B" in shape and _BYTE.fullmatch(text):
            numbers[token_id] = int(text[3:5], 16)
    strip: Mapping[str, Any] = steps[-1] if shape.endswith("S") else {"content": " ", "start": 0}
    return Words(texts, numbers, strip["content"], strip["start"], replaced)


_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


def _steps(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _letter(step: Mapping[str, Any]) -> str:
    """Return the letter that stands for a known step of a decoder; "?" for any other step."""
    match step:
        case {"type": "Replace", "pattern": {"String": _}}:
            return "R"
        case {"type": "ByteFallback"}:
            return "B"
        case {"type": "Fuse"}:
            return "F"
        case {"type": "Strip", "stop": 0}:
            return "S"
    return "?"


def _byte_names() -> dict[int, int]:
    """Return the bytes by the code points of their characters in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + index: byte for index, byte in enumerate(others)}
