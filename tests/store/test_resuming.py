"""Resumed runs: stored episodes, and changes of the configuration that are allowed."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from runner.errors import ConfigurationChanged, RunFileError
from runner.options import Sampling
from runner.store.reader import RunFile
from runner.store.writer import RunWriter
from runner.trajectory import Trajectory
from tests.store.building import assert_equal, header, played
from tests.store.claiming import claims

pytestmark = pytest.mark.anyio


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "sums-001.db"


# --- resuming


async def test_stored_returns_earlier_trajectories_in_commit_order(path: Path) -> None:
    async with RunWriter(path, header()) as writer:
        assert not writer.resumed
        assert list(writer.stored()) == []
        for name in ("b", "a"):
            await writer.commit_episode([played(name), played(name, agent="user", trained=False)])
    async with RunWriter(path, header()) as writer:
        assert writer.resumed
        await writer.commit_episode([played("c")])
        assert [(t.task.id, t.agent) for t in writer.stored()] == [
            ("b", "main"),
            ("b", "user"),
            ("a", "main"),
            ("a", "user"),
        ]


async def test_changed_configuration_is_refused_with_a_diff(path: Path) -> None:
    async with RunWriter(path, header(sampling={"temperature": 1.0}, seed=3)) as writer:
        await writer.commit_episode([played()])
    before = path.read_bytes()  # noqa: ASYNC240  # the file is small, and no other task waits
    with pytest.raises(ConfigurationChanged) as caught:
        await claims(path, sampling={"temperature": 0.0}, seed=3)
    assert "sampling.temperature: 1.0 -> 0.0" in str(caught.value)
    assert "seed" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == before  # noqa: ASYNC240  # the file is small, and no other task waits


async def test_changed_versions_warn_and_sizes_are_free(path: Path) -> None:
    await claims(path, versions={"vllm": "0.31"}, concurrency={"episodes": 8})
    async with RunWriter(path, header(versions={"vllm": "0.32"}, concurrency={"episodes": 64})) as writer:
        assert writer.warnings == ('versions.vllm: "0.31" -> "0.32"',)
        assert writer.header.versions == {"vllm": "0.31"}  # the file keeps the header with which it was begun


async def test_resumed_run_uses_the_clock_of_the_file(path: Path) -> None:
    first = header().clock
    await claims(path)
    async with RunWriter(path, header(clock=first.replace(year=2030))) as writer:
        assert writer.header.clock == first


def with_tools(task: str, *names: str) -> Trajectory:
    trajectory = played(task)
    trajectory.turns[-1].thinking = True
    trajectory.turns[-1].tool_choice = "add"
    trajectory.segments[0].tools = [{"type": "function", "function": {"name": name}} for name in names]
    return trajectory


async def test_tools_of_segments_are_stored_once_in_order(path: Path) -> None:
    written = [with_tools("a", "add", "sub"), with_tools("b", "add", "sub"), with_tools("c", "sub", "add"), played("d")]
    async with RunWriter(path, header()) as writer:
        for trajectory in written:
            await writer.commit_episode([trajectory])
    with RunFile(path) as run_file:
        for trajectory in written:
            assert_equal(run_file.trajectory(trajectory.id), trajectory)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM tools").fetchone() == (2,)


def warm(task: str, temperature: float) -> Trajectory:
    trajectory = played(task)
    for turn in trajectory.turns:
        turn.resampled = 3
        turn.sampling = Sampling(temperature=temperature, stop=("END",), adapter="poet").over(Sampling.defaults())
    return trajectory


async def test_equal_sampling_of_turns_is_stored_once(path: Path) -> None:
    written = [warm("a", 0.5), warm("b", 0.5), warm("c", 0.7), played("d")]
    async with RunWriter(path, header()) as writer:
        for trajectory in written:
            await writer.commit_episode([trajectory])
    with RunFile(path) as run_file:
        for trajectory in written:
            assert_equal(run_file.trajectory(trajectory.id), trajectory)
        assert run_file.trajectory("b-0-0").turns[0].sampling == written[1].turns[0].sampling
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM samplings").fetchone() == (2,)


async def test_first_launch_is_of_the_process_that_began_the_run(path: Path) -> None:
    async with RunWriter(path, header()):
        pass
    async with RunWriter(path, header(created=header().created.replace(year=2030))):
        pass
    with RunFile(path) as run_file:
        assert run_file.first_launch() == header()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM launches WHERE number = 1")
        connection.commit()
    with RunFile(path) as run_file:
        assert run_file.first_launch() is None


async def test_damaged_header_is_refused(path: Path) -> None:
    async with RunWriter(path, header()):
        pass
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE run SET header = substr(header, 2)")
        connection.commit()
    with pytest.raises(RunFileError, match="header is damaged"):
        RunFile(path)


async def test_finished_run_is_complete_and_a_playing_one_is_not(path: Path) -> None:
    async with RunWriter(path, header()) as writer:
        await writer.commit_episode([played("a")])
        with RunFile(path) as run_file:
            assert (run_file.complete, run_file.summary()["seconds"]) == (False, None)
        await writer.finish({"episodes": 1, "seconds": 7.5})
    with RunFile(path) as run_file:
        assert (run_file.complete, run_file.summary()["seconds"]) == (True, 7.5)
    await claims(path, played("a").task)
    with RunFile(path) as run_file:
        assert run_file.complete  # nothing was added
    async with RunWriter(path, header()) as writer:
        await writer.commit_episode([played("b")])
        with RunFile(path) as run_file:
            assert not run_file.complete
