"""A vocabulary of the 256 bytes and a few control tokens: nothing to download, for scripted engines and tests."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from runner.tokens.tokenizer import without_surrogates

__all__ = ["ByteTokenizer"]


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8; control tokens follow, in the order given.

    Args:
        control_tokens: further control tokens, after ChatML's.
        eos_token: the one that ends a turn.

    Raises:
        ValueError: `eos_token` is no control token.
    """

    CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")

    def __init__(self, control_tokens: Sequence[str] = (), *, eos_token: str = "<|im_end|>") -> None:
        names = tuple(dict.fromkeys((*self.CHATML, *control_tokens)))
        self._control = {name: 256 + index for index, name in enumerate(names)}
        if eos_token not in self._control:
            raise ValueError(f"{eos_token!r} is none of the control tokens {', '.join(names)}")
        self.eos_id: int | None = self._control[eos_token]
        self.special_ids = frozenset(self._control.values())
        self.size = 256 + len(names)
        self.pieces: Sequence[bytes] | None = [bytes([value]) for value in range(256)] + [n.encode() for n in names]
        self._bytes = dict(enumerate(self.pieces))
        self.longest_token = max(map(len, self.pieces))
        self.fingerprint = hashlib.sha256("\0".join((*names, eos_token)).encode()).hexdigest()[:16]
        # Longest first, so that a token which begins like another is not cut short.
        longest_first = sorted(names, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})").split

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, none added; see `Tokenizer`."""
        ids: list[int] = []
        for index, part in enumerate(self._split(without_surrogates(text))):
            if index % 2:
                ids.append(self._control[part])
            else:
                ids.extend(part.encode())
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; see `Tokenizer`."""
        pieces = self._bytes
        return b"".join([pieces.get(token_id, b"") for token_id in ids]).decode(errors="replace")

    def token_id(self, token: str) -> int | None:
        """The id of a control token, or of a single ASCII character."""
        if len(token) == 1 and token.isascii():
            return ord(token)
        return self._control.get(token)

    def normalize(self, text: str) -> str:
        """`text` as it is kept; see `Tokenizer`."""
        return without_surrogates(text)
