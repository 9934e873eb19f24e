"""Detection of possible ends of calls in a text that arrives in pieces; each character is examined once."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Final

__all__ = ["EndDetector", "RereadBudget", "partial_mark_length"]

_BRACKETS: Final = r"""["'\[\](){}]"""
_IN_QUOTES: Final = {quote: re.compile(rf"[{quote}\\]") for quote in "'\""}


class EndDetector:
    """Search for the marks that end calls or, without marks, for the bracket that closes the first call.

    A found end is only a position at which the reader should try to read a call.
    """

    def __init__(self, marks: Sequence[str], *, quoted: bool) -> None:
        """Search for any of `marks`; if `quoted`, only outside of strings."""
        self._marks = tuple(marks)
        self._quoted = quoted
        self._pattern = _pattern(self._marks, quoted)
        self._quote = ""
        self._escaped = False
        self._depth = 0
        self._kept = ""  # possible beginning of a mark

    def feed(self, text: str) -> int | None:
        """Return the position in `text` after the first end, or None. After an end, feed the rest of `text` again."""
        text, before = self._kept + text, len(self._kept)
        begun = partial_mark_length(text, self._marks)
        end = len(text) - begun
        at = 0
        while at < end:
            at = self._after_quote(text, at, end) if self._quote else self._next(text, at, end)
            if at < 0:
                self._kept = ""
                return -at - before
        self._kept = text[end:]
        return None

    def _next(self, text: str, at: int, end: int) -> int:
        """Return the position after the next relevant character, as a negative number if it completes an end."""
        found = self._pattern.search(text, at, end)
        if found is None:
            return end
        sign = found[0]
        if sign in self._marks:
            return -found.end()
        if sign in _IN_QUOTES:
            self._quote = sign
        elif sign in "[({":
            self._depth += 1
        else:
            self._depth -= 1
            if not self._marks and self._depth <= 0:
                return -found.end()
        return found.end()

    def _after_quote(self, text: str, at: int, end: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        found = _IN_QUOTES[self._quote].search(text, at, end)
        if found is None:
            return end
        if found[0] == "\\":
            self._escaped = True
        else:
            self._quote = ""
        return found.end()


@functools.cache
def _pattern(marks: Sequence[str], quoted: bool) -> re.Pattern[str]:
    signs = [re.escape(mark) for mark in sorted(marks, key=len, reverse=True)]
    return re.compile("|".join([*signs, _BRACKETS] if quoted or not signs else signs))


class RereadBudget:
    """Limit on how often a growing text is read again, so that the total time stays linear."""

    FREE_LENGTH: Final = 4096
    """Number of characters that may be read without success in addition to the length of the text."""
    SHORT_LENGTH: Final = 512
    """Maximum number of characters of a text that may be read at an unlikely end."""

    def __init__(self) -> None:
        """Start a budget with nothing read."""
        self._read = 0

    def allows(self, length: int, *, likely: bool = True) -> bool:
        """Return whether `length` characters may be read now; otherwise the reader waits for more text or the end.

        `likely` is False if a call probably does not end at the end of the text.
        """
        return self._read <= length + self.FREE_LENGTH and (likely or length <= self.SHORT_LENGTH)

    def spend(self, length: int) -> None:
        """Record that this many characters were read without success."""
        self._read += length

    def renew(self) -> None:
        """Record a successful read."""
        self._read = 0


def partial_mark_length(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of one of `marks`."""
    longest = 0
    for mark in marks:
        at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
        while at >= 0:
            if mark.startswith(text[at:]):
                longest = max(longest, len(text) - at)
                break
            at = text.find(mark[0], at + 1)
    return longest
