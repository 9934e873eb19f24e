"""Pieces: what each id of a vocabulary stands for when it is decoded, read from the steps of its decoder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Words", "byte_pieces", "words"]


@dataclass(frozen=True, slots=True)
class Words:
    """A vocabulary of words and single bytes, as SentencePiece makes them.

    A run of byte ids is a text where all of it is valid UTF-8, and one U+FFFD for each byte where any of it is not.
    """

    texts: Sequence[str | None]
    """The text of each id, shape [size]; None for ids that are not in the vocabulary, which are passed over."""
    bytes: Mapping[int, int]
    """The byte of each id that stands for one."""
    space: str
    """The character that may be dropped at the very beginning."""
    dropped: int
    """How many such characters are dropped, at most."""
    rewritten: Sequence[tuple[str, str]]
    """What decoding writes in another way wherever it stands, such as "▁" for a space, and how."""


def byte_pieces(decoder: Mapping[str, Any] | None, vocabulary: Mapping[str, int], size: int) -> list[bytes] | None:
    """The bytes of each id, shape [size], where decoding is joining them; None elsewhere.

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
        # A token with any other character stands for its own text, as added tokens do.
        pieces[token_id] = name.translate(names).encode("latin-1") if written.issuperset(name) else name.encode()
    return pieces


def words(decoder: Mapping[str, Any] | None, vocabulary: Mapping[str, int], size: int) -> Words | None:
    """The words of a vocabulary whose decoder replaces, joins bytes and strips the beginning; None elsewhere."""
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
    """The step's letter in the shapes that are known; a question mark for all else."""
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
    """Code points of the characters in which byte-level vocabularies write bytes, to the bytes (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + index: byte for index, byte in enumerate(others)}
