"""Writes a run file: one thread, one transaction for all that waits, and a word to each when it is on disk."""

from __future__ import annotations

import os
import platform
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.to_thread

from runner.errors import StorageFailed
from runner.store.claims import UNSUCCEEDED, Claimed, Claims, reopen_failed
from runner.store.codec import load_trajectory
from runner.store.columns import decode_text, encode_text
from runner.store.commits import Commit, CommitThread, episode_commit, finish_commit, reward_commit
from runner.store.database import (
    FileLock,
    check_format,
    connect_writer,
    make_folder,
    open_reader,
    storage_faults,
    tables_in,
    transaction,
    write_ahead,
)
from runner.store.header import Header, OnChange
from runner.store.schema import schema_statements
from runner.store.stored_tasks import TaskDecoder
from runner.tasks import Task
from runner.trajectory import Trajectory

__all__ = ["Claimed", "RunWriter"]

CLOSE_SECONDS = 30.0
"""How long a run that ends waits for its last transaction: a disk that hangs must not keep the process."""
ANSWER_SECONDS = 60.0
"""The seconds that a commit is waited for: more than SQLite waits for a lock, whose own error says more
(`connect_writer`)."""
WAITING_COMMITS = 1024
"""Commits that are under way at most; further episodes wait, so that a slow disk does not fill the memory."""


class RunWriter:
    """The run file while a run plays; use it as `async with`.

    A commit call returns when the transaction that holds it is committed. Commits that come while one is being made
    go together into the next. Trajectories are packed in the writer's thread, so they must not change before the
    call returns.

    Args:
        path: the file; made with its folder if it is not there. None keeps no trajectories, only the tasks' ids.
        header: the configuration of this run.
        task_class: the class that stored tasks are read back as.
        retry_failed: what failed in the file is no result any more, and is claimed again.
        durable: every commit also survives a power cut (`synchronous=FULL`); without it they survive the death of
            the process in any way, `kill -9` included.

    Raises (when it is entered):
        ConfigurationChanged: the file holds a run of another configuration; the message lists what differs.
        NewerRunFile: the file is of a newer version.
        StorageFailed: it cannot be opened, is no run file, or somebody else writes it.
    """

    def __init__(
        self,
        path: Path | None,
        header: Header,
        *,
        task_class: type[Task] = Task,
        retry_failed: bool = False,
        durable: bool = False,
    ) -> None:
        self.path = path
        """The file; None where no trajectories are kept."""
        self.header = header
        """The configuration of the file: the one that it was begun with."""
        self.resumed = False
        """Whether the file held this run already."""
        self.warnings: tuple[str, ...] = ()
        """What is not as it was when the file was begun, and does not stand in the way."""
        self.reopened: frozenset[tuple[str, int]] = frozenset()
        """The (task, visit) of the groups of which an episode is played again that was a result before."""
        self._given = header
        self._retry_failed = retry_failed
        self._decode_task = TaskDecoder(task_class)
        self._durable = durable
        self._opened = ExitStack()  # closes, the last first: the task ids, the thread, the reader, the file, the lock
        self._reader: sqlite3.Connection | None = None
        self._claims: Claims
        self._thread: CommitThread | None = None
        self._stored_until = 0
        # `fast_acquire`: while there is room, a commit waits for no pass of the event loop.
        self._waiting = anyio.Semaphore(WAITING_COMMITS, fast_acquire=True)

    async def __aenter__(self) -> Self:
        if self.path is None:  # nothing is waited for
            self._open()
            return self
        try:
            # A limiter of its own, here and below: the threads of the default one may all be at work for others.
            await anyio.to_thread.run_sync(self._open, limiter=anyio.CapacityLimiter(1))
        except BaseException:
            self._opened.close()
            raise
        if self._thread is not None:
            self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.path is None:
            self._opened.close()
            return
        with anyio.move_on_after(CLOSE_SECONDS, shield=True) as scope:
            await anyio.to_thread.run_sync(self._opened.close, limiter=anyio.CapacityLimiter(1), abandon_on_cancel=True)
        if scope.cancelled_caught:
            raise StorageFailed(f"run file {self.path}: the disk did not answer within {CLOSE_SECONDS:g} s.")

    # --- opening and closing, in a worker thread

    def _open(self) -> None:
        if self.path is not None:
            self._open_file(self.path)
        self._claims = Claims(self._reader if self.resumed else None)
        self._opened.callback(self._claims.close)

    def _open_file(self, path: Path) -> None:
        make_folder(path)
        lock = FileLock(path)
        lock.acquire()
        self._opened.callback(lock.release)
        with storage_faults(path):
            connection = connect_writer(path)
            self._opened.callback(_close_file, connection)
            check_format(connection, path)
            self.resumed = tables_in(connection)
            if self.resumed:
                self._compare(path, connection)  # before the first write: what is refused is left as it is
            write_ahead(connection, durable=self._durable)
            if not self.resumed:
                self._create(connection)
            if self.resumed and self._retry_failed:
                reopen_failed(connection)
            if self.resumed:  # also without retry_failed: an earlier run may have reopened some and was cut
                self.reopened = frozenset((decode_text(id), visit) for id, visit in connection.execute(UNSUCCEEDED))
            launch = self._note_launch(connection)
            (last,) = connection.execute("SELECT coalesce(max(key), 0) FROM episodes").fetchone()
            self._stored_until = last
        self._reader = open_reader(path)
        self._opened.callback(self._reader.close)
        self._thread = CommitThread(connection, path, next_key=last + 1, launch=launch, resumed=self.resumed)
        self._opened.callback(self._thread.close)

    def _create(self, connection: sqlite3.Connection) -> None:
        with transaction(connection):
            for statement in schema_statements():
                connection.execute(statement)
            connection.execute(
                "INSERT INTO run (one, header, created) VALUES (1, ?, ?)", (self.header.to_json(), time.time())
            )

    def _compare(self, path: Path, connection: sqlite3.Connection) -> None:
        (text,) = connection.execute("SELECT header FROM run").fetchone()
        stored = Header.from_json(text)
        stored.check_same(self._given, path)
        self.warnings = tuple(str(c) for c in stored.changes(self._given) if c.meaning is OnChange.WARN)
        self.header = stored

    def _note_launch(self, connection: sqlite3.Connection) -> int:
        cursor = connection.execute(
            "INSERT INTO launches (started, process, host, header) VALUES (?, ?, ?, ?)",
            (time.time(), os.getpid(), platform.node(), self._given.to_json()),
        )
        return int(cursor.lastrowid or 0)

    # --- commits

    async def commit_episode(self, trajectories: Sequence[Trajectory], *, retry: bool = False) -> None:
        """Store the trajectories of one episode's agents; returns when they are committed.

        Args:
            trajectories: all of one episode; none of them may change before the call returns.
            retry: this attempt is to be played again, so it is no result of the run.

        Raises:
            StorageFailed: they are not in the file; nothing that was committed before is lost.
        """
        if trajectories:
            await self._commit(episode_commit(trajectories, retry=retry))

    async def commit_group_rewards(self, trajectories: Sequence[Trajectory]) -> None:
        """Store `reward` and `rewards` of a task's committed trajectories anew, and that its group is scored."""
        if trajectories:
            await self._commit(reward_commit(trajectories))

    async def finish(self, summary: Mapping[str, Any], *, complete: bool = True) -> None:
        """Store the summary; a run that is `complete` is not resumed by the next `deltarunner run`."""
        await self._commit(finish_commit(summary, complete=complete))

    async def _commit(self, commit: Commit) -> None:
        if self._thread is None:
            return
        async with self._waiting:
            # Once sent it is committed or it failed: a cancelled episode is not to be recorded a second time.
            with anyio.move_on_after(ANSWER_SECONDS, shield=True):
                self._thread.send(commit)
                await commit.done.wait()
        if not commit.done.is_set():
            raise StorageFailed(f"run file {self.path}: the disk did not answer within {ANSWER_SECONDS:g} s.")
        if commit.error is not None:
            raise StorageFailed(str(commit.error)) from commit.error

    def flush(self) -> None:
        """Commit what was sent, and nothing after it; from any thread, where the event loop can do nothing any more."""
        if self._thread is not None:
            self._thread.close()

    # --- what is there

    def claim(self, task: Task, position: int, *, repeatable: bool = False) -> Claimed:
        """Note that `task`, the run's `position`-th, is to be played. Takes some 10 us, from any thread.

        Args:
            task: the task.
            position: where it stands among the run's tasks, for messages.
            repeatable: the source may give a task again; then that is another visit.

        Raises:
            BadTask: this run was given the id before, and its tasks are not repeatable.
            ConfigurationChanged: the file holds another task of this id.
        """
        return self._claims.claim(task, position, repeatable=repeatable)

    def stored(self) -> Iterator[Trajectory]:
        """What earlier runs left in the file, in the order of commits, read as you go.

        All agents of an episode follow one another. Superseded attempts are left out.
        """
        reader = self._reader
        after = 0
        # One row a statement: a statement that is left open between rows would hold the log back from the file.
        while reader is not None and after < self._stored_until:
            row = reader.execute(_NEXT_STORED, (after, self._stored_until)).fetchone()
            if row is None:
                return
            after = row["key"]
            yield load_trajectory(reader, row, self._decode_task)

    async def stored_group(self, task_id: str, visit: int = 0) -> list[Trajectory]:
        """All that the file holds of one visit of a task, by index and agent, superseded attempts left out."""
        if self._reader is None:
            return []
        return await anyio.to_thread.run_sync(self._load_group, task_id, visit)

    def _load_group(self, task_id: str, visit: int) -> list[Trajectory]:
        assert self._reader is not None
        rows = self._reader.execute(_GROUP, (encode_text(task_id), visit)).fetchall()
        return [load_trajectory(self._reader, row, self._decode_task) for row in rows]


_NEXT_STORED = "SELECT * FROM episodes WHERE key > ? AND key <= ? AND NOT superseded ORDER BY key LIMIT 1"

_GROUP = """
    SELECT * FROM episodes WHERE task_id = ? AND visit = ? AND NOT superseded ORDER BY group_index, agent
"""


def _close_file(connection: sqlite3.Connection) -> None:
    """Close the file without its log beside it, so that it can be copied, and read from a read-only disk.

    Not while somebody reads it, or where the disk is full: then the log stays, and holds what the file does not.
    """
    with suppress(sqlite3.Error):
        # At once or not at all: the run is over, and is not to wait for who reads the file.
        connection.execute("PRAGMA busy_timeout = 0")
        connection.execute("PRAGMA journal_mode = DELETE")
    connection.close()
