"""Reads a run file: summaries of episodes without their tokens, and whole trajectories one at a time."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from runner.errors import RunFileError
from runner.store.codec import load_trajectory
from runner.store.columns import decode_text, encode_text
from runner.store.database import open_reader, storage_faults
from runner.store.header import Header
from runner.store.json_values import decode_json
from runner.store.schema import EPISODES
from runner.store.stored_tasks import TaskDecoder
from runner.tasks import Task
from runner.trajectory import Outcome, Trajectory

__all__ = ["EpisodeRow", "GroupRow", "RunFile"]

PAGE = 256
"""Rows that are read at a time; memory follows this and not the run."""

_COLUMNS: Final = ", ".join(column.name for column in EPISODES.columns)


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """What is known of a trajectory without loading it: a row of the table `episodes`.

    The fields are its columns, in their order: `EPISODES` in `runner/store/schema.py`, and docs/run-file.md, say what
    each holds. `index` is the column `group_index`, and `limit` is `limit_name`.
    """

    key: int
    id: str
    task_id: str
    visit: int
    index: int
    agent: str
    attempt: int
    trained: bool
    outcome: Outcome
    limit: str
    limit_agent: str
    reason: str
    error: str
    reward: float | None
    rewards: Mapping[str, float | None]
    metrics: Mapping[str, float]
    seed: int
    turns: int
    segments: int
    tokens: int
    sampled: int
    prompted: int
    cached: int | None
    seconds: float
    waited: float
    thread: str
    superseded: bool
    committed: float
    launch: int


@dataclass(frozen=True, slots=True)
class GroupRow:
    """The episodes of one visit of a task, for one agent."""

    task_id: str
    """The id of the task."""
    visit: int
    """The number of the task's visit, counted from 0."""
    agent: str
    """The agent whose trajectories these are."""
    rows: tuple[EpisodeRow, ...]
    """A row for each episode by its index; failed ones are among them, with reward None."""
    complete: bool
    """Whether as many episodes as the run's group size were played, and none of them is to be played again."""
    scored: bool
    """Whether the rewards of the group are in the file."""


class RunFile:
    """A run file, for reading; use it as `with`. It may be read while a run writes it.

        with RunFile("runs/calculator-001.db") as run_file:
            for row in run_file:                             # summaries, a page at a time
                print(row.task_id, row.outcome, row.reward)
            trajectory = run_file.trajectory(row)            # its tokens, turns and messages

    Iterating, `len()` and `trajectories()` give what one trains on: the last attempts of trained agents, in the order
    of their commits. `rows()` gives the others too.

    Args:
        path: the file.
        task_class: the class that tasks are read back as; with the default, an author's own fields are in `Task.info`.

    Raises:
        RunFileError: there is no such file, or it is no run file, or one of an older format.
        StorageFailed: it cannot be read.
        NewerRunFile: it was written by a newer version.
    """

    def __init__(self, path: str | Path, *, task_class: type[Task] = Task) -> None:
        self.path = Path(path)
        """The path of the file."""
        self._decode_task = TaskDecoder(task_class)
        self._connection = open_reader(self.path)
        try:
            self.header = self._header(self._one("SELECT header FROM run")["header"])
            """How the run was configured when it was begun."""
        except RunFileError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; leaving the `with` block does."""
        self._connection.close()

    def __repr__(self) -> str:
        return f"RunFile({str(self.path)!r})"

    # --- the run

    @property
    def complete(self) -> bool:
        """Whether every task of the run was played."""
        return bool(self._one("SELECT complete FROM run")[0])

    def first_launch(self) -> Header | None:
        """The header as the process that began the run wrote it beside the run's own; None where it wrote none."""
        row = self._one("SELECT header FROM launches ORDER BY number LIMIT 1")
        launched = None if row is None else self._header(row["header"])
        # A process that died before it noted its launch has left the first row to another one.
        return launched if launched is not None and launched.created == self.header.created else None

    def _header(self, text: str) -> Header:
        try:
            return Header.from_json(text)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RunFileError(f"run file {self.path}: its header is damaged ({error}).") from error

    def summary(self) -> dict[str, Any] | None:
        """The summary that the run ended with; None while it plays, or where it was killed."""
        (summary,) = self._one("SELECT summary FROM run")
        return None if summary is None else decode_json(summary)

    def outcomes(self) -> dict[Outcome, int]:
        """How many episodes ended how, each counted once, however many agents it has."""
        episodes = "SELECT DISTINCT task_id, visit, group_index, outcome FROM episodes WHERE NOT superseded"
        counts = self._all(f"SELECT outcome, count(*) FROM ({episodes}) GROUP BY outcome")
        return {Outcome(outcome): count for outcome, count in counts}

    # --- summaries

    def __len__(self) -> int:
        """How many trajectories one trains on."""
        return int(self._one("SELECT count(*) FROM trajectories")[0])

    def __iter__(self) -> Iterator[EpisodeRow]:
        """Summaries of what one trains on, in the order of their commits."""
        return self.rows()

    def rows(
        self,
        *,
        task_id: str | None = None,
        agent: str | None = None,
        outcome: Outcome | str | None = None,
        trained: bool | None = True,
        superseded: bool | None = False,
    ) -> Iterator[EpisodeRow]:
        """Summaries of trajectories in the order of their commits; None leaves a choice open.

        Args:
            task_id: the id of the task that they were played for.
            agent: the agent whose trajectories they are.
            outcome: how the episode ended.
            trained: whether the agent is trained.
            superseded: whether the attempt was played again, or is to be.
        """
        chosen: dict[str, Any] = {
            "task_id": None if task_id is None else encode_text(task_id),
            "agent": None if agent is None else encode_text(agent),
            "outcome": None if outcome is None else Outcome(outcome).value,
            "trained": trained,
            "superseded": superseded,
        }
        chosen = {column: value for column, value in chosen.items() if value is not None}
        condition = "".join(f" AND {column} = :{column}" for column in chosen)
        statement = f"SELECT {_COLUMNS} FROM episodes WHERE key > :after{condition} ORDER BY key LIMIT {PAGE}"
        return map(_episode_row, self._pages(statement, chosen))

    def groups(self) -> Iterator[GroupRow]:
        """The trained trajectories by task, visit and agent, in the order in which the tasks were first committed."""
        statement = f"SELECT rowid AS key, * FROM tasks WHERE rowid > :after ORDER BY rowid LIMIT {PAGE}"
        for task in self._pages(statement, {}):
            yield from self._groups_of(task)

    def _groups_of(self, task: sqlite3.Row) -> Iterator[GroupRow]:
        agents: dict[str, list[EpisodeRow]] = {}
        every = [_episode_row(row) for row in self._all(_ROWS_OF_TASK, task["id"], task["visit"])]
        for row in every:
            if row.trained:
                agents.setdefault(row.agent, []).append(row)
        played = len({row.index for row in every}) == self.header.group_size
        complete = played and not any(row.outcome.cut_short for row in every)
        scored = bool(task["group_scored"])
        for agent, rows in agents.items():
            yield GroupRow(decode_text(task["id"]), task["visit"], agent, tuple(rows), complete, scored)

    # --- trajectories

    def trajectory(self, episode: EpisodeRow | str, *, agent: str | None = None) -> Trajectory:
        """One trajectory, whole.

        Args:
            episode: a row, or the id of an episode, which stands for its last attempt.
            agent: the agent whose trajectory it is; by default the row's, or the episode's first trained one.

        Raises:
            RunFileError: there is no such episode or agent in the file.
        """
        if isinstance(episode, EpisodeRow) and agent in (None, episode.agent):
            agent, rows = episode.agent, self._all(f"SELECT {_COLUMNS} FROM episodes WHERE key = ?", episode.key)
        elif isinstance(episode, EpisodeRow):
            rows = self._all(_ROWS_OF_ATTEMPT, encode_text(episode.id), episode.attempt)
        else:
            rows = self._all(_ROWS_OF_EPISODE, encode_text(episode))
        for row in rows:
            if agent is None or decode_text(row["agent"]) == agent:
                return self._load(row)
        raise RunFileError(self._not_there(episode, agent, rows))

    def _not_there(self, episode: EpisodeRow | str, agent: str | None, rows: list[sqlite3.Row]) -> str:
        id = episode.id if isinstance(episode, EpisodeRow) else episode
        if rows:
            agents = ", ".join(decode_text(row["agent"]) for row in rows)
            return f"{self.path}: episode {id!r} has no agent {agent!r}; its agents are {agents}."
        first = self._one("SELECT min(id) FROM episodes")[0]
        example = f"; there is, for example, {decode_text(first)!r}" if first else " (nor any other)"
        return f"{self.path}: there is no episode {id!r}{example}."

    def trajectories(self) -> Iterator[Trajectory]:
        """What one trains on, whole, one at a time."""
        statement = f"SELECT {_COLUMNS} FROM trajectories WHERE key > :after ORDER BY key LIMIT 1"
        return map(self._load, self._pages(statement, {}))

    def task(self, row: EpisodeRow) -> Task:
        """The task of an episode."""
        (task,) = self._one("SELECT task FROM tasks WHERE id = ? AND visit = ?", encode_text(row.task_id), row.visit)
        return self._decode_task(task)

    def _load(self, row: sqlite3.Row) -> Trajectory:
        with storage_faults(self.path):
            return load_trajectory(self._connection, row, self._decode_task)

    # --- the database

    def _one(self, statement: str, *values: Any) -> Any:
        with storage_faults(self.path):
            return self._connection.execute(statement, values).fetchone()

    def _all(self, statement: str, *values: Any) -> list[sqlite3.Row]:
        with storage_faults(self.path):
            return self._connection.execute(statement, values).fetchall()

    def _pages(self, statement: str, values: Mapping[str, Any]) -> Iterator[sqlite3.Row]:
        """Row by row. Between pages no transaction is open, so that a reader who dawdles keeps nobody's log growing."""
        after = 0
        while True:
            with storage_faults(self.path):
                page = self._connection.execute(statement, {**values, "after": after}).fetchall()
            if not page:
                return
            yield from page
            after = page[-1]["key"]


_ROWS_OF_TASK = f"""
    SELECT {_COLUMNS} FROM episodes WHERE task_id = ? AND visit = ? AND NOT superseded ORDER BY group_index, agent
"""
_ROWS_OF_ATTEMPT = f"SELECT {_COLUMNS} FROM episodes WHERE id = ? AND attempt = ? ORDER BY trained DESC, key"
_ROWS_OF_EPISODE = f"SELECT {_COLUMNS} FROM episodes WHERE id = ? ORDER BY attempt DESC, trained DESC, key"


_READ: Final = tuple(column.form.read for column in EPISODES.columns)


def _episode_row(row: sqlite3.Row) -> EpisodeRow:
    # By position: looking every column up by its name costs more than reading it.
    return EpisodeRow(*[read(stored) if read else stored for stored, read in zip(row, _READ, strict=True)])
