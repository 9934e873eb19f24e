"""Weight updates during a run are rows of its file, with the results of their proofs."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from runner import Concurrency, Run, RunFile, ScriptedEngine, WeightProof
from tests.playing import Plain, tasks

pytestmark = pytest.mark.anyio

IDS = list(range(3, 43))


def scores(ids: Any) -> list[float]:
    return [-2.0 - each / 100 for each in ids[1:]]


def proof() -> WeightProof:
    return WeightProof(IDS, [each + 0.0002 for each in scores(IDS)])


async def played(file: Path, count: int, *updates: WeightProof | None) -> None:
    """Play some tasks, with a weight update after each of the first trajectories."""
    engine, left = ScriptedEngine("Yes", scores=scores), list(updates)
    async with Run(Plain, engine, file=file, tasks=tasks(count), concurrency=Concurrency(episodes=1)) as run:
        async for _ in run:
            if left:
                await engine.update_weights("any", proof=left.pop(0))


async def test_updates_are_kept_with_the_figures_of_their_proofs(tmp_path: Path) -> None:
    await played(tmp_path / "run.db", 40, proof(), None, proof())
    with RunFile(tmp_path / "run.db") as file:
        rows = file.weights()
    assert [(row.launch, row.engine, row.version, row.proof_ids) for row in rows] == [
        (1, 0, "1", 39),
        (1, 0, "2", None),
        (1, 0, "3", 39),
    ]
    assert rows[0].proof_median == pytest.approx(0.0002)
    assert rows[0].proof_largest == pytest.approx(0.0002)
    assert (rows[1].proof_median, rows[1].proof_largest) == (None, None)
    assert rows[0].time <= rows[1].time <= rows[2].time


async def test_an_adapter_is_not_taken_for_new_weights(tmp_path: Path) -> None:
    engine = ScriptedEngine("Yes")
    async with Run(Plain, engine, file=tmp_path / "run.db", tasks=tasks(3)) as run:
        async for trajectory in run:
            await engine.add_adapter(f"a{trajectory.task.id}", "any")
    with RunFile(tmp_path / "run.db") as file:
        assert file.weights() == []


async def test_file_without_the_weights_table_is_read_and_resumed(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    await played(path, 2)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE weights")
        connection.commit()
    with RunFile(path) as file:
        assert file.weights() == []
    await played(path, 40, proof())
    with RunFile(path) as file:
        assert [(row.launch, row.version) for row in file.weights()] == [(2, "1")]
