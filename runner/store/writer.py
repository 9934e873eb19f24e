"""Writer of a run file: one thread writes the waiting commits, as many as fit, in one transaction."""

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

from runner.engines.proofs import ProofFigures
from runner.errors import StorageFailed
from runner.store.claims import UNSUCCEEDED, Claimed, Claims, reopen_failed
from runner.store.codec import load_trajectory
from runner.store.columns import decode_text, encode_text
from runner.store.commits import (
    Commit,
    CommitThread,
    episode_commit,
    finish_commit,
    reward_commit,
    weights_commit,
)
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
from runner.store.schema import WEIGHTS, schema_statements
from runner.store.stored_tasks import TaskDecoder
from runner.tasks import Task
from runner.trajectory import Trajectory

__all__ = ["Claimed", "RunWriter"]

CLOSE_SECONDS = 30.0
"""The longest wait for the last transaction, so that a disk that hangs does not keep the process alive."""
ANSWER_SECONDS = 60.0
"""The longest wait for a commit. It is longer than SQLite's wait for a lock (`connect_writer`), since SQLite's error is
more precise."""
MAX_WAITING_COMMITS = 1024
"""Maximum number of pending commits; further episodes wait, so that a slow disk does not fill the memory."""


class RunWriter:
    """The run file of a playing run, used with `async with`.

    A commit call returns once its transaction is committed. Commits that arrive during a transaction share the next
    one. Trajectories are packed in the writer's thread, so they must not change before the call returns.

    Args:
        path: the file; created with its folder if needed. None stores no trajectories, only task ids.
        header: the configuration of this run.
        task_class: the class of stored tasks, or the classes of several environments as `TaskDecoder` takes them.
        retry_failed: True to mark failed episodes of the file as superseded, so that they are claimed again.

    Raises (when it is entered):
        ConfigurationChanged: the file holds a run of another configuration; the message lists the differences.
        NewerRunFile: a newer version wrote the file.
        RunFileError: the file is not a run file, or has an older format.
        StorageFailed: the file cannot be opened, or is written by another process.
    """

    def __init__(
        self,
        path: Path | None,
        header: Header,
        *,
        task_class: type[Task] | Mapping[str, type[Task]] = Task,
        retry_failed: bool = False,
    ) -> None:
        self.path = path
        """The file; None if no trajectories are stored."""
        self.header = header
        """The configuration with which the file was begun."""
        self.resumed = False
        """True if the file already held this run."""
        self.warnings: tuple[str, ...] = ()
        """The differences from the file's configuration that cause a warning (`OnChange.WARN`), as text."""
        self.reopened: frozenset[tuple[str, int]] = frozenset()
        """The (task id, visit) of the groups with an episode whose stored attempts are all superseded."""
        self._given = header
        self._retry_failed = retry_failed
        self._decode_task = TaskDecoder(task_class)
        self._opened = ExitStack()  # the stack closes in this order: task ids, thread, reader, file, lock
        self._reader: sqlite3.Connection | None = None
        self._claims: Claims
        self._thread: CommitThread | None = None
        self._stored_until = 0
        self._launch = 0
        # With `fast_acquire`, a commit does not wait for a pass of the event loop if there is room.
        self._waiting = anyio.Semaphore(MAX_WAITING_COMMITS, fast_acquire=True)

    async def __aenter__(self) -> Self:
        if self.path is None:  # without a file, nothing blocks
            self._open()
            return self
        try:
            # Here and below, a separate limiter is used, because the default one may have no free thread.
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
            raise StorageFailed(
                f"run file {self.path}: the disk did not answer within {CLOSE_SECONDS:g} s. Check it, and run the same "
                "command again to resume."
            )

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
                self._compare(path, connection)  # the check precedes the first write, so a refused file stays unchanged
            write_ahead(connection)
            if not self.resumed:
                self._create(connection)
            else:  # the file may be older than this table
                connection.execute(WEIGHTS.create().replace("CREATE TABLE", "CREATE TABLE IF NOT EXISTS", 1))
            if self.resumed and self._retry_failed:
                reopen_failed(connection)
            if self.resumed:  # this is needed without `retry_failed` too: an interrupted run may have reopened episodes
                self.reopened = frozenset((decode_text(id), visit) for id, visit in connection.execute(UNSUCCEEDED))
            self._launch = launch = self._note_launch(connection)
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
        """Store the trajectories of one episode's agents; return once they are committed.

        Args:
            trajectories: all trajectories of one episode, which must not change before the call returns.
            retry: True if this attempt will be repeated, so that it is not a result of the run.

        Raises:
            StorageFailed: the trajectories are not in the file; earlier commits are safe.
        """
        if trajectories:
            await self._commit(episode_commit(trajectories, retry=retry))

    async def commit_group_rewards(self, trajectories: Sequence[Trajectory]) -> None:
        """Update `reward` and `rewards` of a task's committed trajectories, and mark its group as scored.

        Raises:
            StorageFailed: the rewards are not in the file.
        """
        if trajectories:
            await self._commit(reward_commit(trajectories))

    async def commit_weights(self, engine: int, version: str, figures: ProofFigures | None, now: float) -> None:
        """Store a weight update of an engine.

        Args:
            engine: the index of the engine in the run.
            version: the version of the weights.
            figures: the results of the proof; None without one.
            now: the time of the update, in seconds since 1970.

        Raises:
            StorageFailed: the update is not in the file.
        """
        await self._commit(weights_commit(self._launch, engine, version, figures, now))

    async def finish(self, summary: Mapping[str, Any], *, complete: bool = True) -> None:
        """Store the summary; the next `deltarunner run` does not resume a `complete` run.

        Raises:
            StorageFailed: the summary is not in the file.
        """
        await self._commit(finish_commit(summary, complete=complete))

    async def _commit(self, commit: Commit) -> None:
        if self._thread is None:
            return
        async with self._waiting:
            # A sent commit is waited for even if the caller is cancelled. Otherwise a cancelled episode could be
            # recorded twice.
            with anyio.move_on_after(ANSWER_SECONDS, shield=True):
                self._thread.send(commit)
                await commit.done.wait()
        if not commit.done.is_set():
            raise StorageFailed(
                f"run file {self.path}: the disk did not answer within {ANSWER_SECONDS:g} s. Check it, and run the "
                "same command again to resume."
            )
        if commit.error is not None:
            raise StorageFailed(str(commit.error)) from commit.error

    def flush(self) -> None:
        """Commit everything sent so far, and accept nothing more.

        Any thread may call this, also while the event loop is blocked.
        """
        if self._thread is not None:
            self._thread.close()

    # --- stored episodes

    def claim(self, task: Task, position: int, *, repeatable: bool = False, visit: int | None = None) -> Claimed:
        """Claim `task` for playing. Any thread may call this; it takes about 10 us.

        Args:
            task: the task.
            position: its number among the run's tasks, for messages.
            repeatable: True if the source may repeat a task, as another visit.
            visit: the number of the visit, if the source counts visits itself; None to count them here.

        Raises:
            BadTask: another task of this run has the id, and tasks are not repeatable.
            ConfigurationChanged: the file holds another task with this id.
            StorageFailed: the index of task ids, a temporary file, cannot be stored.
        """
        return self._claims.claim(task, position, repeatable=repeatable, visit=visit)

    def stored(self) -> Iterator[Trajectory]:
        """The trajectories that earlier runs of the file stored, in commit order, read lazily.

        The trajectories of one episode's agents are adjacent. Superseded attempts are left out.
        """
        reader = self._reader
        after = 0
        # One row per statement: an open statement would prevent checkpoints of the log.
        while reader is not None and after < self._stored_until:
            row = reader.execute(_NEXT_STORED, (after, self._stored_until)).fetchone()
            if row is None:
                return
            after = row["key"]
            yield load_trajectory(reader, row, self._decode_task)

    async def stored_group(self, task_id: str, visit: int = 0) -> list[Trajectory]:
        """The trajectories of one visit of a task, by index and agent, without superseded attempts."""
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
    """Close the file and merge its log, so that it can be copied and read from a read-only disk.

    If the file is being read, or the disk is full, the log stays next to it.
    """
    with suppress(sqlite3.Error):
        # The merge does not wait for readers of the file, since the run is over.
        connection.execute("PRAGMA busy_timeout = 0")
        connection.execute("PRAGMA journal_mode = DELETE")
    connection.close()
