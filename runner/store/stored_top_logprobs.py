"""The top log-probabilities of a stored trajectory, read from its run file on first use."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, MutableMapping
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any

from runner.errors import RunFileError
from runner.store.database import open_reader, storage_faults
from runner.store.packing import pack, unpack
from runner.tokens.top_logprobs import TopLogprobs

__all__ = ["StoredTopLogprobs", "top_values"]

_READ = """
    SELECT turns.start, turns.end, top_logprobs.*
    FROM top_logprobs JOIN turns USING (episode, position)
    WHERE top_logprobs.episode = ? AND turns.segment = ?
"""


def top_values(top: TopLogprobs) -> list[Any]:
    """The values of the columns of `TOP_LOGPROBS` after the key."""
    return [top.count, pack(top.ids), pack(top.logprobs)]


class StoredTopLogprobs(MutableMapping[int, TopLogprobs]):
    """The top log-probabilities of one segment, by the index of a turn's first sampled id.

    They are read lazily, since they are much larger than the rest of a trajectory and rarely used.
    """

    def __init__(self, path: Path, episode: int, segment: int) -> None:
        self._path = path
        self._episode = episode
        self._segment = segment

    @cached_property
    def _read(self) -> dict[int, TopLogprobs]:
        # With a new connection: the reader's may be closed, or belong to another thread.
        with storage_faults(self._path), closing(open_reader(self._path)) as connection:
            rows = connection.execute(_READ, (self._episode, self._segment)).fetchall()
        return {row["start"]: self._top(row) for row in rows}

    def _top(self, row: sqlite3.Row) -> TopLogprobs:
        positions, count = row["end"] - row["start"], row["count"]
        lengths = len(row["ids"]), len(row["logprobs"])
        if not isinstance(count, int) or lengths != (4 * positions * count,) * 2:
            raise RunFileError(
                f"run file {self._path}: the top log-probabilities of a turn are damaged: {lengths[0]} and "
                f"{lengths[1]} bytes for {positions} positions of {count}. Play the episode again with another file."
            )
        return TopLogprobs(count, unpack("i", row["ids"]), unpack("f", row["logprobs"]))

    def __getitem__(self, start: int) -> TopLogprobs:
        return self._read[start]

    def __setitem__(self, start: int, top: TopLogprobs) -> None:
        self._read[start] = top

    def __delitem__(self, start: int) -> None:
        del self._read[start]

    def __iter__(self) -> Iterator[int]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)
