"""Filler: letters that mean nothing, which stand in recordings for texts of other people and are as long as those were.

In a file filler is a mark: «7:12» is the begin of the seventh one, twelve characters of it, and «7:12^» the same with a
capital. Expanded, it has no vowels, so that no word is among it.
"""

from __future__ import annotations

import re
from typing import Any, Final

__all__ = ["LETTERS", "MARK", "expanded", "filler"]

MARK: Final = re.compile(r"«(\d+):(\d+)(\^?)»")
"""A mark: the number of the filler, its length, and whether it begins with a capital."""

LETTERS: Final = "bcdfghjklmnpqrstvwxz"

_WHOLE: Final = 24
"""So many letters stand together at first: names of tools are of letters alone."""

_WORD: Final = 6
"""The letters of a word after that."""


def filler(number: int, length: int) -> str:
    """The first characters of a filler; those of different numbers differ from the first few letters on."""
    letters, rest, state = list[str](), number, number * 7919 + 17
    for place in range(length):
        rest, digit = divmod(rest, len(LETTERS))
        state = (state * 1_103_515_245 + 12_345) % 2**31
        if place >= _WHOLE and place % _WORD == 0:
            letters.append(".")
        else:
            # The number itself comes first, and what follows is drawn by it.
            letters.append(LETTERS[digit if rest or digit else (state >> 16) % len(LETTERS)])
    return "".join(letters)


def expanded(value: Any) -> Any:
    """A recorded value with filler in the place of its marks."""
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
