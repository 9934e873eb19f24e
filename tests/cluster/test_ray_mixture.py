"""Several environments in one run on workers of Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from runner import RayEngines, Run, Trajectory
from runner.interop import Dataset, Mixture
from tests.cluster.ray_cluster import Standing
from tests.cluster.ray_games import GROUP_SIZE, Crowd, crowd
from tests.faults.comparing import by_key, stored

pytestmark = [pytest.mark.anyio, pytest.mark.ray, pytest.mark.sample_units("on Ray")]

WATCHDOG_SECONDS = 600.0


async def played(engine: Any, file: Path) -> list[Trajectory]:
    rows = [{"prompt": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(4)]
    sums = Dataset(rows, answer="{answer}", score="contains")
    with anyio.fail_after(WATCHDOG_SECONDS):
        async with Run(
            Mixture({"crowd": Crowd(4), "sums": (sums, 2)}), engine, group_size=GROUP_SIZE, file=file
        ) as run:
            return [each async for each in run]


async def test_a_mixture_on_two_workers_is_that_of_one_process(cluster: Standing, tmp_path: Path) -> None:
    alone = await played(crowd(), tmp_path / "alone.db")
    many = await played(RayEngines(crowd(), workers=2), tmp_path / "many.db")
    assert {each.task.id.partition("/")[0] for each in many} == {"crowd", "sums"}
    assert by_key(many) == by_key(alone)
    assert stored(tmp_path / "many.db") == stored(tmp_path / "alone.db")
