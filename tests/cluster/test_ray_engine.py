"""One engine in an actor of Ray, used by a run and by its workers."""

from __future__ import annotations

import os
import signal

import pytest

from runner import BadOption, EngineDead, RayEngine, RayEngines, ScriptedEngine, Trajectory
from tests.cluster.playing import Dice, Judged, compared, dice_engine, game_tasks, played
from tests.cluster.ray_cluster import require_ray

pytestmark = [pytest.mark.anyio, pytest.mark.ray]


@pytest.fixture(autouse=True)
def _ray() -> None:
    require_ray()


@pytest.mark.sample_units("on Ray")
async def test_workers_share_one_engine_and_equal_one_process() -> None:
    alone = compared(await played(Judged, dice_engine(), group_size=2, engines={"judge": dice_engine()}))
    judge = RayEngine(dice_engine())
    shared = await played(Judged, RayEngines(dice_engine(), workers=2), group_size=2, engines={"judge": judge})
    assert compared(shared) == alone


@pytest.mark.sample_units("on Ray")
async def test_a_run_without_workers_plays_on_an_engine_in_another_process() -> None:
    assert compared(await played(Dice, RayEngine(dice_engine()))) == compared(await played(Dice, dice_engine()))


@pytest.mark.sample_units("on Ray")
async def test_an_engine_whose_process_dies_ends_the_run_by_name() -> None:
    engine = RayEngine(dice_engine(tick=0.01))
    trajectories = []

    def kill(trajectory: Trajectory) -> None:
        trajectories.append(trajectory)
        if len(trajectories) == 1:
            os.kill(engine.pid, signal.SIGKILL)

    with pytest.raises(EngineDead, match="the engine's process is gone"):
        await played(Dice, engine, tasks=game_tasks(200), breaker=1, on_trajectory=kill)
    assert len(trajectories) < 200


async def test_an_engine_that_cannot_be_sent_is_refused() -> None:
    async with ScriptedEngine("hi") as entered:
        with pytest.raises(BadOption, match="was not entered"):
            RayEngine(entered)
    with pytest.raises(BadOption, match="Ray Client"):
        RayEngine(dice_engine(), address="ray://127.0.0.1:10001")
