"""Episodes of a run file that are to be played again although they had ended."""

from __future__ import annotations

import sqlite3
from typing import Final

from runner.store.database import transaction
from runner.trajectory import Outcome

__all__ = ["UNSUCCEEDED", "reopen_failed"]

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
