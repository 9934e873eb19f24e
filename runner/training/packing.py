"""Layout of rows in a batch: one padded row per sequence, or several packed by first-fit decreasing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from runner.checked import whole
from runner.errors import BadOption

__all__ = ["Layout"]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Layout of rows of different lengths in arrays of shape [sequences, length]; rows are never cut or wrapped."""

    sequences: int
    """Number of sequences."""
    length: int
    """Length of each sequence, in ids."""
    lengths: NDArray[np.int64]
    """Lengths of the rows, in the given order, shape [rows], int64."""
    starts: NDArray[np.int64]
    """Index of the first id of each row in the flattened array, shape [rows], int64."""

    @classmethod
    def padded(cls, lengths: Sequence[int], *, length: int | None = None, multiple_of: int = 1) -> Layout:
        """Lay out one row per sequence.

        Args:
            lengths: lengths of the rows.
            length: length of the sequences; by default the length of the longest row.
            multiple_of: the length is rounded up to a multiple of this number.

        Raises:
            BadOption: a number is below 1, or a row is longer than the length.
        """
        whole(f"multiple_of={multiple_of!r}", multiple_of, least=1)
        longest = max(lengths, default=0)
        if length is None:
            length = longest
        else:
            whole(f"length={length!r}", length, least=1)
        length = -(-length // multiple_of) * multiple_of
        _fits(longest, length)
        return cls(len(lengths), length, _int64(lengths), np.arange(len(lengths), dtype=np.int64) * length)

    @classmethod
    def packed(cls, lengths: Sequence[int], *, length: int) -> Layout:
        """Put each row, longest first, into the first sequence with room.

        Rows of equal length keep their order, so the same rows are always packed in the same way.

        Raises:
            BadOption: the length is below 1, or a row is longer than it.
        """
        whole(f"length={length!r}", length, least=1)
        _fits(max(lengths, default=0), length)
        room = np.full(len(lengths), length, dtype=np.int64)  # there are at most as many sequences as rows
        starts = np.zeros(len(lengths), dtype=np.int64)
        used = 0
        for row in np.argsort(-_int64(lengths), kind="stable"):
            sequence = int(np.argmax(room[: used + 1] >= lengths[row]))
            used = max(used, sequence + 1)
            starts[row] = (sequence + 1) * length - room[sequence]
            room[sequence] -= lengths[row]
        return cls(used, length, _int64(lengths), starts)

    def fill(self, values: Iterable[NDArray[Any]], empty: Any, dtype: DTypeLike) -> NDArray[Any]:
        """Combine the rows into one array.

        Args:
            values: an array of shape [length of the row, ...] for each row.
            empty: value of the padding.
            dtype: type of the result.

        Returns:
            Shape [sequences, length, ...].
        """
        flat: NDArray[Any] | None = None
        for start, length, row in zip(self.starts, self.lengths, values, strict=True):
            if flat is None:
                flat = np.full((self.sequences * self.length, *row.shape[1:]), empty, dtype)
            flat[start : start + length] = row
        if flat is None:
            flat = np.full(self.sequences * self.length, empty, dtype)
        return flat.reshape(self.sequences, self.length, *flat.shape[1:])

    def split(self, array: Any) -> list[Any]:
        """Split an array or tensor of shape [sequences, length, ...] into rows."""
        flat = array.reshape(self.sequences * self.length, *array.shape[2:])
        return [flat[start : start + length] for start, length in zip(self.starts, self.lengths, strict=True)]

    def segment_ids(self) -> NDArray[np.int32]:
        """Return 1 + the index of each position's row, and 0 for padding; shape [sequences, length]."""
        rows = (np.int32(row + 1) for row in range(len(self.lengths)))
        return self.fill((np.full(n, row) for n, row in zip(self.lengths, rows, strict=True)), 0, np.int32)

    def position_ids(self) -> NDArray[np.int32]:
        """Return the position of each id in its row, from 0; shape [sequences, length], int32.

        The padding at the end of each sequence also counts from 0.
        """
        flat = np.arange(self.sequences * self.length, dtype=np.int64)
        begins = np.zeros_like(flat)
        for edges in (self.starts, self.starts + self.lengths):
            inside = edges[edges < len(flat)]  # without padding, the last row ends at len(flat), outside of the array
            begins[inside] = inside
        begins[:: self.length or 1] = flat[:: self.length or 1]
        positions: NDArray[np.int32] = (flat - np.maximum.accumulate(begins)).astype(np.int32)
        return positions.reshape(self.sequences, self.length)


def _int64(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.asarray(lengths, dtype=np.int64).reshape(-1)


def _fits(longest: int, length: int) -> None:
    if longest > length:
        raise BadOption(f"a row of {longest} ids does not fit into length={length}: give at least length={longest}.")
