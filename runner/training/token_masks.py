"""Token masks: the allowed ids of each position, packed as in xgrammar; and the masks that turns recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from runner.errors import BadBatch

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from runner.tokens.side_data import SamplingMasks
    from runner.training.packing import Layout
    from runner.training.rows import TrainingRow
    from runner.training.tree import LossTerms
    from runner.trajectory import Turn

__all__ = ["UNCONSTRAINED_INDEX", "WORD_BITS", "MaskTable", "RecordedMasks", "TokenMasks"]

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
        """Return the masks of the positions that a numpy index or a boolean array selects; the table is shared."""
        chosen = np.asarray(where)
        # numpy converts an empty list to floats, which cannot be an index.
        chosen = chosen if chosen.dtype == np.bool_ else chosen.astype(np.int64)
        return TokenMasks(self.table, self.index[chosen], self.vocabulary)

    @property
    def allowed(self) -> NDArray[np.int64]:
        """Number of allowed ids of each position, in the shape of `index`."""
        counts = np.unpackbits(self.table.view(np.uint8), axis=1).sum(axis=1, dtype=np.int64)
        # The index -1, `UNCONSTRAINED_INDEX`, selects the last item.
        return np.append(counts, self.vocabulary).take(self.index, mode="wrap")

    @property
    def forced(self) -> NDArray[np.bool_]:
        """True if exactly one id is allowed: its log-probability is 0, without a gradient."""
        return np.equal(self.allowed, 1)

    def unpacked(self) -> NDArray[np.bool_]:
        """Return one truth value per id, shape [*index.shape, vocabulary]. The result is large."""
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
        """Add a mask, shape [1, words], if it is new, and return its index. Bits past the vocabulary are cleared."""
        mask[0, -1] &= self._last_word
        return self._rows.setdefault(mask.tobytes(), len(self._rows))

    def array(self) -> NDArray[np.int32]:
        """Return the table of masks, shape [distinct, words], int32."""
        return np.frombuffer(b"".join(self._rows), dtype=np.int32).reshape(-1, self.words)


class RecordedMasks:
    """Token masks of turns whose engine returned the ids that could be sampled, `turn.sampling_masks`.

    These masks also exclude the ids that a grammar excluded. `GrammarMasks` uses them too, and computes the masks of
    other constrained turns. A mask has one bit for each id of the vocabulary, and truncated positions rarely have equal
    masks: 150,000 ids are 19 kB for each position.

    Args:
        vocabulary: number of logits.
    """

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        """Number of logits."""

    def masks_of(self, turn: Turn) -> TokenMasks | None:
        """Return the mask of each sampled id of a turn, including the stop id; None for a turn without masks.

        Raises:
            BadBatch: an id is not allowed by its mask, the constraint cannot be compiled, or a constrained turn has no
                masks; the message names the turn.
        """
        table = MaskTable(self.vocabulary)
        index = self._turn_index(turn, table, f"turn {turn.agent}/{turn.number}")
        return None if index is None else TokenMasks(table.array(), index, self.vocabulary)

    def masks_for_row(self, row: TrainingRow) -> TokenMasks:
        """Return the mask of each position of a row; `index` has the row's length. Errors are as for `masks_of`."""
        return self.masks_for_rows([row])[0]

    def masks_for_rows(self, rows: Sequence[TrainingRow]) -> list[TokenMasks]:
        """Return the masks of several rows with one shared table.

        Their `index` can be padded or packed like any array. Errors are as for `masks_of`.
        """
        table = MaskTable(self.vocabulary)
        indices = [self._row_index(row, table) for row in rows]
        shared = table.array()
        return [TokenMasks(shared, index, self.vocabulary) for index in indices]

    def masks_for(self, rows: Sequence[TrainingRow], layout: Layout) -> TokenMasks:
        """Return the mask of each position of a batch, `masks_for(batch.rows, batch.layout)`.

        Errors are as for `masks_of`.

        Args:
            rows: the rows of the batch.
            layout: the layout of the batch; `index` has its shape, [sequences, length].
        """
        table = MaskTable(self.vocabulary)
        index = layout.fill((self._row_index(row, table) for row in rows), UNCONSTRAINED_INDEX, np.int32)
        return TokenMasks(table.array(), index, self.vocabulary)

    def masks_for_terms(self, rows: Sequence[TrainingRow], terms: LossTerms) -> TokenMasks:
        """Return the mask of each term of a tree of `rows`; `index` has the shape [terms].

        Errors are as for `masks_of`.
        """
        table = MaskTable(self.vocabulary)
        indices = {int(row): self._row_index(rows[row], table) for row in np.unique(terms.row)}
        index = [indices[row][position] for row, position in zip(terms.row, terms.position, strict=True)]
        return TokenMasks(table.array(), np.array(index, dtype=np.int32), self.vocabulary)

    def _row_index(self, row: TrainingRow, table: MaskTable) -> NDArray[np.int32]:
        index = np.full(len(row), UNCONSTRAINED_INDEX, dtype=np.int32)
        for turn in row.turns:
            trained = row.loss_mask[turn.start : turn.end]
            if trained.any():
                of_turn = self._turn_index(turn, table, f"{row.trajectory.id}/{turn.agent}/{turn.number}")
                if of_turn is not None:
                    index[turn.start : turn.end] = np.where(trained, of_turn, UNCONSTRAINED_INDEX)
        return index

    def _turn_index(self, turn: Turn, table: MaskTable, name: str) -> NDArray[np.int32] | None:
        """Return the index of the mask of each sampled id; None for a turn without masks."""
        if turn.sampling_masks is not None:
            return self._recorded(turn, turn.sampling_masks, table, name)
        if turn.constraint is None:
            return None
        raise BadBatch(
            f"{name} was sampled under a grammar and has no sampling masks: use GrammarMasks instead of RecordedMasks."
        )

    def _recorded(self, turn: Turn, masks: SamplingMasks, table: MaskTable, name: str) -> NDArray[np.int32]:
        index = np.full(turn.end - turn.start, UNCONSTRAINED_INDEX, dtype=np.int32)
        for position, (token_id, allowed) in enumerate(zip(turn.token_ids, masks.rows(), strict=True)):
            ids = np.asarray(allowed, np.int64)
            if token_id not in allowed or ids.min() < 0 or ids.max() >= self.vocabulary:
                raise BadBatch(
                    f"{name}: at sampled id {position} (the first is 0), the sampling mask lacks the sampled id "
                    f"{token_id}, or has ids outside the vocabulary, 0 to {self.vocabulary - 1}. Give vocabulary= of "
                    "the model that sampled the turn, or leave the turn out."
                )
            bits = np.zeros(table.words * WORD_BITS, np.bool_)
            bits[ids] = True
            index[position] = table.add(np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)[None])
        return index
