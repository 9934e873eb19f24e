"""Token masks: the allowed ids of each position, packed as in xgrammar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = ["UNCONSTRAINED_INDEX", "WORD_BITS", "MaskTable", "TokenMasks"]

UNCONSTRAINED_INDEX = -1
"""Index of a position at which every id was allowed."""

WORD_BITS = 32
"""Number of ids in one word of a packed mask."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """Allowed ids of each position; equal masks are stored once."""

    table: NDArray[np.int32]
    """Distinct masks, shape [distinct, ceil(vocabulary / 32)], int32.

    Bit `id % 32` of word `id // 32` is set if the id is allowed. Bits past the vocabulary are 0.
    """
    index: NDArray[np.int32]
    """Row of `table` of each position, -1 if every id was allowed; of any shape, int32."""
    vocabulary: int
    """Number of logits."""

    def take(self, where: ArrayLike) -> TokenMasks:
        """Select the masks of some positions by a numpy index or mask; the table is shared."""
        chosen = np.asarray(where)
        # numpy converts an empty list to floats, which cannot be an index.
        chosen = chosen if chosen.dtype == np.bool_ else chosen.astype(np.int64)
        return TokenMasks(self.table, self.index[chosen], self.vocabulary)

    @property
    def allowed(self) -> NDArray[np.int64]:
        """Number of allowed ids of each position, in the shape of `index`."""
        counts = np.unpackbits(self.table.view(np.uint8), axis=1).sum(axis=1, dtype=np.int64)
        return np.append(counts, self.vocabulary).take(
            self.index, mode="wrap"
        )  # -1, UNCONSTRAINED_INDEX, is the last one

    @property
    def forced(self) -> NDArray[np.bool_]:
        """True if exactly one id is allowed: its log-probability is 0, without a gradient."""
        return np.equal(self.allowed, 1)

    def unpacked(self) -> NDArray[np.bool_]:
        """Return one truth value per id, shape [*index.shape, vocabulary]; large, for few positions."""
        used, index = np.unique(self.index, return_inverse=True)
        everything = np.full((1, self.table.shape[1]), -1, dtype=np.int32)
        packed = np.concatenate([self.table, everything])[used].astype("<i4", copy=False)
        rows = np.unpackbits(packed.view(np.uint8), axis=1, bitorder="little", count=self.vocabulary)
        return rows.view(np.bool_)[index.reshape(self.index.shape)]


class MaskTable:
    """Table of distinct masks under construction, in the order of their first use."""

    def __init__(self, vocabulary: int) -> None:
        self.words = -(-vocabulary // WORD_BITS)
        """Number of words in one mask."""
        self._rows: dict[bytes, int] = {}
        padding = self.words * WORD_BITS - vocabulary
        self._last_word = np.uint32((1 << (WORD_BITS - padding)) - 1).view(np.int32)

    def add(self, mask: NDArray[np.int32]) -> int:
        """Return the index of a mask, shape [1, words]; bits past the vocabulary are cleared."""
        mask[0, -1] &= self._last_word
        return self._rows.setdefault(mask.tobytes(), len(self._rows))

    def array(self) -> NDArray[np.int32]:
        """Return the table of masks, shape [distinct, words], int32."""
        return np.frombuffer(b"".join(self._rows), dtype=np.int32).reshape(-1, self.words)
