"""Cut points of text: a learnt literal must not end inside a tag or a word."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

__all__ = ["CutPoints"]

_TAG: Final = r"<[^<>\s]{1,60}>|\[/?[A-Z_]{3,}\]"
_REST: Final = r"\w+|\s+|[^\w\s]"


@dataclass(frozen=True)  # no slots: the cached pattern needs a dict
class CutPoints:
    """Splitter of text into control tokens, tags, words, runs of white space and single characters."""

    tokens: frozenset[str] = frozenset()
    """Control tokens of a vocabulary. Each of them is one unit, whatever its characters."""

    def split(self, text: str) -> list[str]:
        """Return the units of `text`, in order; joined they equal `text`."""
        return self._pattern.findall(text)

    def is_tag(self, mark: str) -> bool:
        """Return True if a unit is a control token or looks like a tag, so that prose does not contain it by chance."""
        return mark in self.tokens or _TAG_ONLY.fullmatch(mark) is not None

    def common_prefix(self, texts: Iterable[str]) -> str:
        """Return the longest common prefix of `texts` that ends at the end of a unit in each text."""
        return "".join(_shared([self.split(text) for text in texts]))

    def common_suffix(self, texts: Iterable[str]) -> str:
        """Return the longest common suffix of `texts` that begins at the start of a unit in each text."""
        return "".join(reversed(_shared([self.split(text)[::-1] for text in texts])))

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        tokens = sorted(self.tokens, key=len, reverse=True)
        return re.compile("|".join([*map(re.escape, tokens), _TAG, _REST]))


_TAG_ONLY: Final = re.compile(_TAG)


def _shared(all_marks: list[list[str]]) -> list[str]:
    shared: list[str] = []
    for marks in zip(*all_marks, strict=False):
        if len(set(marks)) > 1:
            break
        shared.append(marks[0])
    return shared
