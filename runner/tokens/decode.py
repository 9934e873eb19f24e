"""Incremental decoding of streamed ids. It never splits a character, and never encodes text again."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from runner.tokens.token_bytes import Words
from runner.tokens.tokenizer import Tokenizer

__all__ = ["IncrementalDecoder", "text_of_token"]

_utf8_decoder = codecs.getincrementaldecoder("utf-8")
_UNREADABLE = "\ufffd"


class IncrementalDecoder:
    """Decoder for ids as they arrive. The returned parts, joined, equal `tokenizer.decode` of all ids.

    If the bytes of a character are spread over several ids, the character is returned with the last of these ids. In a
    vocabulary with byte fallback, the character is returned with the id after its run of bytes. The work per id is
    constant.
    """

    __slots__ = ("_steps",)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._steps: _ByteSteps | _WordSteps | _WindowSteps
        if tokenizer.pieces is not None:
            self._steps = _ByteSteps(tokenizer.pieces)
        elif tokenizer.words is not None:
            self._steps = _WordSteps(tokenizer.words)
        else:
            self._steps = _WindowSteps(tokenizer)

    def feed(self, ids: Sequence[int]) -> str:
        """Return the text that `ids` complete; "" while a character is incomplete."""
        return self._steps.feed(ids)

    def finish(self) -> str:
        """Return incomplete bytes at the end as replacement characters, and reset the decoder."""
        return self._steps.finish()


def text_of_token(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text of one id, even if the id is only a part of a character.

    Bytes that are not text by themselves become characters U+DC80 to U+DCFF, as in Python's `surrogateescape`.
    """
    if tokenizer.pieces is not None and token_id < len(tokenizer.pieces):
        return tokenizer.pieces[token_id].decode("utf-8", "surrogateescape")
    words = tokenizer.words
    if words is None or token_id >= len(words.texts):
        return tokenizer.decode([token_id])
    if token_id in words.bytes:
        return bytes([words.bytes[token_id]]).decode("utf-8", "surrogateescape")
    return words.texts[token_id] or ""


class _ByteSteps:
    """Decoder for vocabularies of bytes: decoding joins the bytes of the ids, so one UTF-8 decoder is enough."""

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


class _WordSteps:
    """Decoder for vocabularies of words: it joins words and runs of bytes, and drops spaces at the very beginning.

    A run of bytes that is valid so far is held back until it ends, since one wrong byte changes the whole run.
    """

    __slots__ = ("_broken", "_open", "_run", "_to_drop", "_utf8", "_words")

    def __init__(self, words: Words) -> None:
        self._words = words
        self._utf8 = _utf8_decoder(errors="strict")
        self._to_drop = words.dropped
        self._open: list[str] = []  # the characters of the run so far
        self._run = 0  # the number of bytes of the run
        self._broken = False

    def feed(self, ids: Sequence[int]) -> str:
        texts, numbers = self._words.texts, self._words.bytes
        shown: list[str] = []
        for token_id in ids:
            text = texts[token_id] if token_id < len(texts) else None
            if token_id in numbers:
                shown.append(self._byte(numbers[token_id]))
            elif text is not None:
                shown += self._end_run(), text
        return self._without_space("".join(shown))

    def finish(self) -> str:
        rest = self._without_space(self._end_run())
        self._to_drop = self._words.dropped
        return rest

    def _byte(self, number: int) -> str:
        if self._broken:
            return _UNREADABLE
        self._run += 1
        try:
            self._open.append(self._utf8.decode(bytes((number,))))
        except UnicodeDecodeError:
            self._broken = True
            return _UNREADABLE * self._run
        return ""

    def _end_run(self) -> str:
        """End the run of byte tokens, and return its text without the part that was already returned."""
        is_cut = bool(self._utf8.getstate()[0])
        text = "" if self._broken else _UNREADABLE * self._run if is_cut else "".join(self._open)
        self._utf8.reset()
        self._open, self._run, self._broken = [], 0, False
        return text

    def _without_space(self, text: str) -> str:
        while self._to_drop and text:
            starts = text[0] == self._words.space
            self._to_drop = self._to_drop - 1 if starts else 0
            text = text[1:] if starts else text
        return text


class _WindowSteps:
    """Decoder for other vocabularies: the ids of the last returned text are decoded again with the new ids.

    The result is exact if new ids do not change text that was already returned. This is true for the remaining kinds
    of vocabularies: WordPiece, Metaspace, and words joined by spaces.
    """

    __slots__ = ("_ids", "_settled", "_shown", "_tokenizer")

    # A character has at most as many ids as bytes, so this many ids are not one incomplete character.
    MAX_OPEN_IDS = 16

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._settled = 0
        self._shown = 0

    def feed(self, ids: Sequence[int]) -> str:
        self._ids.extend(ids)
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd") and len(self._ids) - self._settled < self.MAX_OPEN_IDS:
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
        # The new ids stay, since they are the left neighbours of the next ids.
        self._ids = self._ids[self._settled :]
        self._settled = len(self._ids)
        self._shown = len(self._tokenizer.decode(self._ids))
        return new
