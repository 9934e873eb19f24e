"""Deltas of a scripted reply that are cut inside a multi-byte character or a marker."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

from runner.errors import BadOption
from runner.tokens.tokenizer import Tokenizer

__all__ = ["Inside", "inside"]

_MULTIBYTE: Final = rb"[\xc2-\xf4][\x80-\xbf]+"
"""A character of several bytes in UTF-8."""


@dataclass(frozen=True, slots=True)
class Inside:
    """Chunks that cut a reply in the middle of a piece of its text; created by `inside`."""

    piece: str
    """The text; "" stands for every multi-byte character."""

    def sizes(self, ids: Sequence[int], tokenizer: Tokenizer) -> tuple[int, ...]:
        """The number of ids of each delta, so that a delta ends inside every occurrence that consists of several ids.

        Raises:
            BadOption: the piece does not occur, or every occurrence is a single id.
        """
        said, ends = _bytes_and_ends(ids, tokenizer)
        pattern = re.escape(self.piece.encode()) if self.piece else _MULTIBYTE
        found = [match.span() for match in re.finditer(pattern, said)]
        cuts = [cut for start, end in found if (cut := _middle_cut(ends, start, end)) is not None]
        if not found:
            what = repr(self.piece) if self.piece else "a multi-byte character"
            text = tokenizer.decode(ids)
            raise BadOption(
                f"inside({self.piece!r}): {what} does not occur in {text!r:.60}: name a piece of the reply."
            )
        if not cuts:
            raise BadOption(
                f"inside({self.piece!r}): the piece is a single token id in this vocabulary, and an id cannot be cut: "
                f"name a longer piece, or use byte_tokenizer, where every byte is an id."
            )
        # The last size includes a stop id, so that the sizes are not repeated.
        borders = [0, *sorted(set(cuts)), len(ids) + 1]
        return tuple(after - before for before, after in pairwise(borders))


def inside(piece: str = "") -> Inside:
    """Cut the deltas of a reply inside every occurrence of `piece`: `say("...", chunks=inside("<think>"))`.

    Args:
        piece: a marker, a word or a character; by default every multi-byte character.

    Raises:
        BadOption: `piece` is not a string.
    """
    __tracebackhide__ = True
    if not isinstance(piece, str):
        raise BadOption(f"inside({piece!r:.60}): give a piece of the text, such as '<think>' or 'é'.")
    return Inside(piece)


def _bytes_and_ends(ids: Sequence[int], tokenizer: Tokenizer) -> tuple[bytes, list[int]]:
    """The bytes of the ids, and the end of each id in bytes."""
    pieces = tokenizer.pieces
    if pieces is None:
        return tokenizer.decode(ids).encode(), [
            len(tokenizer.decode(ids[:count]).encode()) for count in range(1, len(ids) + 1)
        ]
    parts = [pieces[token_id] if token_id < len(pieces) else b"" for token_id in ids]
    return b"".join(parts), list(accumulate(map(len, parts)))


def _middle_cut(ends: Sequence[int], start: int, end: int) -> int | None:
    """The number of ids before the cut closest to the middle of these bytes; None if no id ends inside them."""
    inner = [index + 1 for index, position in enumerate(ends) if start < position < end]
    return min(inner, key=lambda count: abs(ends[count - 1] - (start + end) / 2), default=None)
