"""Tells where calls may have ended in a text that comes in pieces, and looks at each of its signs once."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Final

__all__ = ["EndDetector", "RereadBudget", "partial_mark_length"]

_BRACKETS: Final = r"""["'\[\](){}]"""
_IN_QUOTES: Final = {quote: re.compile(rf"[{quote}\\]") for quote in "'\""}


class EndDetector:
    """Looks for the marks that end calls, or where there are none, for the bracket that closes the first one.

    What it finds is a position to read from, and no proof: a reader decides.
    """

    def __init__(self, marks: Sequence[str], *, quoted: bool) -> None:
        """Look for any of `marks`; where strings are `quoted`, not inside of them."""
        self._marks = tuple(marks)
        self._quoted = quoted
        self._pattern = _pattern(self._marks, quoted)
        self._quote = ""
        self._escaped = False
        self._depth = 0
        self._kept = ""  # what may begin a mark

    def feed(self, text: str) -> int | None:
        """Where in `text` an end is, with which the next piece has to begin; None where it has none."""
        text, before = self._kept + text, len(self._kept)
        begun = partial_mark_length(text, self._marks)
        end = len(text) - begun
        at = 0
        while at < end:
            at = self._behind_quote(text, at, end) if self._quote else self._next(text, at, end)
            if at < 0:
                self._kept = ""
                return -at - before
        self._kept = text[end:]
        return None

    def _next(self, text: str, at: int, end: int) -> int:
        """Behind the next sign that counts; negative where it is an end."""
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

    def _behind_quote(self, text: str, at: int, end: int) -> int:
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
    """Lets a text be read again and again as it grows, in time that is linear all the same."""

    FREE: Final = 4096
    """Signs that may be read in vain besides."""
    LONG: Final = 512
    """Texts up to this length are read wherever they may end."""

    def __init__(self) -> None:
        """Nothing was read yet."""
        self._read = 0

    def allows(self, length: int, *, likely: bool = True) -> bool:
        """Whether `length` signs may be read; where not, a reader waits for more of them, or for the end."""
        return self._read <= length + self.FREE and (likely or length <= self.LONG)

    def spend(self, length: int) -> None:
        """Note that so many signs were read in vain."""
        self._read += length

    def renew(self) -> None:
        """Note that a reading was not in vain."""
        self._read = 0


def partial_mark_length(text: str, marks: Sequence[str]) -> int:
    """How long the longest end of `text` is that begins one of `marks` without being it."""
    longest = 0
    for mark in marks:
        at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
        while at >= 0:
            if mark.startswith(text[at:]):
                longest = max(longest, len(text) - at)
                break
            at = text.find(mark[0], at + 1)
    return longest
