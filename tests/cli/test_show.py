"""`deltarunner show`: its output for an episode with several agents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from typer.testing import CliRunner

from runner import Task, reward
from runner.cli.app import app
from runner.cli.run import run_command
from runner.cli.settings import RunSettings
from runner.testing import ScriptedEngine
from tests.playing import Plain, play_all, tasks
from tests.verifying import play


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three episodes of three agents."""
    path = tmp_path_factory.mktemp("show") / "run.db"
    anyio.run(play, path, "pythonic")
    return path


def show(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["show", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("episode", ["t1#0", "t1"])
def test_transcript_names_other_agents_and_the_option(file: Path, episode: str) -> None:
    assert "Other agents of this episode: user (2 turns), judge (2 turns). --agent NAME shows one." in show(
        file, episode
    )
    assert "main (15 turns), judge (2 turns)" in show(file, episode, "--agent", "user")


def test_the_sizes_of_the_engine_are_among_the_settings(tmp_path: Path) -> None:
    class Spread(ScriptedEngine):
        def describe(self) -> dict[str, Any]:
            return {**super().describe(), "parallel": {"data": 2, "tensor": 4, "pipeline": 1}}

    async def alone() -> None:
        await play_all(Plain, Spread("Yes", record=True), file=tmp_path / "run.db")

    anyio.run(alone)
    shown = show(tmp_path / "run.db")
    assert "data_parallel_size=2 · tensor_parallel_size=4" in shown
    assert "pipeline" not in shown


def test_solved_share_counts_failed_episodes_as_not_solved(tmp_path: Path) -> None:
    class Half(Plain):
        def tasks(self) -> list[Task]:
            return tasks(4)

        @reward
        def correct(self) -> float:
            return 1e300 if self.task.id != "t0" else 1 / 0

    async def alone() -> None:
        await play_all(Half, "Yes", file=tmp_path / "run.db", group_size=2, breaker=1.0)

    anyio.run(alone)
    shown = show(tmp_path / "run.db")
    assert "pass@1 0.750 · pass@2 0.750  (failed episodes count as not solved)" in shown
    assert "1e+300 ± 0  (6 episodes of 3 tasks)" in shown


def test_an_episode_of_one_agent_speaks_of_no_others(tmp_path: Path) -> None:
    async def alone() -> None:
        await play_all(Plain, "Yes", file=tmp_path / "run.db")

    anyio.run(alone)
    assert "Other agents" not in show(tmp_path / "run.db", "t0#0")


SETTINGS = """
from runner import Environment, Task, reward

class Long(Environment):
    def __init__(self, rows=[{"question": f"What is {n}?"} for n in range(9)]):
        self.rows = rows

    def tasks(self):
        return [Task(id=id, prompt="hello") for id in ("plain", "-rf", "--help", "-n")]

    @reward
    def right(self):
        return 1
"""


@pytest.fixture
def dashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of tasks whose ids look like options, with a long setting."""
    (tmp_path / "settings.py").write_text(SETTINGS)
    monkeypatch.chdir(tmp_path)
    engine = ScriptedEngine({"main": ["a long reply"] * 4, "other": "x"})
    settings = RunSettings(environment="settings.py:Long", file=Path("w.db"))
    assert run_command(settings, lambda _: engine) == 0
    return Path("w.db")


def test_the_first_lines_are_short_whatever_the_settings_hold(dashed: Path) -> None:
    first, second, *_ = show(dashed).splitlines()
    # Another test may have loaded a module with this name.
    assert first.startswith(("settings:Long on the engine 'scripted', 20", "settings_environment:Long on the engine"))
    assert len(first) < 80
    assert len(second) < 160
    assert "rows=[{'question': 'What is 0?'}," in second


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize("id", ["-rf#0", "--help#0", "-n#0", "-rf"])
@pytest.mark.parametrize("options", [[], ["--tokens"], ["--brief", "-n", "3"]])
def test_an_id_that_begins_with_a_dash_is_an_id(dashed: Path, id: str, options: list[str]) -> None:
    assert f"{id.removesuffix('#0')}#0  completed" in show(dashed, id, *options)
    assert f"{id.removesuffix('#0')}#0  completed" in show(dashed, *options, "--", id)


def test_a_misspelt_option_of_show_is_still_an_option(dashed: Path) -> None:
    result = CliRunner().invoke(app, ["show", str(dashed), "--tokns"])
    assert (result.exit_code, "--tokens" in result.output) == (2, True)
    assert show(dashed, "-n2") == show(dashed, "--limit", "2")
