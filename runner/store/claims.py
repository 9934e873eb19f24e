"""Claims of tasks: which visit of a task this is, and what earlier runs of the same file have left of it to do."""

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
    """A task that may be played now."""

    visit: int = 0
    """The number of times that this run was given the task before."""
    finished: frozenset[int] = frozenset()
    """The indices of its group whose episode has a final outcome in the file."""
    attempts: Mapping[int, int] = field(default_factory=dict)
    """How many attempts the file holds, by index; the next attempt has this number."""
    group_scored: bool = False
    """Whether the rewards of the group are in the file."""


class Claims:
    """The ids of the tasks that this run was given; may be used from any thread.

    Args:
        stored: a connection to what earlier runs left in the file; None where that is nothing.
    """

    def __init__(self, stored: sqlite3.Connection | None) -> None:
        self._stored = stored
        self._lock = threading.Lock()
        # A nameless database is temporary: SQLite keeps it in memory while it is small, and on disk where a source
        # gives millions of tasks. It dies with the process, so it needs no journal and no sync.
        self._given = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        # A negative size of the cache is in KiB: 4 MiB of it stay in memory.
        for pragma in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -4096"):
            self._given.execute(f"PRAGMA {pragma}")
        self._given.execute(
            "CREATE TABLE given (id PRIMARY KEY, position INTEGER, visits INTEGER NOT NULL) WITHOUT ROWID"
        )

    def claim(self, task: Task, position: int, *, repeatable: bool) -> Claimed:
        """See `RunWriter.claim`."""
        try:
            with self._lock:
                visit = self._next_visit(task, position, repeatable)
                return self._stored_state(self._stored, task, visit) if self._stored is not None else Claimed(visit)
        except sqlite3.Error as error:
            raise StorageFailed(
                f"the index of task ids cannot be kept ({error}). It is a temporary file: make room in {gettempdir()}, "
                f"or name a folder that has room in SQLITE_TMPDIR."
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
                f"task {position} has the id {task.id!r}, which task {first} has as well: "
                f"give each task an id of its own. (A source that repeats tasks on purpose has finished(trajectory).)"
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
        """Let go of the ids."""
        with self._lock:
            self._given.close()


def _require_same(stored: str, task: Task) -> None:
    now = encode_task(task)
    if now == stored:
        return
    old_fields, new_fields = decode_json(stored), decode_json(now)
    if old_fields == new_fields:  # NaN apart, another order of the same
        return
    names = [name for name in {**old_fields, **new_fields} if old_fields.get(name) != new_fields.get(name)]
    lines = [f"  {name}: {old_fields.get(name)!r:.100} -> {new_fields.get(name)!r:.100}" for name in names]
    raise ConfigurationChanged(
        f"task {task.id!r} is not the one that the run file holds:\n" + "\n".join(lines) + "\n"
        "Give the same tasks to resume the run (further ones may follow), or another path (--file) to begin a new one."
    )


# --- episodes that are to be played again although they had ended

UNSUCCEEDED: Final = """
    SELECT DISTINCT task_id, visit FROM episodes AS last WHERE superseded AND NOT EXISTS (
        SELECT 1 FROM episodes AS later WHERE later.task_id = last.task_id AND later.visit = last.visit
        AND later.group_index = last.group_index AND NOT later.superseded
    )
"""
"""The tasks of which an episode has attempts that are no results, and no other."""

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
    """What failed is no result any more: it is claimed again, now or when the run is next gone on with."""
    with transaction(connection):
        for statement in _STATEMENTS:
            connection.execute(statement)
