"""CutPoints: text cut where a format may be cut, so that no literal of a format ends inside a tag or a word."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

__all__ = ["CutPoints"]

_TAG: Final = r"<[^<>\s]{1,60}>|\[/?[A-Z_]{3,}\]"
_REST: Final = r"\w+|\s+|[^\w\s]"


@dataclass(frozen=True)  # without slots, since the pattern is kept in it
class CutPoints:
    """Cuts text into control tokens, tags, words, runs of white space and single signs."""

    tokens: frozenset[str] = frozenset()
    """The control tokens of a vocabulary, each one mark whatever it looks like."""

    def split(self, text: str) -> list[str]:
        """The marks of `text`, in order; joined they are `text`."""
        return self._pattern.findall(text)

    def is_tag(self, mark: str) -> bool:
        """The mark is a control token or looks like a tag, so that no prose has it by chance."""
        return mark in self.tokens or _TAG_ONLY.fullmatch(mark) is not None

    def common_prefix(self, texts: Iterable[str]) -> str:
        """What all of `texts` begin with, cut at a mark of all of them."""
        return "".join(_shared([self.split(text) for text in texts]))

    def common_suffix(self, texts: Iterable[str]) -> str:
        """What all of `texts` end with, cut at a mark of all of them."""
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
