"""Tells a control token from its name: where a model spelt one with letters it speaks of it, and does not use it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

__all__ = ["Spelling", "StreamedSpelling"]

_NONCHARACTERS: Final = "".join(map(chr, range(0xFDD0, 0xFDF0)))
"""What no text has that is exchanged, so that one of them is free."""


class Spelling:
    """One turn's text with every name of a control token that was spelt broken in two, so that no reader takes it."""

    def __init__(
        self, text: str, ids: Sequence[int], tokens: Mapping[str, int], decode: Callable[[Sequence[int]], str]
    ) -> None:
        """Break what was spelt.

        Args:
            text: what the model said, or the begin of it.
            ids: what it sampled, from the begin of the text on.
            tokens: the control tokens that count.
            decode: the text of ids.
        """
        self.text = text
        """The text as a reader should see it."""
        self._sign = ""
        spelt: list[int] = []
        for name, token_id in tokens.items():
            if text.count(name) > ids.count(token_id):
                spelt += _spelt(text, name, [n for n, each in enumerate(ids) if each == token_id], ids, decode)
        if spelt:
            self._sign = next(sign for sign in _NONCHARACTERS if sign not in text)
            pieces = [text[a:b] for a, b in zip([0, *sorted(spelt)], [*sorted(spelt), len(text)], strict=True)]
            self.text = self._sign.join(pieces)

    def healed(self, value: Any) -> Any:
        """A value that was read from `text`, with its names whole again."""
        return _without(value, self._sign) if self._sign else value

    def healed_error(self, why: str | None) -> str | None:
        """The same for words about the text, which may quote it."""
        return _without_quoted(why, self._sign) if why and self._sign else why


class StreamedSpelling:
    """The same for a text that comes in pieces, each that of one id."""

    SIGN: Final = _NONCHARACTERS[0]

    def __init__(self, tokens: Mapping[str, int]) -> None:
        """Begin a text in which these control tokens count."""
        self._names = {token_id: name for name, token_id in tokens.items()}
        self._longest = max(map(len, tokens), default=0)
        self._tail = ""
        self._broken = False

    def feed(self, piece: str, token_id: int) -> str:
        """The piece that an id completed as a reader should see it."""
        name = self._names.get(token_id, "")
        if not piece or not self._names:
            return piece
        spelt, self._tail = self._unspelt(piece[: len(piece) - len(name)]), "" if name else self._tail
        return spelt + name

    def healed(self, value: Any) -> Any:
        """A value that was read, with its names whole again."""
        return _without(value, self.SIGN) if self._broken else value

    def healed_error(self, why: str | None) -> str | None:
        """The same for words about the text, which may quote it."""
        return _without_quoted(why, self.SIGN) if why and self._broken else why

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
        if not ends:
            return piece
        self._broken = True
        places = sorted(len(piece) + end - 1 for end in ends)
        return self.SIGN.join(piece[a:b] for a, b in zip([0, *places], [*places, len(piece)], strict=True))


def _without(value: Any, sign: str) -> Any:
    if isinstance(value, str):
        return value.replace(sign, "")
    if isinstance(value, Mapping):
        return {_without(key, sign): _without(each, sign) for key, each in value.items()}
    return [_without(each, sign) for each in value] if isinstance(value, list) else value


def _spelt(
    text: str, name: str, sampled: Sequence[int], ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> list[int]:
    """Where to break the text so that only those of the names in it are whole that were sampled as one id."""
    found = [match.start() for match in re.finditer(re.escape(name), text)]
    # The text of some first ids may end inside a character, so the nearest name is meant.
    ends = [len(decode(ids[: index + 1])) - len(name) for index in sampled]
    whole = {min(found, key=lambda at: abs(at - end)) for end in ends}
    return [at + len(name) - 1 for at in found if at not in whole]


def _without_quoted(why: str, sign: str) -> str:
    return why.replace(sign, "").replace(repr(sign)[1:-1], "")
