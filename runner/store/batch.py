"""What one transaction writes: trajectories made into rows, and the rows into few statements."""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Final, TypeAlias

from runner.options import Sampling
from runner.store.codec import origin_values, request_values, segment_values, trajectory_values, turn_values
from runner.store.columns import Table, encode_text, insertion
from runner.store.json_values import class_name, encode_json
from runner.store.schema import CONSTRAINTS, EPISODES, REQUESTS, SAMPLINGS, SEGMENTS, TASKS, TOOLS, TOP_LOGPROBS, TURNS
from runner.store.stored_tasks import encode_task
from runner.store.stored_top_logprobs import top_values
from runner.tasks import Task
from runner.trajectory import Trajectory, Turn

__all__ = ["Batch", "Packer"]

REMEMBERED: Final = 4096
"""Shared rows that a packer remembers at most, so that its memory does not follow the run."""

Values: TypeAlias = Sequence[Any]
"""A row to be inserted: a value for each column of its table."""


class Batch:
    """The statements of one transaction."""

    def __init__(self) -> None:
        self.rows: dict[Table, list[Values]] = {}
        """The rows to be inserted, by table."""
        self.updates: list[tuple[str, tuple[Any, ...]]] = []
        """Statements with their values, run when all rows are inserted."""

    def insert(self, table: Table, row: Values) -> None:
        """Add a row: the values of the table's columns, in their order."""
        self.rows.setdefault(table, []).append(row)

    def update(self, statement: str, *values: Any) -> None:
        """Add a statement that is run after all rows are inserted."""
        self.updates.append((statement, values))

    def absorb(self, other: Batch) -> None:
        """Add all that another batch has."""
        for table, rows in other.rows.items():
            self.rows.setdefault(table, []).extend(rows)
        self.updates += other.updates

    def write(self, connection: sqlite3.Connection) -> None:
        """Run the statements, inside of the transaction that is open."""
        for table, rows in self.rows.items():
            for chunk in _chunks(rows):
                connection.execute(insertion(table, len(chunk)), [value for row in chunk for value in row])
        for statement, given in self.updates:
            connection.execute(statement, given)


_CHUNKS: Final = (64, 16, 4, 1)
"""How many rows one statement inserts, the most first."""


def _chunks(rows: Sequence[Values]) -> Iterator[Sequence[Values]]:
    """Rows that go together in one statement, in few sizes so that few statements are compiled.

    Every statement lets go of the interpreter's lock and asks for it again, which a busy event loop answers late.
    """
    start = 0
    while start < len(rows):
        size = next(size for size in _CHUNKS if size <= len(rows) - start)
        yield rows[start : start + size]
        start += size


class Packer:
    """Makes rows of trajectories.

    It remembers which shared rows the file holds already, so that most turns add nothing but themselves. What it has
    forgotten goes to the file again, where it is ignored.
    """

    def __init__(self, *, next_key: int, launch: int, resumed: bool) -> None:
        self.resumed = resumed
        """Whether the file held this run already when it was opened."""
        self._next_key = next_key
        self._launch = launch
        self._written: OrderedDict[Hashable, None] = OrderedDict()
        # Nearly all turns of a run share one object, and taking it apart costs as much as the rest of a turn's row.
        self._sampled: tuple[Sampling | None, str] = None, ""

    def forget(self) -> None:
        """Forget what the file holds: after a transaction that failed it may hold nothing of what was packed."""
        self._written.clear()

    def add(self, batch: Batch, trajectory: Trajectory, *, superseded: bool) -> None:
        """Add the rows of one trajectory to a batch."""
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
        for request in trajectory.requests:
            batch.insert(REQUESTS, [key, *request_values(request)])

    def _add_task(self, batch: Batch, task: Task, visit: int) -> None:
        if self._first_time((task.id, visit)):
            batch.insert(TASKS, [encode_text(task.id), visit, class_name(type(task)), encode_task(task), 0])

    def _constraint(self, batch: Batch, turn: Turn) -> int | None:
        constraint = turn.constraint
        if constraint is None:
            return None
        kind = constraint.kind.value
        return self._refer(batch, CONSTRAINTS, kind, kind, constraint.value)

    def _sampling(self, batch: Batch, turn: Turn) -> int | None:
        sampling = turn.sampling
        if sampling is None:
            return None
        if sampling is not self._sampled[0]:
            self._sampled = sampling, encode_json(sampling.given())
        return self._refer(batch, SAMPLINGS, "sampling", self._sampled[1])

    def _refer(self, batch: Batch, table: Table, kind: str, *values: str) -> int:
        """The key of a row that many others refer to; the row itself goes along the first time."""
        key = _key_of(kind, values[-1])
        if self._first_time(key):
            batch.insert(table, [key, *values])
        return key

    def _first_time(self, what: Hashable) -> bool:
        if what in self._written:
            self._written.move_to_end(what)
            return False
        self._written[what] = None
        if len(self._written) > REMEMBERED:
            self._written.popitem(last=False)
        return True


def _key_of(kind: str, value: str) -> int:
    """The same for the same text, so that nothing has to be looked up; 63 bits, since SQLite's integers have a sign."""
    text = f"{kind}:{value}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
