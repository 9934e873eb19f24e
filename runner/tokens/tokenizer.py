"""Tokenizers: text to ids and back, each an instance of our own that nobody else shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Tokenizer"]


class Tokenizer(Protocol):
    """What the runner needs of a vocabulary.

    Attributes:
        eos_id: the id that ends a turn by the vocabulary's own word, or None.
        special_ids: ids of control tokens, which no plain text encodes to by merging.
        size: number of ids, padding rows of the model not included.
        longest_token: bytes of the longest token, so that n bytes are at least n / longest_token ids.
        fingerprint: a hash that names the vocabulary and its rules.
    """

    eos_id: int | None
    special_ids: frozenset[int]
    size: int
    longest_token: int
    fingerprint: str

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
