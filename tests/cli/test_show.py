"""`deltarunner show`: what it says of an episode with several agents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from typer.testing import CliRunner

from runner.cli.app import app
from runner.testing import ScriptedEngine
from tests.playing import Plain, play_all
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
def test_a_transcript_names_the_other_agents_of_the_episode_and_how_to_see_them(file: Path, episode: str) -> None:
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


def test_an_episode_of_one_agent_speaks_of_no_others(tmp_path: Path) -> None:
    async def alone() -> None:
        await play_all(Plain, "Yes", file=tmp_path / "run.db")

    anyio.run(alone)
    assert "Other agents" not in show(tmp_path / "run.db", "t0#0")
