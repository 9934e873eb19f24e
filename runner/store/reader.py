"""Reader of a run file: episode rows without tokens, and whole trajectories one at a time."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from runner.errors import BadOption, RunFileError
from runner.store.codec import load_trajectory
from runner.store.columns import decode_text, encode_text
from runner.store.database import open_reader, storage_faults
from runner.store.frames import FrameKind, episodes_frame, tokens_frame, turns_frame
from runner.store.header import Header
from runner.store.json_values import decode_json
from runner.store.schema import EPISODES
from runner.store.stored_summary import summarize
from runner.store.stored_tasks import TaskDecoder
from runner.store.trajectory_filter import ALL, TrajectoryFilter
from runner.tasks import Task
from runner.trajectory import Outcome, Trajectory

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["EpisodeRow", "GroupRow", "RunFile", "WeightsRow"]

PAGE_SIZE = 256
"""The number of rows per query, which bounds memory."""

_COLUMNS: Final = ", ".join(column.name for column in EPISODES.columns)


@dataclass(frozen=True, slots=True)
class WeightsRow:
    """An update of an engine's weights during the run: a row of the table `weights`."""

    launch: int
    """The number of the launch."""
    engine: int
    """The index of the engine among the engines of the run; 0 is the run's own engine."""
    version: str
    """The version of the weights after the update."""
    time: float
    """The time of the update, in seconds since 1970."""
    proof_ids: int | None
    """The number of ids of the proof. This field and the following ones are None if the update had no proof."""
    proof_median: float | None
    """The median difference between the engine's and the trainer's scores, in nats."""
    proof_largest: float | None
    """The largest difference, in nats."""
    proof_arrived: float | None
    """The share of the trainer's change that the engine shows; None if unknown."""


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """A trajectory without its tokens: a row of the table `episodes`.

    The fields are the columns of the table, in order. `EPISODES` in `runner/store/schema.py` and docs/run-file.md
    describe them. Two fields have other names: `index` is the column `group_index`, and `limit` is `limit_name`.
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
    """The agent of the trajectories in `rows`."""
    rows: tuple[EpisodeRow, ...]
    """A row for each episode, ordered by index. The reward of a failed episode is None."""
    complete: bool
    """True if all episodes of the group were played and none was cut short."""
    scored: bool
    """True if the rewards of the group are in the file."""


class RunFile:
    """A run file for reading, used with `with`. It may be read while a run writes it.

        with RunFile("runs/calculator-001.db") as run_file:
            for row in run_file:                             # rows without tokens, read in pages
                print(row.task_id, row.outcome, row.reward)
            trajectory = run_file.trajectory(row)            # its tokens, turns and messages

    Iteration, `len()` and `trajectories()` cover the trained trajectories: the last attempts of trained agents, in
    commit order. `rows()` can also return other trajectories.

    Args:
        path: the file.
        task_class: the class of the tasks; with the default, the fields of an author's class are in `Task.info`.

    Raises:
        RunFileError: the file does not exist, is not a run file, holds no run, is damaged, or has an older format.
        StorageFailed: the file cannot be read.
        NewerRunFile: the file has a newer format.
    """

    def __init__(self, path: str | Path, *, task_class: type[Task] = Task) -> None:
        self.path = Path(path)
        """The path of the file."""
        self._decode_task = TaskDecoder(task_class)
        self._connection = open_reader(self.path)
        try:
            self.header = self._header(self._one("SELECT header FROM run")["header"])
            """The configuration of the run at its beginning."""
        except RunFileError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; the end of the `with` block also closes it."""
        self._connection.close()

    def __repr__(self) -> str:
        return f"RunFile({str(self.path)!r})"

    # --- the run

    @property
    def complete(self) -> bool:
        """True if every task of the run was played."""
        return bool(self._one("SELECT complete FROM run")[0])

    def first_launch(self) -> Header | None:
        """The header of the first launch; None if the process that began the run recorded none."""
        row = self._one("SELECT header FROM launches ORDER BY number LIMIT 1")
        launched = None if row is None else self._header(row["header"])
        # If the first process ended before it recorded its launch, the first row is of another launch.
        return launched if launched is not None and launched.created == self.header.created else None

    def _header(self, text: str) -> Header:
        try:
            return Header.from_json(text)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RunFileError(
                f"run file {self.path}: its header is damaged ({error}). Restore a copy, or give another path (--file)."
            ) from error

    def summary(self) -> dict[str, Any]:
        """The summary computed from the rows of the file, with the keys of `Summary.as_dict()`.

        It counts the last attempts, including attempts that were cut short. Values that no row holds (`seconds`,
        `tokens_per_second`, `faults`, ...) are from the last launch; they are None, 0 or empty while that launch plays,
        or if it was killed.

        Raises:
            RunFileError: rows are damaged.
        """
        header = self.header
        try:
            with storage_faults(self.path):
                return summarize(self._connection, header)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            cause = f"{type(error).__name__}: {error}"
            raise RunFileError(
                f"run file {self.path}: its rows are damaged, so no summary can be computed ({cause}). "
                f"`deltarunner verify` names the damaged episode."
            ) from error

    def outcomes(self) -> dict[Outcome, int]:
        """The number of episodes by outcome. An episode with several agents counts once."""
        episodes = "SELECT DISTINCT task_id, visit, group_index, outcome FROM episodes WHERE NOT superseded"
        counts = self._all(f"SELECT outcome, count(*) FROM ({episodes}) GROUP BY outcome")
        return {Outcome(outcome): count for outcome, count in counts}

    # --- summaries

    def __len__(self) -> int:
        """The number of trained trajectories."""
        return int(self._one("SELECT count(*) FROM trajectories")[0])

    def __iter__(self) -> Iterator[EpisodeRow]:
        """The rows of trained trajectories, in commit order."""
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
        """The rows of the trajectories that fulfil all conditions, in commit order.

        A condition of None accepts any value.

        Args:
            task_id: the id of the task.
            agent: the agent.
            outcome: the outcome of the episode.
            trained: True for trained agents, False for others.
            superseded: True for attempts that were repeated or will be, False for others.

        Raises:
            ValueError: the outcome does not exist.
        """
        chosen: dict[str, Any] = {
            "task_id": None if task_id is None else encode_text(task_id),
            "agent": None if agent is None else encode_text(agent),
            "outcome": None if outcome is None else Outcome(outcome).value,
            "trained": trained,
            "superseded": superseded,
        }
        chosen = {column: value for column, value in chosen.items() if value is not None}
        # Without a condition on `trained`, SQLite would use the index `episodes_current`, and sort its rows by key for
        # every page. The plus sign prevents that.
        names = {column: "+superseded" if column == "superseded" and trained is None else column for column in chosen}
        condition = "".join(f" AND {name} = :{column}" for column, name in names.items())
        statement = f"SELECT {_COLUMNS} FROM episodes WHERE key > :after{condition} ORDER BY key LIMIT {PAGE_SIZE}"
        return map(_episode_row, self._pages(statement, chosen))

    def row(self, id: str) -> EpisodeRow:
        """The row of an episode's last attempt: of its first trained agent, or of its first agent if none is trained.

        Raises:
            RunFileError: the file has no such episode.
        """
        rows = self._all(_ROWS_OF_EPISODE, encode_text(id))
        if not rows:
            raise RunFileError(self._not_there(id, None, rows))
        return _episode_row(rows[0])

    def rows_of(self, keys: Sequence[int]) -> list[EpisodeRow]:
        """The rows with these keys, in the order of `keys`; keys that do not exist are left out."""
        statement = f"SELECT {_COLUMNS} FROM episodes WHERE key = ?"
        return [_episode_row(row) for key in keys for row in self._all(statement, key)]

    def weights(self) -> list[WeightsRow]:
        """The weight updates of the run's engines, in order; an empty list for older files, which lack the table."""
        if self._one("SELECT 1 FROM sqlite_master WHERE name = 'weights'") is None:
            return []  # the file is older than this table
        rows = self._all("SELECT * FROM weights ORDER BY rowid")
        return [WeightsRow(**{**dict(row), "version": decode_text(row["version"])}) for row in rows]

    def groups(self) -> Iterator[GroupRow]:
        """The trained trajectories by task, visit and agent, in the order of the tasks' first commits."""
        statement = f"SELECT rowid AS key, * FROM tasks WHERE rowid > :after ORDER BY rowid LIMIT {PAGE_SIZE}"
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

    def frame(self, kind: FrameKind | str = FrameKind.EPISODES) -> pa.Table:
        """The trained trajectories as an Arrow table in memory, for `.to_pandas()` or `polars.from_arrow()`.

        If no trajectory is trained, as in an evaluation of agent programs, the table has the untrained trajectories. In
        a table of episodes, the column `trained` is then False.

        Args:
            kind: "episodes", "turns" or "tokens": the rows of the table.

        Raises:
            BadOption: the kind is unknown.
        """
        rows = self.rows(trained=True if len(self) else None)
        match kind:
            case FrameKind.EPISODES:
                return episodes_frame(rows)
            case FrameKind.TURNS:
                return turns_frame(map(self.trajectory, rows))
            case FrameKind.TOKENS:
                return tokens_frame(map(self.trajectory, rows))
        raise BadOption(f"frame({kind!r}): give one of {', '.join(each.value for each in FrameKind)}.")

    def select(self, statement: str, *values: Any) -> list[sqlite3.Row]:
        """The rows of a SELECT, as SQLite has them: no text is decoded, and nothing can be written.

        docs/run-file.md describes the tables.

        Args:
            statement: the statement.
            values: the values of its `?`, or one mapping for names such as `:name`.
        """
        return self._all(statement, *values)

    # --- trajectories

    def trajectory(self, episode: EpisodeRow | str, *, agent: str | None = None) -> Trajectory:
        """One whole trajectory.

        Args:
            episode: a row, or the id of an episode for its last attempt.
            agent: the agent; by default the agent of the row. For an id, by default the episode's first trained agent,
                or its first agent if none is trained.

        Raises:
            RunFileError: the file has no such episode or agent, its rows are damaged, or its task does not fit
                `task_class`.
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
        example = (
            f"; an existing id is, for example, {decode_text(first)!r}" if first else ", since the file has no episodes"
        )
        return f"{self.path}: the episode {id!r} does not exist{example}."

    def trajectories(self, chosen: TrajectoryFilter = ALL) -> Iterator[Trajectory]:
        """The trained trajectories that the filter selects, whole, one at a time.

        Raises:
            BadOption: a chosen agent or task is not in the file.
            RunFileError: the rows of a trajectory are damaged, or its task does not fit `task_class`; raised when the
                trajectory is read.
        """
        self._check_known(chosen)
        condition, values = chosen.condition()
        statement = f"SELECT {_COLUMNS} FROM trajectories WHERE key > :after{condition} ORDER BY key LIMIT 1"
        return islice(map(self._load, self._pages(statement, values)), chosen.most)

    def _check_known(self, chosen: TrajectoryFilter) -> None:
        for column, what, names in (("agent", "agent", chosen.agents), ("task_id", "task", chosen.tasks)):
            for name in names:
                if self._one(f"SELECT 1 FROM trajectories WHERE {column} = ? LIMIT 1", encode_text(name)) is None:
                    known = self._all(f"SELECT DISTINCT {column} FROM trajectories LIMIT 6")
                    shown = ", ".join(repr(decode_text(each[0])) for each in known) or "none"
                    raise BadOption(f"{self.path}: no trained trajectory has the {what} {name!r}; {what}s are {shown}.")

    def score_names(self, column: str) -> list[str]:
        """The sorted names of all `rewards` or `metrics` of trained trajectories."""
        assert column in ("rewards", "metrics")
        # SQLite's JSON functions are not used, since they refuse NaN.
        statement = f"SELECT key, {column} FROM trajectories WHERE key > :after ORDER BY key LIMIT {PAGE_SIZE}"
        return sorted({name for row in self._pages(statement, {}) for name in decode_json(row[column])})

    def task(self, row: EpisodeRow) -> Task:
        """The task of an episode.

        Raises:
            RunFileError: the task is missing or damaged, or does not fit `task_class`.
        """
        found = self._one("SELECT task FROM tasks WHERE id = ? AND visit = ?", encode_text(row.task_id), row.visit)
        try:
            if found is None:
                raise LookupError("its row is missing")
            return self._decode_task(found["task"])
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise RunFileError(
                f"run file {self.path}: task {row.task_id!r:.80} (visit {row.visit}) is damaged "
                f"({type(error).__name__}: {error}). Play its episodes again with another file."
            ) from error

    def _load(self, row: sqlite3.Row) -> Trajectory:
        with storage_faults(self.path):
            return load_trajectory(self._connection, row, self._decode_task)

    # --- the database

    def _one(self, statement: str, *values: Any) -> Any:
        with storage_faults(self.path):
            return self._connection.execute(statement, values).fetchone()

    def _all(self, statement: str, *values: Any) -> list[sqlite3.Row]:
        given = values[0] if len(values) == 1 and isinstance(values[0], Mapping) else values
        with storage_faults(self.path):
            return self._connection.execute(statement, given).fetchall()

    def _pages(self, statement: str, values: Mapping[str, Any]) -> Iterator[sqlite3.Row]:
        """The rows of a query, read in pages. No transaction stays open between pages, so the log does not grow."""
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
    # Columns are read by position, because a lookup by name costs more than the read.
    return EpisodeRow(*[read(stored) if read else stored for stored, read in zip(row, _READ, strict=True)])
