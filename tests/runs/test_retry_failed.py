"""Failed episodes of a run file are repeated only with `retry_failed`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from runner import BadOption, Conversation, Environment, Group, Outcome, Run, RunFile, Task, group_reward, reward
from runner.cli.app import app
from runner.cli.run import run_command
from runner.cli.settings import RunSettings
from runner.options import Concurrency
from runner.store.reader import EpisodeRow
from runner.testing import ScriptedEngine, assert_exact
from tests.playing import Plain, recording, tasks

pytestmark = pytest.mark.slow

FAILING: set[str] = set()
"""Episodes whose judge is unavailable."""


@pytest.fixture(autouse=True)
def _everything_works() -> Iterator[None]:
    FAILING.clear()
    yield
    FAILING.clear()


class Judged(Plain):
    """Environment with the reward of a judge that may be unavailable."""

    @reward
    def correct(self) -> float:
        if self.episode.id in FAILING:
            raise ConnectionError("503")
        return 1.0


class Compared(Judged):
    @group_reward
    def size(self, group: Group) -> list[int]:
        return [len(group.trajectories)] * len(group.trajectories)


def rows(file: Path, **choice: Any) -> list[EpisodeRow]:
    with RunFile(file) as stored:
        return list(stored.rows(**choice))


async def played(environment: type[Environment], file: Path, **options: Any) -> tuple[list[str], Run]:
    async with Run(environment, recording(lambda turn: "Yes"), file=file, breaker=1, **options) as run:
        trajectories = [trajectory async for trajectory in run]
    for trajectory in trajectories:
        assert_exact(trajectory)
    return sorted(trajectory.id for trajectory in trajectories), run


@pytest.mark.anyio
async def test_retry_failed_replaces_failed_episodes(
    tmp_path: Path,
) -> None:
    file = tmp_path / "run.db"
    FAILING.update({"t1#0", "t4#0"})
    await played(Judged, file, tasks=tasks(6))
    FAILING.clear()
    assert (await played(Judged, file, tasks=tasks(6)))[0] == []
    again, run = await played(Judged, file, tasks=tasks(6), retry_failed=True)
    assert again == ["t1#0", "t4#0"]
    assert run.summary.outcomes == {Outcome.COMPLETED: 6}
    assert (run.summary.reward.count, run.summary.turns) == (6, 6)
    with RunFile(file) as stored:
        assert stored.complete
        summary = stored.summary()
        assert summary is not None
        assert (summary["episodes"], summary["failed"]) == (6, 0)
        assert stored.outcomes() == {Outcome.COMPLETED: 6}
        earlier = [(row.id, row.attempt, row.outcome, row.reward) for row in stored.rows(superseded=True)]
    assert sorted(earlier) == [(id, 0, Outcome.ENV_ERROR, None) for id in again]
    replaced = {row.id: row for row in rows(file)}
    assert {id: (replaced[id].attempt, replaced[id].reward) for id in again} == dict.fromkeys(again, (1, 1.0))
    assert (await played(Judged, file, tasks=tasks(6), retry_failed=True))[0] == []


@pytest.mark.anyio
async def test_repeated_failure_counts_once_and_can_be_retried(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    FAILING.add("t1#0")
    for attempt in range(3):
        _, run = await played(Judged, file, tasks=tasks(3), retry_failed=True)
        assert run.summary.outcomes == {Outcome.COMPLETED: 2, Outcome.ENV_ERROR: 1}
        assert [row.attempt for row in rows(file, outcome=Outcome.ENV_ERROR)] == [attempt]
    FAILING.clear()
    assert (await played(Judged, file, tasks=tasks(3), retry_failed=True))[0] == ["t1#0"]


@pytest.mark.anyio
async def test_group_is_rescored_with_the_repeated_episode(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    options: dict[str, Any] = {"tasks": tasks(2), "group_size": 3}
    FAILING.add("t0#1")
    await played(Compared, file, **options)
    assert {row.id: row.reward for row in rows(file, task_id="t0")} == {"t0#0": 3.0, "t0#1": None, "t0#2": 3.0}
    FAILING.clear()
    async with Run(Compared, recording("Yes"), file=file, retry_failed=True, **options) as run:
        groups = [group async for group in run.groups()]
    assert [[(t.id, t.reward) for t in g.trajectories] for g in groups] == [[(f"t0#{n}", 4.0) for n in range(3)]]
    assert groups[0].complete
    assert {row.reward for row in rows(file)} == {4.0}
    assert run.summary.reward.as_dict() == {"mean": 4.0, "standard_error": 0.0, "count": 6, "tasks": 2}
    assert run.summary.solved == {(3, 3): 2}


@pytest.mark.anyio
@pytest.mark.parametrize("environment", [Judged, Compared])
async def test_interrupted_retry_is_resumed_by_the_plain_command(
    tmp_path: Path, environment: type[Environment]
) -> None:
    file = tmp_path / "run.db"
    options: dict[str, Any] = {"tasks": tasks(3), "group_size": 2}
    FAILING.update({"t0#0", "t2#1"})
    await played(environment, file, **options)
    FAILING.clear()
    async with Run(
        environment, recording("Yes"), file=file, retry_failed=True, concurrency=Concurrency(episodes=1), **options
    ) as run:
        run.drain()
    with RunFile(file) as stored:
        assert (stored.complete, stored.outcomes()) == (False, {Outcome.COMPLETED: 4})
    ids, run = await played(environment, file, **options)
    assert ids == ["t0#0", "t2#1"]
    assert (run.summary.episodes, run.summary.reward.count) == (6, 6)
    with RunFile(file) as stored:
        assert stored.complete


@pytest.mark.anyio
async def test_run_is_incomplete_until_failed_tasks_are_given_again(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    FAILING.update({"t0#0", "t2#0"})
    await played(Judged, file, tasks=tasks(3))
    FAILING.clear()
    assert (await played(Judged, file, tasks=tasks(2), retry_failed=True))[0] == ["t0#0"]
    with RunFile(file) as stored:
        assert not stored.complete
    assert (await played(Judged, file, tasks=tasks(3)))[0] == ["t2#0"]
    with RunFile(file) as stored:
        assert stored.complete


class Rewriting(Plain):
    """Environment whose policy at first refuses prompts without an exact bridge."""

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate()
        if self.episode.id in FAILING:
            conversation.add({"role": "assistant", "content": "I said so."}, "And?")
            await conversation.generate()


@pytest.mark.anyio
async def test_an_episode_without_an_exact_bridge_is_played_again_too(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    FAILING.add("t0#0")
    await played(Rewriting, file, history="refuse")
    assert [row.outcome for row in rows(file)] == [Outcome.TOKEN_ERROR]
    FAILING.clear()
    assert (await played(Rewriting, file, history="refuse", retry_failed=True))[0] == ["t0#0"]
    assert [row.outcome for row in rows(file)] == [Outcome.COMPLETED]


@pytest.mark.anyio
async def test_random_numbers_do_not_depend_on_the_attempt(tmp_path: Path) -> None:
    FAILING.add("t0#0")
    await played(Judged, tmp_path / "run.db")
    FAILING.clear()
    await played(Judged, tmp_path / "run.db", retry_failed=True)
    with RunFile(tmp_path / "run.db") as stored:
        first, again = [stored.trajectory(row) for row in stored.rows(superseded=None)]
    assert (first.attempt, again.attempt) == (0, 1)
    assert [turn.seed for turn in first.turns] == [turn.seed for turn in again.turns]


def test_retry_failed_needs_a_file() -> None:
    with pytest.raises(BadOption, match="the failed episodes are in a run file; give file="):
        Run(Judged, ScriptedEngine("Yes"), retry_failed=True)
    unknown: Any = "yes"
    with pytest.raises(BadOption, match="give True or False"):
        Run(Judged, ScriptedEngine("Yes"), file="run.db", retry_failed=unknown)


# --- the command line


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(**options: Any) -> int:
    settings = RunSettings(environment="tests.runs.test_retry_failed:Commanded", **options)
    return run_command(settings, lambda _: ScriptedEngine(lambda turn: "Yes"))


class Commanded(Judged):
    def tasks(self) -> list[Task]:
        return tasks(4)


def test_retry_failed_resumes_a_complete_file(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    FAILING.add("t3#0")
    assert command() == 0
    FAILING.clear()
    assert "the same command with --retry-failed" in capfd.readouterr().out
    assert command(retry_failed=True) == 0
    assert "runs/Commanded-001.db: resuming, 3 episodes done" in capfd.readouterr().out
    assert [path.name for path in sorted(folder.glob("runs/*.db"))] == ["Commanded-001.db"]
    assert [row.outcome for row in rows(folder / "runs" / "Commanded-001.db")] == [Outcome.COMPLETED] * 4
    assert command() == 0
    assert len(list(folder.glob("runs/*.db"))) == 2


def test_retry_failed_of_a_single_task_needs_a_named_file(folder: Path) -> None:
    FAILING.update({"t1#0", "t3#0"})
    file = folder / "mine.db"
    assert command(file=file) == 0
    FAILING.clear()
    with pytest.raises(BadOption, match="--retry-failed --task"):
        command(retry_failed=True, task="t1")
    assert command(file=file, retry_failed=True, task="t1") == 0
    assert {row.id: row.attempt for row in rows(file)} == {"t0#0": 0, "t1#0": 1, "t2#0": 0}
    assert command(file=file, retry_failed=True) == 0
    assert {row.id: row.attempt for row in rows(file)} == {"t0#0": 0, "t1#0": 1, "t2#0": 0, "t3#0": 1}
    assert CliRunner().invoke(app, ["verify", str(file)]).exit_code == 0


def test_help_names_the_option() -> None:
    assert "--retry-failed" in CliRunner().invoke(app, ["run", "--help"]).output
