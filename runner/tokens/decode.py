"""Incremental text of ids as they stream: never half a character, never a second encoding."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from runner.tokens.tokenizer import Tokenizer

__all__ = ["IncrementalDecoder"]

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDecoder:
    """Text of ids as they come; all it returns, joined, is `tokenizer.decode` of all the ids.

    A character whose bytes are spread over several ids comes with the last of them. The work for an id does not
    depend on how many came before.
    """

    __slots__ = ("_steps",)

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = tokenizer.pieces
        self._steps: _ByteSteps | _WindowSteps = _ByteSteps(pieces) if pieces is not None else _WindowSteps(tokenizer)

    def feed(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; "" while a character is still open."""
        return self._steps.feed(ids)

    def finish(self) -> str:
        """What was still open, as replacement characters; the decoder begins anew."""
        return self._steps.finish()


class _ByteSteps:
    """Decoding is joining the bytes of the ids, so one UTF-8 decoder does it."""

    __slots__ = ("_pieces", "_utf8")

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._utf8 = _utf8_decoder(errors="replace")

    def feed(self, ids: Sequence[int]) -> str:
        pieces, size = self._pieces, len(self._pieces)
        return self._utf8.decode(b"".join([pieces[token_id] for token_id in ids if token_id < size]))

    def finish(self) -> str:
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


class _WindowSteps:
    """Decoding depends on neighbours, so the ids since the last settled text are decoded again with the new ones.

    Exact where an id changes no text before the last settled id; the byte-fallback ids of SentencePiece can, when
    valid characters and invalid bytes follow each other without a plain token between.
    """

    __slots__ = ("_ids", "_settled", "_shown", "_tokenizer")

    # No character has more ids than bytes, so an open end as long as this is no character any more.
    LONGEST_OPEN = 16

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._settled = 0
        self._shown = 0

    def feed(self, ids: Sequence[int]) -> str:
        self._ids.extend(ids)
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd") and len(self._ids) - self._settled < self.LONGEST_OPEN:
            return ""
        return self._show(text)

    def finish(self) -> str:
        rest = self._show(self._tokenizer.decode(self._ids))
        self._ids, self._settled, self._shown = [], 0, 0
        return rest

    def _show(self, text: str) -> str:
        new = text[self._shown :]
        if not new:
            return ""
        # The ids that were new this time stay as the left neighbours of the next ones.
        self._ids = self._ids[self._settled :]
        self._settled = len(self._ids)
        self._shown = len(self._tokenizer.decode(self._ids))
        return new
