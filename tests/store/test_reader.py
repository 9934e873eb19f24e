"""Readers of run files: lazy reading, reading by row, and growing files."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from runner.errors import RunFileError
from runner.store import reader
from runner.store.codec import load_trajectory
from runner.store.reader import EpisodeRow, RunFile
from runner.store.writer import RunWriter
from runner.tasks import Task
from runner.trajectory import Outcome, Trajectory
from tests.store.building import assert_equal, header, played


def write(path: Path, *episodes: Sequence[Trajectory], group_size: int = 1) -> None:
    async def commit() -> None:
        async with RunWriter(path, header(group_size=group_size)) as writer:
            for trajectories in episodes:
                await writer.commit_episode(trajectories)

    anyio.run(commit)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.db"


def test_a_missing_file_is_named(path: Path) -> None:
    with pytest.raises(RunFileError, match=r"the run file .*run\.db does not exist"):
        RunFile(path)


def test_folder_is_refused_as_a_run_file(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match=r"the run file .* is a folder: give a file in it"):
        RunFile(tmp_path)


def test_rows_agree_with_their_trajectories(path: Path) -> None:
    trajectory = played("a", turns=3)
    trajectory.metrics = {"steps": 3.0}
    write(path, [trajectory])
    with RunFile(path) as run_file:
        (row,) = run_file
    assert (row.id, row.task_id, row.agent, row.outcome) == ("a-0-0", "a", "main", Outcome.COMPLETED)
    assert (row.turns, row.segments, row.tokens, row.sampled) == (3, 1, 36, 12)
    assert (row.prompted, row.cached) == (8 + 20 + 32, 0 + 12 + 24)
    assert (row.reward, row.rewards, row.metrics) == (1.0, {"correct": 1.0}, {"steps": 3.0})


def test_iterating_loads_no_trajectory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, *[[played(index=index)] for index in range(5)])
    loaded: list[str] = []

    def counted(connection: object, row: object, decode: object) -> Trajectory:
        loaded.append("one")
        return load_trajectory(connection, row, decode)  # type: ignore[arg-type]

    monkeypatch.setattr(reader, "load_trajectory", counted)
    with RunFile(path) as run_file:
        assert len(list(run_file)) == len(run_file) == 5
        assert len(next(run_file.groups()).rows) == 5
        assert loaded == []
        trajectories = run_file.trajectories()
        next(trajectories)
        assert loaded == ["one"]  # the others are not loaded before they are requested


def test_pages_give_every_row_once_in_the_order_of_commits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "PAGE_SIZE", 2)
    write(path, *[[played(f"t{9 - number}")] for number in range(9)])
    with RunFile(path) as run_file:
        assert [row.task_id for row in run_file] == [f"t{9 - number}" for number in range(9)]
        assert [group.task_id for group in run_file.groups()] == [f"t{9 - number}" for number in range(9)]
        assert [trajectory.task.id for trajectory in run_file.trajectories()] == [f"t{9 - n}" for n in range(9)]


def test_rows_are_selected_by_their_values(path: Path) -> None:
    write(
        path,
        [played("a"), played("a", agent="user", trained=False)],
        [played("b", outcome=Outcome.TURN_LIMIT)],
        [played("c", outcome=Outcome.ENGINE_ERROR)],
    )
    with RunFile(path) as run_file:
        assert [row.task_id for row in run_file.rows(task_id="b")] == ["b"]
        assert [row.task_id for row in run_file.rows(outcome="engine_error")] == ["c"]
        assert [row.agent for row in run_file.rows(trained=False)] == ["user"]
        assert [row.agent for row in run_file.rows(trained=None, agent="user")] == ["user"]
        assert run_file.outcomes() == {Outcome.COMPLETED: 1, Outcome.TURN_LIMIT: 1, Outcome.ENGINE_ERROR: 1}


def test_a_failed_episode_has_no_reward(path: Path) -> None:
    write(path, [played(outcome=Outcome.ENV_ERROR)])
    with RunFile(path) as run_file:
        (row,) = run_file
        assert row.reward is None
        assert run_file.trajectory(row).reward is None


def test_a_trajectory_is_found_by_row_id_and_agent(path: Path) -> None:
    main, user = played("a"), played("a", agent="user", trained=False)
    write(path, [user, main])
    with RunFile(path) as run_file:
        assert_equal(run_file.trajectory("a-0-0"), main)  # the trained agent
        assert_equal(run_file.trajectory("a-0-0", agent="user"), user)
        for row in run_file.rows(trained=None):
            assert run_file.trajectory(row).agent == row.agent


def test_an_id_stands_for_the_last_attempt_and_a_row_for_its_own(path: Path) -> None:
    write(path, [played(outcome=Outcome.CANCELLED)], [played(attempt=1)])
    with RunFile(path) as run_file:
        assert run_file.trajectory("sum-0-0").attempt == 1
        (first,) = run_file.rows(superseded=True)
        assert run_file.trajectory(first).attempt == 0


def test_missing_episodes_are_refused_with_existing_ones(path: Path) -> None:
    write(path, [played("a"), played("a", agent="user", trained=False)])
    with RunFile(path) as run_file:
        with pytest.raises(RunFileError, match=r"episode 'b' does not exist; an existing id is, for example, 'a-0-0'"):
            run_file.trajectory("b")
        with pytest.raises(RunFileError, match=r"no agent 'judge'; its agents are main, user"):
            run_file.trajectory("a-0-0", agent="judge")


def test_groups_are_by_task_visit_and_agent(path: Path) -> None:
    write(
        path,
        [played("a", 1), played("a", 1, agent="rival")],
        [played("b", 0)],
        [played("a", 0), played("a", 0, agent="rival")],
        [played("a", 0, visit=1)],
        [played("b", 1, outcome=Outcome.CANCELLED)],
        group_size=2,
    )
    with RunFile(path) as run_file:
        groups = [(g.task_id, g.visit, g.agent, [r.index for r in g.rows], g.complete) for g in run_file.groups()]
    assert groups == [
        ("a", 0, "main", [0, 1], True),
        ("a", 0, "rival", [0, 1], True),
        ("b", 0, "main", [0, 1], False),  # one episode is to be played again
        ("a", 1, "main", [0], False),
    ]


@dataclass(frozen=True)
class Case(Task):
    level: int = 0


def test_tasks_are_read_back_as_the_class_that_is_given(path: Path) -> None:
    case = Case("a", "Hello", level=3)
    write(path, [played(case)])
    with RunFile(path) as run_file:
        (row,) = run_file
        assert run_file.task(row) == Task("a", "Hello", info={"level": 3})
        assert run_file.trajectory(row).task.info == {"level": 3}
    with RunFile(path, task_class=Case) as run_file:
        assert run_file.trajectory(row).task == case


def test_rows_are_small() -> None:
    assert not {"ids", "messages", "logprobs"} & {field.name for field in dataclasses.fields(EpisodeRow)}


@pytest.mark.anyio
async def test_reader_of_a_growing_file_does_not_stop_the_writer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "PAGE_SIZE", 2)
    async with RunWriter(path, header()) as writer:
        await writer.commit_episode([played("t0")])
        with RunFile(path) as run_file:
            rows = iter(run_file)
            seen = [next(rows).task_id]
            for number in range(1, 6):
                await writer.commit_episode([played(f"t{number}")])
                assert len(run_file) == number + 1
                seen.append(next(rows).task_id)
            assert seen == [f"t{number}" for number in range(6)]
    with RunFile(path) as run_file:  # closing it next to a reader leaves a complete file
        assert len(run_file) == 6


@pytest.mark.anyio
async def test_open_reader_can_still_read_after_the_writer_closes(path: Path) -> None:
    writer = RunWriter(path, header())
    await writer.__aenter__()
    await writer.commit_episode([played()])
    with RunFile(path) as run_file:
        await writer.__aexit__(None, None, None)
        assert len(run_file) == 1
        async with RunWriter(path, header()) as again:
            await again.commit_episode([played(index=1)])
            assert len(run_file) == 2


DAMAGES = {
    "log-probabilities are short": (
        "UPDATE segments SET logprobs = substr(logprobs, 5)",
        "segment 0 has 7 log-probabilities for 8 sampled ids",
    ),
    "log-probabilities are long": (
        "UPDATE segments SET logprobs = CAST(logprobs || substr(logprobs, 5) AS BLOB)",
        "segment 0 has 15 log-probabilities for 8 sampled ids",
    ),
    "half a log-probability": ("UPDATE segments SET logprobs = substr(logprobs, 3)", "ValueError: bytes length"),
    "ids are short": (
        "UPDATE segments SET ids = substr(ids, 5)",
        "segment 0 has 23 ids, but its column `sources` is for 24",
    ),
    "sources are short": (
        "UPDATE segments SET sources = '[[0, 8], [2, 4]]', logprobs = NULL",
        "segment 0 has 24 ids, but its column `sources` is for 12",
    ),
    "an unknown source": ("UPDATE segments SET sources = '[[1000, 24]]'", "OverflowError"),
    "messages are not JSON": ("UPDATE segments SET messages = '['", "JSONDecodeError"),
    "a segment is gone": ("DELETE FROM segments", "IndexError"),
    "the task is gone": ("DELETE FROM tasks", "its task 'a' (visit 0) is missing"),
    "an outcome that there is not": ("UPDATE episodes SET outcome = 'fine'", "'fine' is not a valid Outcome"),
}


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("DELETE FROM tasks", "its row is missing"),
        ("UPDATE tasks SET task = '['", "JSONDecodeError"),
        ("UPDATE tasks SET task = '[]'", "TypeError"),
        ("UPDATE tasks SET task = '{}'", "KeyError"),
    ],
)
def test_damaged_task_is_refused_by_name(path: Path, statement: str, said: str) -> None:
    write(path, [played("a", 0)])
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute(statement).rowcount == 1
        connection.commit()
    with RunFile(path) as run_file:
        (row,) = run_file
        with pytest.raises(RunFileError, match=r"task 'a' \(visit 0\) is damaged") as refused:
            run_file.task(row)
    assert str(path) in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_episode_that_is_damaged_is_refused_by_name(path: Path, damage: str) -> None:
    write(path, [played("a", 0)])
    statement, said = DAMAGES[damage]
    with RunFile(path) as run_file:
        (row,) = run_file
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute(statement).rowcount == 1
        connection.commit()

    async def resumed() -> list[Trajectory]:
        async with RunWriter(path, header()) as writer:
            return list(writer.stored())

    with RunFile(path) as run_file:
        for read in (
            lambda: run_file.trajectory(row),
            lambda: list(run_file.trajectories()),
            lambda: anyio.run(resumed),
        ):
            with pytest.raises(RunFileError, match="episode 'a-0-0' of agent 'main' is damaged") as refused:
                read()
            assert str(path) in str(refused.value)
            assert said in str(refused.value)
