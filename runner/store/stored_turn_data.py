"""Large data of the turns of a stored trajectory, read from its run file on first use."""

from __future__ import annotations

import sqlite3
from abc import abstractmethod
from collections.abc import Iterator, MutableMapping
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

from runner.errors import RunFileError
from runner.store.database import open_reader, storage_faults
from runner.store.packing import pack, unpack
from runner.tokens.side_data import RoutedExperts, SamplingMasks, SideData
from runner.tokens.top_logprobs import TopLogprobs

__all__ = ["StoredSideData", "StoredTopLogprobs", "side_values", "top_values"]

T = TypeVar("T")


def top_values(top: TopLogprobs) -> list[Any]:
    """The values of the columns of `TOP_LOGPROBS` after the key."""
    return [top.count, pack(top.ids), pack(top.logprobs)]


def side_values(masks: SamplingMasks | None, experts: RoutedExperts | None) -> list[Any]:
    """The values of the columns of `SIDE_DATA` after the key."""
    of_masks = [None, None] if masks is None else [pack(masks.counts), pack(masks.ids)]
    if experts is None:
        return [*of_masks, None, None, None, None]
    return [*of_masks, experts.start, experts.layers, experts.top, pack(experts.experts)]


class _StoredTurnData(MutableMapping[int, T]):
    """Data of the turns of one segment, by the index of a turn's first sampled id.

    The data is read from the file on first use, since it is much larger than the rest of a trajectory and rarely used.
    """

    table: ClassVar[str]
    what: ClassVar[str]

    def __init__(self, path: Path, episode: int, segment: int) -> None:
        self._path = path
        self._episode = episode
        self._segment = segment

    @cached_property
    def _read(self) -> dict[int, T]:
        query = (
            f"SELECT turns.start, turns.end, {self.table}.* FROM {self.table} JOIN turns USING (episode, position) "
            f"WHERE {self.table}.episode = ? AND turns.segment = ? ORDER BY turns.start"
        )
        # This read opens a new connection, since the reader's connection may be closed, or belong to another thread.
        with storage_faults(self._path), closing(open_reader(self._path)) as connection:
            rows = connection.execute(query, (self._episode, self._segment)).fetchall()
        return {row["start"]: self._value(row) for row in rows}

    @abstractmethod
    def _value(self, row: sqlite3.Row) -> T:
        """Return the data of a row.

        Raises:
            RunFileError: the row is damaged.
        """

    def _damaged(self, problem: str) -> NoReturn:
        raise RunFileError(
            f"run file {self._path}: the {self.what} of a turn are damaged: {problem}. "
            "Play the episode again with another file."
        )

    def __getitem__(self, start: int) -> T:
        return self._read[start]

    def __setitem__(self, start: int, value: T) -> None:
        self._read[start] = value

    def __delitem__(self, start: int) -> None:
        del self._read[start]

    def __iter__(self) -> Iterator[int]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


class StoredTopLogprobs(_StoredTurnData[TopLogprobs]):
    """The top log-probabilities of one segment, by the index of a turn's first sampled id."""

    table = "top_logprobs"
    what = "top log-probabilities"

    def _value(self, row: sqlite3.Row) -> TopLogprobs:
        positions, count = row["end"] - row["start"], row["count"]
        lengths = len(row["ids"]), len(row["logprobs"])
        if not isinstance(count, int) or lengths != (4 * positions * count,) * 2:
            self._damaged(f"{lengths[0]} and {lengths[1]} bytes for {positions} positions of {count}")
        return TopLogprobs(count, unpack("i", row["ids"]), unpack("f", row["logprobs"]))


class StoredSideData(_StoredTurnData[SideData]):
    """The sampling masks and routed experts of one segment, by the index of a turn's first sampled id."""

    table = "side_data"
    what = "sampling masks or routed experts"

    def _value(self, row: sqlite3.Row) -> SideData:
        return SideData(self._masks(row), self._experts(row))

    def _masks(self, row: sqlite3.Row) -> SamplingMasks | None:
        counts, ids, positions = row["mask_counts"], row["mask_ids"], row["end"] - row["start"]
        if counts is None:
            return None
        if len(counts) != 4 * positions or ids is None or len(ids) != 4 * sum(unpack("i", counts)):
            self._damaged(f"{len(counts)} bytes of counts and {len(ids or b'')} of ids for {positions} positions")
        return SamplingMasks(unpack("i", counts), unpack("i", ids))

    def _experts(self, row: sqlite3.Row) -> RoutedExperts | None:
        first, layers, top, experts = row["first"], row["layers"], row["top"], row["experts"]
        if experts is None:
            return None
        whole = all(isinstance(each, int) for each in (first, layers, top)) and layers * top > 0
        if not whole or len(experts) % (2 * layers * top) or first + len(experts) // (2 * layers * top) > row["end"]:
            self._damaged(f"{len(experts)} bytes of experts from position {first}, in {layers} layers of {top}")
        return RoutedExperts(first, layers, top, unpack("h", experts))
