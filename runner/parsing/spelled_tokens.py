"""Tells a control token from its name: where a model spelt one with letters it speaks of it, and does not use it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from runner.messages import ToolCall
from runner.tokens.decode import IncrementalDecoder
from runner.tokens.tokenizer import Tokenizer

__all__ = ["SpelledTokenStream", "SpelledTokens"]

_NONCHARACTERS: Final = "".join(map(chr, range(0xFDD0, 0xFDF0)))
"""What no text has that is exchanged; where one has all the same, it is said twice while names are broken."""


class SpelledTokens:
    """One turn's text with every name of a control token that was spelt broken in two, so that no reader takes it."""

    def __init__(self, text: str, ids: Sequence[int], tokens: Mapping[str, int], tokenizer: Tokenizer) -> None:
        """Break what was spelt.

        Args:
            text: what the model said, or the begin of it.
            ids: what it sampled, from the begin of the text on.
            tokens: the control tokens that count.
            tokenizer: what makes text of ids.
        """
        self.text = text
        """The text as a reader should see it."""
        self._healer: SpelledTokenStream | None = None
        if any(text.count(name) > ids.count(token_id) for name, token_id in tokens.items()):
            self._healer = SpelledTokenStream(tokens, _free_sign(text))
            self.text = "".join(_broken(self._healer, text, ids, tokenizer))

    def restored(self, value: Any) -> Any:
        """A value that was read from `text`, with its names whole again."""
        return value if self._healer is None else self._healer.restored(value)

    def restored_call(self, call: ToolCall) -> ToolCall:
        """The same for a call, whose error may quote the text."""
        return call if self._healer is None else self._healer.restored_call(call)


class SpelledTokenStream:
    """The same for a text that comes in pieces, each that of one id."""

    def __init__(self, tokens: Mapping[str, int], sign: str = _NONCHARACTERS[0]) -> None:
        """Begin a text in which these control tokens count, and `sign` breaks what is spelt."""
        self._names = {token_id: name for name, token_id in tokens.items()}
        self._longest = max(map(len, tokens), default=0)
        self._sign = sign
        self._tail = ""
        self._broken = False  # names, or the text has the sign itself

    def feed(self, piece: str, token_id: int) -> str:
        """The piece that an id completed as a reader should see it."""
        name = self._names.get(token_id, "")
        if not piece or not self._names:
            return piece
        spelt, self._tail = self._unspelt(piece[: len(piece) - len(name)]), "" if name else self._tail
        return spelt + name

    def restored(self, value: Any) -> Any:
        """A value that was read, with its names whole again."""
        return _healed(value, self._sign) if self._broken else value

    def restored_call(self, call: ToolCall) -> ToolCall:
        """The same for a call, whose error may quote the text."""
        if not self._broken:
            return call
        quoted = re.escape(repr(self._sign)[1:-1])
        error = call.error and self.restored(_once(call.error, quoted))
        return ToolCall(call.id, self.restored(call.name), self.restored(call.arguments), error=error)

    def _unspelt(self, piece: str) -> str:
        """The piece with its last character set apart where it completes a name."""
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
    """The text piece by piece, which the ids may go on behind."""
    decoder, left = IncrementalDecoder(tokenizer), len(text)
    for token_id in ids:
        piece = decoder.feed([token_id])
        # Of an id that is not whole in the text only letters are left.
        yield spelling.feed(piece[:left], token_id if len(piece) <= left else -1)
        left = max(0, left - len(piece))
    yield spelling.feed(decoder.finish()[:left], -1)


def _free_sign(text: str) -> str:
    """One that the text has not, as it is or escaped."""
    low = text.lower()
    return next(
        (sign for sign in _NONCHARACTERS if sign not in text and f"{ord(sign):x}" not in low), _NONCHARACTERS[0]
    )


def _once(text: str, sign: str) -> str:
    """The text with every two of the signs as one, and without those that stand alone."""
    return re.sub(f"{sign}({sign})?", lambda match: match[1] or "", text)


def _healed(value: Any, sign: str) -> Any:
    if isinstance(value, str):
        return _once(value, sign)
    if isinstance(value, Mapping):
        return {_healed(key, sign): _healed(each, sign) for key, each in value.items()}
    return [_healed(each, sign) for each in value] if isinstance(value, list) else value
