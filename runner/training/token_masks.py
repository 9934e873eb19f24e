"""Token masks: which ids could be sampled at each position, packed as xgrammar packs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = ["UNCONSTRAINED_INDEX", "WORD_BITS", "MaskTable", "TokenMasks"]

UNCONSTRAINED_INDEX = -1
"""The index of a position where every id was allowed."""

WORD_BITS = 32
"""The number of ids in one word of a packed mask."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """The ids that could be sampled at each position; every distinct mask is kept once."""

    table: NDArray[np.int32]
    """The distinct masks, shape [distinct, ceil(vocabulary / 32)], int32.

    Bit `id % 32` of word `id // 32` is set where the id is allowed. Bits past the vocabulary are 0.
    """
    index: NDArray[np.int32]
    """The row of `table` that holds at each position, -1 where every id was allowed; of any shape, int32."""
    vocabulary: int
    """The number of logits."""

    def take(self, where: ArrayLike) -> TokenMasks:
        """The masks of some positions, by an index or a mask as numpy takes it; the table is shared."""
        chosen = np.asarray(where)
        # numpy takes an empty list for floats, which are no index.
        chosen = chosen if chosen.dtype == np.bool_ else chosen.astype(np.int64)
        return TokenMasks(self.table, self.index[chosen], self.vocabulary)

    @property
    def allowed(self) -> NDArray[np.int64]:
        """The number of ids that each position allows, in the shape of `index`."""
        counts = np.unpackbits(self.table.view(np.uint8), axis=1).sum(axis=1, dtype=np.int64)
        return np.append(counts, self.vocabulary).take(
            self.index, mode="wrap"
        )  # -1, UNCONSTRAINED_INDEX, is the last one

    @property
    def forced(self) -> NDArray[np.bool_]:
        """Whether exactly one id is allowed: its log-probability is 0 and nothing can be learnt there."""
        return np.equal(self.allowed, 1)

    def unpacked(self) -> NDArray[np.bool_]:
        """The masks as one truth value for each id, shape [*index.shape, vocabulary]; for few positions."""
        used, index = np.unique(self.index, return_inverse=True)
        everything = np.full((1, self.table.shape[1]), -1, dtype=np.int32)
        packed = np.concatenate([self.table, everything])[used].astype("<i4", copy=False)
        rows = np.unpackbits(packed.view(np.uint8), axis=1, bitorder="little", count=self.vocabulary)
        return rows.view(np.bool_)[index.reshape(self.index.shape)]


class MaskTable:
    """The distinct masks of some positions while they are worked out, in the order of their first use."""

    def __init__(self, vocabulary: int) -> None:
        self.words = -(-vocabulary // WORD_BITS)
        """The number of words in one mask."""
        self._rows: dict[bytes, int] = {}
        padding = self.words * WORD_BITS - vocabulary
        self._last_word = np.uint32((1 << (WORD_BITS - padding)) - 1).view(np.int32)

    def add(self, mask: NDArray[np.int32]) -> int:
        """The index of a mask, shape [1, words]; what it says of ids past the vocabulary is forgotten."""
        mask[0, -1] &= self._last_word
        return self._rows.setdefault(mask.tobytes(), len(self._rows))

    def array(self) -> NDArray[np.int32]:
        """The masks as a table, shape [distinct, words], int32."""
        return np.frombuffer(b"".join(self._rows), dtype=np.int32).reshape(-1, self.words)
