"""Distinction between control tokens and their names in a text. A name that a model spelled with letters is text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from runner.messages import ToolCall
from runner.tokens.decode import IncrementalDecoder
from runner.tokens.tokenizer import Tokenizer

__all__ = ["SpelledTokenStream", "SpelledTokens"]

_NONCHARACTERS: Final = "".join(map(chr, range(0xFDD0, 0xFDF0)))
"""Unicode noncharacters, which normal text does not contain. One of them is the sign that breaks up names; if a text
contains the sign itself, the sign is doubled there.
"""


class SpelledTokens:
    """Text of a turn in which spelled names of control tokens are broken up, so that readers do not match them."""

    def __init__(self, text: str, ids: Sequence[int], tokens: Mapping[str, int], tokenizer: Tokenizer) -> None:
        """Break up spelled names.

        Args:
            text: output of the model, or its beginning.
            ids: sampled ids from the start of the text.
            tokens: control tokens of the format.
            tokenizer: tokenizer of the ids.
        """
        self.text = text
        """Text for readers."""
        self._stream: SpelledTokenStream | None = None
        if any(text.count(name) > ids.count(token_id) for name, token_id in tokens.items()):
            self._stream = SpelledTokenStream(tokens, _free_sign(text))
            self.text = "".join(_broken(self._stream, text, ids, tokenizer))

    def restored(self, value: Any) -> Any:
        """Return a value that was read from `text`, with its names restored."""
        return value if self._stream is None else self._stream.restored(value)

    def restored_call(self, call: ToolCall) -> ToolCall:
        """Return a call with its names restored; its error may quote the text."""
        return call if self._stream is None else self._stream.restored_call(call)


class SpelledTokenStream:
    """`SpelledTokens` for text that arrives in pieces, one per id."""

    def __init__(self, tokens: Mapping[str, int], sign: str = _NONCHARACTERS[0]) -> None:
        """Begin a text. `sign` is put into the spelled names of `tokens`, a mapping of control tokens to their ids."""
        self._names = {token_id: name for name, token_id in tokens.items()}
        self._longest = max(map(len, tokens), default=0)
        self._sign = sign
        self._tail = ""
        self._broken = False  # True if a name was broken up, or if the text contains the sign

    def feed(self, piece: str, token_id: int) -> str:
        """Return `piece`, the text that `token_id` completed, with spelled names broken up."""
        name = self._names.get(token_id, "")
        if not piece or not self._names:
            return piece
        broken, self._tail = self._break_names(piece[: len(piece) - len(name)]), "" if name else self._tail
        return broken + name

    def restored(self, value: Any) -> Any:
        """Return a value that was read, with its names restored."""
        return _restored(value, self._sign) if self._broken else value

    def restored_call(self, call: ToolCall) -> ToolCall:
        """Return a call with its names restored; its error may quote the text."""
        if not self._broken:
            return call
        quoted = re.escape(repr(self._sign)[1:-1])
        error = call.error and self.restored(_once(call.error, quoted))
        return ToolCall(call.id, self.restored(call.name), self.restored(call.arguments), error=error)

    def _break_names(self, piece: str) -> str:
        """Return the piece. If it completes a name, the sign separates the last character of the name."""
        window = self._tail + piece
        self._tail = window[1 - self._longest :] if self._longest > 1 else ""
        ends = {
            match.end() - len(window)
            for name in [name for name in self._names.values() if name in window]
            for match in re.finditer(re.escape(name), window)
            if match.end() > len(window) - len(piece)
        }
        if not ends and self._sign not in piece:
            return piece
        self._broken = True
        cuts = sorted(len(piece) + end - 1 for end in ends)
        parts = [piece[a:b] for a, b in zip([0, *cuts], [*cuts, len(piece)], strict=True)]
        return self._sign.join(part.replace(self._sign, 2 * self._sign) for part in parts)


def _broken(spelling: SpelledTokenStream, text: str, ids: Sequence[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text with spelled token names broken up, one piece per id. Text of the ids after `text` is dropped."""
    decoder, left = IncrementalDecoder(tokenizer), len(text)
    for token_id in ids:
        piece = decoder.feed([token_id])
        # If the text ends inside the piece of an id, the piece counts as letters.
        yield spelling.feed(piece[:left], token_id if len(piece) <= left else -1)
        left = max(0, left - len(piece))
    yield spelling.feed(decoder.finish()[:left], -1)


def _free_sign(text: str) -> str:
    """Return a sign that the text contains neither raw nor escaped; the first sign if the text contains all."""
    low = text.lower()
    return next(
        (sign for sign in _NONCHARACTERS if sign not in text and f"{ord(sign):x}" not in low), _NONCHARACTERS[0]
    )


def _once(text: str, sign: str) -> str:
    """Return the text without single signs; a doubled sign becomes a single one."""
    return re.sub(f"{sign}({sign})?", lambda match: match[1] or "", text)


def _restored(value: Any, sign: str) -> Any:
    if isinstance(value, str):
        return _once(value, sign)
    if isinstance(value, Mapping):
        return {_restored(key, sign): _restored(each, sign) for key, each in value.items()}
    return [_restored(each, sign) for each in value] if isinstance(value, list) else value
