"""Transaction batches: conversion of trajectories to rows, and of rows to a few SQL statements."""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Final, TypeAlias

from runner.options import Sampling
from runner.store.codec import (
    attachment_values,
    origin_values,
    request_values,
    segment_values,
    trajectory_values,
    turn_values,
)
from runner.store.columns import Table, encode_text, insertion
from runner.store.json_values import class_name, encode_json
from runner.store.schema import (
    ATTACHMENTS,
    CONSTRAINTS,
    EPISODES,
    REQUESTS,
    SAMPLINGS,
    SEGMENTS,
    SIDE_DATA,
    TASKS,
    TOOLS,
    TOP_LOGPROBS,
    TURNS,
)
from runner.store.stored_tasks import encode_task
from runner.store.stored_turn_data import side_values, top_values
from runner.tasks import Task
from runner.trajectory import Trajectory, Turn

__all__ = ["Packer", "StatementBatch"]

SHARED_ROW_CACHE_SIZE: Final = 4096
"""Maximum number of keys in the cache of a `Packer`."""

Values: TypeAlias = Sequence[Any]
"""A row to insert: a value for each column of its table."""


class StatementBatch:
    """The statements of one transaction."""

    def __init__(self) -> None:
        self.rows: dict[Table, list[Values]] = {}
        self.updates: list[tuple[str, tuple[Any, ...]]] = []
        """Statements with their values, run after all inserts."""

    def insert(self, table: Table, row: Values) -> None:
        """Add a row to insert: a value for each column of `table`, in the order of its columns."""
        self.rows.setdefault(table, []).append(row)

    def update(self, statement: str, *values: Any) -> None:
        """Add a statement that runs after all inserts."""
        self.updates.append((statement, values))

    def absorb(self, other: StatementBatch) -> None:
        """Add the rows and the statements of another batch."""
        for table, rows in other.rows.items():
            self.rows.setdefault(table, []).extend(rows)
        self.updates += other.updates

    def write(self, connection: sqlite3.Connection) -> None:
        """Run the inserts, then the other statements, in the open transaction of the connection."""
        for table, rows in self.rows.items():
            for chunk in _chunks(rows):
                connection.execute(insertion(table, len(chunk)), [value for row in chunk for value in row])
        for statement, given in self.updates:
            connection.execute(statement, given)


_CHUNK_SIZES: Final = (64, 16, 4, 1)
"""The numbers of rows that an insert statement may have, the largest first."""


def _chunks(rows: Sequence[Values]) -> Iterator[Sequence[Values]]:
    """Yield the rows in chunks, one chunk for each statement.

    There are only four sizes of chunks, so that SQLite compiles few statements. Each chunk is as large as possible,
    since each statement releases the interpreter lock, and then waits for the lock if the event loop is busy.
    """
    start = 0
    while start < len(rows):
        size = next(size for size in _CHUNK_SIZES if size <= len(rows) - start)
        yield rows[start : start + size]
        start += size


class Packer:
    """Converter of trajectories to rows.

    Several turns, segments or episodes may share a row, such as their sampling options. A cache has the keys of the
    shared rows that were added before, so most turns add only their own row. If a key was evicted from the cache, its
    row is inserted again, and SQLite ignores the insert.
    """

    def __init__(self, *, next_key: int, launch: int, resumed: bool) -> None:
        self.resumed = resumed
        """True if the file already held this run when it was opened."""
        self._next_key = next_key
        self._launch = launch
        self._written: OrderedDict[Hashable, None] = OrderedDict()
        # Nearly all turns share one `Sampling`. Its encoding, which costs as much as the rest of a row, is kept.
        self._sampled: tuple[Sampling | None, str] = None, ""

    def forget(self) -> None:
        """Clear the cache: after a failed transaction, the file may lack the rows of the cached keys."""
        self._written.clear()

    def add(self, batch: StatementBatch, trajectory: Trajectory, *, superseded: bool) -> None:
        """Add the rows of one trajectory to a batch. `superseded` is True if its attempt will be repeated."""
        key = self._next_key
        self._next_key += 1
        self._add_task(batch, trajectory.task, trajectory.visit)
        written = int(superseded), time.time(), self._launch
        batch.insert(EPISODES, [key, *trajectory_values(trajectory), *written])
        for number, segment in enumerate(trajectory.segments):
            tools = self._refer(batch, TOOLS, "tools", encode_json(segment.tools)) if segment.tools else None
            batch.insert(SEGMENTS, [key, number, *segment_values(segment), *origin_values(segment), tools])
        for position, turn in enumerate(trajectory.turns):
            constrained, sampled = self._constraint(batch, turn), self._sampling(batch, turn)
            batch.insert(TURNS, [key, position, constrained, sampled, *turn_values(turn)])
            if turn.top is not None:
                batch.insert(TOP_LOGPROBS, [key, position, *top_values(turn.top)])
            if turn.log.side_data and (turn.sampling_masks is not None or turn.routed_experts is not None):
                values = side_values(turn.sampling_masks, turn.routed_experts)
                batch.insert(SIDE_DATA, [key, position, *values])
        for request in trajectory.requests:
            batch.insert(REQUESTS, [key, *request_values(request)])
        for number, attachment in enumerate(trajectory.attachments):
            batch.insert(ATTACHMENTS, [key, number, *attachment_values(attachment)])

    def _add_task(self, batch: StatementBatch, task: Task, visit: int) -> None:
        if self._first_time((task.id, visit)):
            batch.insert(TASKS, [encode_text(task.id), visit, class_name(type(task)), encode_task(task), 0])

    def _constraint(self, batch: StatementBatch, turn: Turn) -> int | None:
        constraint = turn.constraint
        if constraint is None:
            return None
        kind = constraint.kind.value
        return self._refer(batch, CONSTRAINTS, kind, kind, constraint.value)

    def _sampling(self, batch: StatementBatch, turn: Turn) -> int | None:
        sampling = turn.sampling
        if sampling is None:
            return None
        if sampling is not self._sampled[0]:
            self._sampled = sampling, encode_json(sampling.given())
        return self._refer(batch, SAMPLINGS, "sampling", self._sampled[1])

    def _refer(self, batch: StatementBatch, table: Table, kind: str, *values: str) -> int:
        """Return the key of a shared row, and add the row if it is not in the cache."""
        key = _key_of(kind, values[-1])
        if self._first_time(key):
            batch.insert(table, [key, *values])
        return key

    def _first_time(self, item: Hashable) -> bool:
        if item in self._written:
            self._written.move_to_end(item)
            return False
        self._written[item] = None
        if len(self._written) > SHARED_ROW_CACHE_SIZE:
            self._written.popitem(last=False)
        return True


def _key_of(kind: str, value: str) -> int:
    """The key of a shared row: a hash of its kind and value, so that no lookup is needed.

    The hash has 63 bits, since SQLite's integers are signed.
    """
    text = f"{kind}:{value}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
