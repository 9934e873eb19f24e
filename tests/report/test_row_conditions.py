"""`deltarunner show` with conditions, sorting, slices and thresholds."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from runner import Task
from runner.cli.app import app
from runner.errors import BadOption
from runner.report.row_conditions import check_thresholds, row_condition
from runner.trajectory import Outcome
from tests.report.playing import store
from tests.store.building import played

pytestmark = pytest.mark.anyio


@pytest.fixture
async def file(tmp_path: Path) -> Path:
    tasks = [Task(id=f"t{n}", prompt="?", info={"level": ("easy", "hard")[n % 2]}) for n in range(4)]
    episodes = [played(task, reward=reward) for task, reward in zip(tasks, (1.0, 0.25, 0.5, 0.0), strict=True)]
    broken = played(Task(id="t4", prompt="?", info={"level": "hard"}), outcome=Outcome.ENV_ERROR)
    broken.error = "ConnectionError: timeout (in answer, a.py:3)"
    return await store(tmp_path / "run.db", [*episodes, broken])


def show(file: Path, *options: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["show", str(file), *options])
    assert result.exit_code == code, result.output
    return result.output


def ids(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if line.startswith("t") and "-0-0" in line.split()[0]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--failed"], ["t4"]),
        (["--where", "reward < 0.5"], ["t1", "t3"]),
        (["--where", "reward>=0.25", "--where", "task_id != t0"], ["t1", "t2"]),
        (["--where", "error ~ TIMEOUT"], ["t4"]),
        (["--where", "outcome = env_error"], ["t4"]),
        (["--where", "correct == 0.5"], ["t2"]),
        (["--where", "reward = none"], ["t4"]),
        (["--sort", "reward"], ["t3", "t1", "t2", "t0", "t4"]),
        (["--sort", "-reward"], ["t0", "t2", "t1", "t3", "t4"]),
    ],
)
async def test_show_selects_and_sorts_episodes(file: Path, options: list[str], expected: list[str]) -> None:
    assert ids(show(file, *options)) == [f"{name}-0-0" for name in expected]


async def test_show_by_a_field_has_its_mean_rewards(file: Path) -> None:
    lines = [line.split() for line in show(file, "--by", "level").splitlines()]
    rows = {line[0]: line[1:] for line in lines if line and line[0] in ("easy", "hard")}
    assert (rows["easy"][0], rows["easy"][-2:]) == ("0.750", ["2", "2"])
    assert (rows["hard"][0], rows["hard"][-3:]) == ("0.125", ["33%", "3", "3"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--where", "reward"], "give FIELD OPERATOR VALUE"),
        (["--where", "colour = red"], "colour: unknown; give one of id"),
        (["--where", "reward < much"], "reward is a number"),
        (["--sort", "colour"], "colour: unknown"),
        (["--by", "colour"], "no task of these episodes has this field; give one of answer, id, level."),
        (["--fail-under", "reward"], "give NAME=NUMBER"),
        (["--fail-under", "colour=1"], "unknown; give one of"),
        (["t0", "--failed"], "leave the episode out"),
    ],
)
async def test_wrong_conditions_are_refused_in_words(file: Path, options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["show", str(file), *options])
    assert result.exit_code == 2
    assert words in result.output
    assert "completed" not in result.stdout  # refused before a table is printed


async def test_condition_that_matches_no_episode_is_reported(file: Path) -> None:
    assert "No episode matches the filters." in show(file, "--where", "reward > 5")


async def test_fail_under_ends_with_exit_code_4_and_the_reason(file: Path) -> None:
    assert "reward is 0.4375, below 0.8" in show(file, "--fail-under", "reward=0.8", code=4)
    show(file, "--fail-under", "reward=0.4", "--fail-under", "pass@1=0.2", "--fail-under", "correct=0.1")
    assert "pass^1 is 0.2, below 0.5" in show(file, "--fail-under", "pass^1=0.5", code=4)


async def test_transcript_names_previous_and_next_episode(file: Path) -> None:
    assert "previous: t0-0-0 · next: t2-0-0" in show(file, "t1-0-0")
    assert "next: t1-0-0" in show(file, "t0-0-0")


def test_result_without_a_value_is_below_every_threshold() -> None:
    empty = {"reward": {"mean": None}, "rewards": {}, "metrics": {}, "pass_at": {}, "pass_all": {}}
    assert check_thresholds(empty, ["reward=0"]) == ["reward has no value, and the threshold is 0 (--fail-under)"]
    with pytest.raises(BadOption):
        row_condition("< 3")
