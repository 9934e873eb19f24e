"""The writer's thread: packs what waits, commits it in one transaction, and wakes all who wait with one call."""

from __future__ import annotations

import hashlib
import queue
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import anyio

from runner.concurrency.threads import soon_on_this_loop
from runner.errors import StorageFailed
from runner.store.codec import segment_values, trajectory_values, turn_values
from runner.store.columns import Table, encode_text, insertion
from runner.store.database import storage_failed, transaction
from runner.store.json_values import class_name, encode_json
from runner.store.reopening import UNSUCCEEDED
from runner.store.schema import CONSTRAINTS, EPISODES, SAMPLINGS, SEGMENTS, TASKS, TOOLS, TURNS
from runner.store.stored_tasks import encode_task
from runner.tasks import Task
from runner.trajectory import Trajectory, Turn

__all__ = ["Commit", "CommitThread", "EpisodeCommit", "FinishCommit", "RewardCommit"]

GROUP_TOKENS: Final = 4_000_000
"""Token ids that one transaction takes at most, so that memory does not follow a burst."""

GATHER_SECONDS: Final = 0.005
"""From the beginning of one transaction to that of the next at least, so that episodes which end one by one on a busy
loop still share transactions; one that ends alone is committed at once."""

REMEMBERED: Final = 4096

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
    """Makes rows of trajectories. It remembers what the file holds already, within bounds."""

    def __init__(self, *, next_key: int, launch: int, resumed: bool) -> None:
        self.resumed = resumed
        """Whether the file held this run already when it was opened."""
        self._next_key = next_key
        self._launch = launch
        self._written: OrderedDict[Hashable, None] = OrderedDict()

    def forget(self) -> None:
        """After a transaction that failed: the file may hold nothing of what was packed."""
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
            batch.insert(SEGMENTS, [key, number, *segment_values(segment), tools])
        for position, turn in enumerate(trajectory.turns):
            constrained, sampled = self._constraint(batch, turn), self._sampling(batch, turn)
            batch.insert(TURNS, [key, position, constrained, sampled, *turn_values(turn)])

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
        if turn.sampling is None:
            return None
        return self._refer(batch, SAMPLINGS, "sampling", encode_json(turn.sampling.given()))

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
    """The same for the same text, so that nothing has to be looked up; 63 bits."""
    text = f"{kind}:{value}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


class Commit(ABC):
    """Something to be committed, and how that ended.

    Attributes:
        done: set on the event loop when it is committed, or has failed.
        error: why it is not in the file.
        tokens: its size.
    """

    tokens = 0

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.error: StorageFailed | None = None

    @abstractmethod
    def pack(self, batch: Batch, packer: Packer) -> None:
        """Its statements; runs in the writer's thread."""


class EpisodeCommit(Commit):
    """The trajectories of one episode, an attempt that is superseded or one that supersedes those before."""

    def __init__(self, trajectories: Sequence[Trajectory], *, retry: bool) -> None:
        super().__init__()
        self._trajectories = trajectories
        self._retry = retry
        self.tokens = sum(len(segment.log) for trajectory in trajectories for segment in trajectory.segments)

    def pack(self, batch: Batch, packer: Packer) -> None:
        for trajectory in self._trajectories:
            packer.add(batch, trajectory, superseded=self._retry)
        first = self._trajectories[0]
        task = encode_text(first.task.id), first.visit
        if first.attempt:
            batch.update(_SUPERSEDE, *task, first.index, first.attempt)
        if packer.resumed:
            batch.update("UPDATE tasks SET group_scored = 0 WHERE id = ? AND visit = ? AND group_scored", *task)
            batch.update("UPDATE run SET complete = 0, summary = NULL WHERE complete")


_SUPERSEDE = """
    UPDATE episodes SET superseded = 1
    WHERE task_id = ? AND visit = ? AND group_index = ? AND attempt < ? AND NOT superseded
"""


class RewardCommit(Commit):
    """The rewards of one task's trajectories, after those of its group are known."""

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        super().__init__()
        self._trajectories = trajectories

    def pack(self, batch: Batch, packer: Packer) -> None:
        for trajectory in self._trajectories:
            batch.update(
                _REWARD,
                trajectory.reward,
                encode_json(trajectory.rewards),
                encode_text(trajectory.task.id),
                trajectory.visit,
                trajectory.index,
                encode_text(trajectory.agent),
                trajectory.attempt,
            )
        for id, visit in {(encode_text(t.task.id), t.visit) for t in self._trajectories}:
            batch.update("UPDATE tasks SET group_scored = 1 WHERE id = ? AND visit = ?", id, visit)


_REWARD = """
    UPDATE episodes SET reward = ?, rewards = ?
    WHERE task_id = ? AND visit = ? AND group_index = ? AND agent = ? AND attempt = ?
"""


class FinishCommit(Commit):
    """The end of a run, and whether anything is left of it to play."""

    def __init__(self, summary: Mapping[str, Any], *, complete: bool) -> None:
        super().__init__()
        self._summary = summary
        self._complete = complete

    def pack(self, batch: Batch, packer: Packer) -> None:
        batch.update(_FINISH, encode_json(self._summary), int(self._complete))


# What is to be played again, and was not since its task was not given, is left to do.
_FINISH = f"UPDATE run SET summary = ?, complete = ? AND NOT EXISTS ({UNSUCCEEDED})"


class CommitThread:
    """Takes commits from the event loop, groups those that wait, and says when they are on disk.

    Attributes:
        transactions: how many were committed.
        wake_ups: how often the event loop was called.
    """

    def __init__(
        self, connection: sqlite3.Connection, path: Path, *, next_key: int, launch: int, resumed: bool
    ) -> None:
        self.transactions = 0
        self.wake_ups = 0
        self._connection = connection
        self._path = path
        self._packer = Packer(next_key=next_key, launch=launch, resumed=resumed)
        self._queue: queue.SimpleQueue[Commit | None] = queue.SimpleQueue()
        # A daemon: where the loop died without closing the writer, it must not keep the process.
        self._thread = threading.Thread(target=self._work, name="deltarunner run file", daemon=True)
        self._on_loop: Callable[[Callable[[], object]], object]

    def start(self) -> None:
        """Begin; called on the event loop that is to be told."""
        self._on_loop = soon_on_this_loop()
        self._thread.start()

    def send(self, commit: Commit) -> None:
        self._queue.put(commit)

    def close(self) -> None:
        """Commit what waits, and end."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _work(self) -> None:
        open_to_more = True
        while open_to_more:
            group, open_to_more = self._next_group()
            began = time.monotonic()
            self._commit(group)
            if group:
                self._wake(group)
            if open_to_more:
                time.sleep(max(0.0, began + GATHER_SECONDS - time.monotonic()))

    def _next_group(self) -> tuple[list[Commit], bool]:
        group: list[Commit] = []
        tokens = 0
        while tokens < GROUP_TOKENS:
            try:
                commit = self._queue.get(block=not group)
            except queue.Empty:
                break
            if commit is None:
                return group, False
            group.append(commit)
            tokens += commit.tokens
        return group, True

    def _commit(self, group: list[Commit]) -> None:
        batch = Batch()
        packed = [commit for commit in group if self._pack(commit, batch)]
        if not packed:
            return
        try:
            with transaction(self._connection):
                batch.write(self._connection)
            self.transactions += 1
        except sqlite3.OperationalError as error:
            self._failed(packed, error)
        except (sqlite3.Error, OverflowError, UnicodeError) as error:
            self._failed(packed, error)
            # Something in one of them cannot be stored; the others have nothing to do with it.
            if len(packed) > 1:
                for commit in packed:
                    commit.error = None
                    self._commit([commit])

    def _pack(self, commit: Commit, into: Batch) -> bool:
        batch = Batch()
        try:
            commit.pack(batch, self._packer)
        except Exception as error:  # what is packed holds an author's values, with methods of their own
            self._packer.forget()
            commit.error = StorageFailed(
                f"run file {self._path}: an episode cannot be stored ({type(error).__name__}: {error})."
            )
            return False
        into.absorb(batch)
        return True

    def _failed(self, commits: Sequence[Commit], error: Exception) -> None:
        self._packer.forget()
        for commit in commits:
            commit.error = storage_failed(self._path, error)
            commit.error.__cause__ = error

    def _wake(self, group: Sequence[Commit]) -> None:
        self.wake_ups += 1

        def settle() -> None:
            for commit in group:
                commit.done.set()

        try:
            self._on_loop(settle)
        except RuntimeError:  # the loop is gone; what it sent is committed all the same
            return
