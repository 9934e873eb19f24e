"""`RunFile.frame()`: episodes, turns and tokens as Arrow tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner import RunFile
from runner.errors import BadOption
from runner.trajectory import Outcome
from tests.report.playing import store
from tests.store.building import played

pytestmark = pytest.mark.anyio


async def test_frames_have_episodes_turns_and_tokens(tmp_path: Path) -> None:
    odd = played("odd \ud800 text")
    odd.metrics = {"length": 3.0}
    episodes = [played("x", reward=0.5), odd, played("y", outcome=Outcome.ENV_ERROR)]
    path = await store(tmp_path / "run.db", episodes)
    with RunFile(path) as run_file:
        rows = run_file.frame().to_pylist()
        assert [row["reward"] for row in rows] == [0.5, 1.0, None]
        assert [row["metrics.length"] for row in rows] == [None, 3.0, None]
        assert rows[2]["outcome"] == "env_error"
        turns = run_file.frame("turns")
        assert (turns.num_rows, turns["junction"].to_pylist()[:2]) == (6, [None, "appended"])
        tokens = run_file.frame("tokens").to_pylist()
        trajectory = run_file.trajectory(next(iter(run_file)))
        own = [row for row in tokens if row["task_id"] == "x"]
        assert [row["token_id"] for row in own] == trajectory.segments[0].log.ids.tolist()
        assert [row["mask"] for row in own] == trajectory.segments[0].log.mask().tolist()
        assert {row["version"] for row in own if row["mask"]} == {"v1"}
        assert {row["logprob"] for row in own if not row["mask"]} == {None}
        with pytest.raises(BadOption, match="give one of episodes, turns, tokens"):
            run_file.frame("words")


async def test_frames_of_an_untrained_file_have_all_of_it(tmp_path: Path) -> None:
    untrained = [played("x", trained=False), played("y", trained=False)]
    with RunFile(await store(tmp_path / "run.db", untrained)) as run_file:
        assert run_file.frame()["trained"].to_pylist() == [False, False]
        assert [run_file.frame(kind).num_rows for kind in ("turns", "tokens")] == [4, 48]


async def test_frames_of_an_empty_file_are_empty(tmp_path: Path) -> None:
    with RunFile(await store(tmp_path / "run.db", [])) as run_file:
        assert [run_file.frame(kind).num_rows for kind in ("episodes", "turns", "tokens")] == [0, 0, 0]
