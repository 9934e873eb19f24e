"""Filler: meaningless letters that replace the texts of other people in recordings, at the same length.

In a file, filler is written as a mark. «7:12» is the first twelve characters of filler 7, and «7:12^» is the same with
a capital. Expanded filler has no vowels, so it contains no word.
"""

from __future__ import annotations

import re
from typing import Any, Final

__all__ = ["LETTERS", "MARK", "expanded", "filler"]

MARK: Final = re.compile(r"«(\d+):(\d+)(\^?)»")
"""A mark: the number of the filler, its length, and whether it begins with a capital."""

LETTERS: Final = "bcdfghjklmnpqrstvwxz"

_FIRST_WORD_LENGTH: Final = 24
"""Characters before the first full stop: names of tools contain only letters."""

_WORD_LENGTH: Final = 6
"""Characters from one full stop to the next."""


def filler(number: int, length: int) -> str:
    """The first characters of a filler. Two fillers with different numbers differ within the first few letters."""
    letters, rest, state = list[str](), number, number * 7919 + 17
    for place in range(length):
        rest, digit = divmod(rest, len(LETTERS))
        state = (state * 1_103_515_245 + 12_345) % 2**31
        if place >= _FIRST_WORD_LENGTH and place % _WORD_LENGTH == 0:
            letters.append(".")
        else:
            # The number is written first, and it is the seed of the letters that follow.
            letters.append(LETTERS[digit if rest or digit else (state >> 16) % len(LETTERS)])
    return "".join(letters)


def expanded(value: Any) -> Any:
    """A recorded value, with filler in place of its marks."""
    match value:
        case dict():
            return {expanded(key): expanded(each) for key, each in value.items()}
        case list():
            return [expanded(each) for each in value]
        case str():
            return MARK.sub(_written, value)
        case _:
            return value


def _written(mark: re.Match[str]) -> str:
    text = filler(int(mark[1]), int(mark[2]))
    return text.capitalize() if mark[3] else text
