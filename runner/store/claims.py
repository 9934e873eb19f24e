"""Task claims: the visit number of a task, and its episodes that earlier runs of the file finished."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from tempfile import gettempdir
from typing import Final

from runner.errors import BadTask, ConfigurationChanged, StorageFailed
from runner.store.columns import encode_text
from runner.store.database import transaction
from runner.store.json_values import decode_json
from runner.store.stored_tasks import encode_task
from runner.tasks import Task
from runner.trajectory import Outcome

__all__ = ["UNSUCCEEDED", "Claimed", "Claims", "reopen_failed"]

_EPISODES_OF_TASK = "SELECT group_index, attempt, outcome, superseded FROM episodes WHERE task_id = ? AND visit = ?"


@dataclass(frozen=True, slots=True)
class Claimed:
    """The result of a claim: the visit of a task, and the episodes of this visit in the run file."""

    visit: int = 0
    """The number of the task's visit, counted from 0. A source that repeats a task plays it in another visit."""
    finished: frozenset[int] = frozenset()
    """The group indices whose episodes have a final outcome in the file."""
    attempts: Mapping[int, int] = field(default_factory=dict)
    """The number of attempts in the file, by group index. It is also the number of the next attempt, counted from 0."""
    group_scored: bool = False
    """True if the rewards of the group are in the file."""


class Claims:
    """The tasks that this run has claimed, by id; usable from any thread.

    Args:
        stored: a connection to the run file of a resumed run; None for a new file.
    """

    def __init__(self, stored: sqlite3.Connection | None) -> None:
        self._stored = stored
        self._lock = threading.Lock()
        # A database without a name is temporary. SQLite keeps a small database in memory, and a database of millions of
        # tasks in a file. The file does not outlive the process, so it needs no journal and no sync.
        self._given = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        # A negative size of the cache is in KiB: at most 4 MiB of the database stay in memory.
        for pragma in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -4096"):
            self._given.execute(f"PRAGMA {pragma}")
        self._given.execute(
            "CREATE TABLE given (id PRIMARY KEY, position INTEGER, visits INTEGER NOT NULL) WITHOUT ROWID"
        )
        # This transaction is never committed, since a transaction for each statement takes longer.
        self._given.execute("BEGIN")

    def claim(self, task: Task, position: int, *, repeatable: bool, visit: int | None = None) -> Claimed:
        """See `RunWriter.claim`."""
        try:
            with self._lock:
                if visit is None:
                    visit = self._next_visit(task, position, repeatable)
                return self._stored_state(self._stored, task, visit) if self._stored is not None else Claimed(visit)
        except sqlite3.Error as error:
            raise StorageFailed(
                f"the index of task ids cannot be stored ({error}). It is a temporary file: free space in "
                f"{gettempdir()}, or set SQLITE_TMPDIR to a folder with space."
            ) from error

    def _next_visit(self, task: Task, position: int, repeatable: bool) -> int:
        id = encode_text(task.id)
        row = self._given.execute("SELECT position, visits FROM given WHERE id = ?", (id,)).fetchone()
        if row is None:
            self._given.execute("INSERT INTO given VALUES (?, ?, 1)", (id, position))
            return 0
        first, visits = row
        if not repeatable:
            raise BadTask(
                f"task {position} has the same id {task.id!r} as task {first}: give each task a unique id. If the "
                f"source repeats tasks on purpose, define finished(trajectory) on the source; then ids may repeat."
            )
        self._given.execute("UPDATE given SET visits = visits + 1 WHERE id = ?", (id,))
        return int(visits)

    @staticmethod
    def _stored_state(stored: sqlite3.Connection, task: Task, visit: int) -> Claimed:
        key = encode_text(task.id), visit
        row = stored.execute("SELECT task, group_scored FROM tasks WHERE id = ? AND visit = ?", key).fetchone()
        if row is None:
            return Claimed(visit)
        _require_same(row["task"], task)
        attempts: dict[int, int] = {}
        finished: set[int] = set()
        for index, attempt, outcome, superseded in stored.execute(_EPISODES_OF_TASK, key):
            attempts[index] = max(attempts.get(index, 0), attempt + 1)
            if not superseded and not Outcome(outcome).cut_short:
                finished.add(index)
        return Claimed(visit, frozenset(finished), attempts, bool(row["group_scored"]))

    def close(self) -> None:
        with self._lock:
            self._given.close()


def _require_same(stored: str, task: Task) -> None:
    now = encode_task(task)
    if now == stored:
        return
    old_fields, new_fields = decode_json(stored), decode_json(now)
    if old_fields == new_fields:  # the task has the same fields in another order
        return
    names = [name for name in {**old_fields, **new_fields} if old_fields.get(name) != new_fields.get(name)]
    lines = [f"  {name}: {old_fields.get(name)!r:.100} -> {new_fields.get(name)!r:.100}" for name in names]
    raise ConfigurationChanged(
        f"task {task.id!r} differs from the one in the run file:\n" + "\n".join(lines) + "\n"
        "Give the same tasks to resume the run (further ones may follow), or another path (--file) to begin a new one."
    )


# --- failed episodes that are repeated

UNSUCCEEDED: Final = """
    SELECT DISTINCT task_id, visit FROM episodes AS last WHERE superseded AND NOT EXISTS (
        SELECT 1 FROM episodes AS later WHERE later.task_id = last.task_id AND later.visit = last.visit
        AND later.group_index = last.group_index AND NOT later.superseded
    )
"""
"""Query for the (task_id, visit) of tasks with an episode whose attempts are all superseded."""

_FAILED: Final = ", ".join(f"'{outcome.value}'" for outcome in Outcome if outcome.failed)

_STATEMENTS: Final = (
    f"""
    UPDATE tasks SET group_scored = 0 WHERE (id, visit) IN (
        SELECT task_id, visit FROM episodes WHERE outcome IN ({_FAILED}) AND NOT superseded
    )
    """,
    f"""
    UPDATE run SET complete = 0, summary = NULL
    WHERE EXISTS (SELECT 1 FROM episodes WHERE outcome IN ({_FAILED}) AND NOT superseded)
    """,
    f"UPDATE episodes SET superseded = 1 WHERE outcome IN ({_FAILED}) AND NOT superseded",
)


def reopen_failed(connection: sqlite3.Connection) -> None:
    """Mark failed episodes as superseded, so that this run or a later one claims them again.

    If there are any, their groups are marked as not scored and the run as incomplete, and the run's summary is removed.
    """
    with transaction(connection):
        for statement in _STATEMENTS:
            connection.execute(statement)
