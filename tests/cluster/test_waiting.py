"""Waiting of a run on a fleet for workers, and the end of the wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from runner import Conversation, EngineDead, Limits, Run, RunStuck
from runner.cluster.engines import FleetEngine
from runner.cluster.protocol import WorkerLost
from runner.testing import VirtualClock
from tests.cluster.in_process import InProcess, InProcessWorker
from tests.cluster.playing import Dice, fleet, game_tasks, played

pytestmark = [pytest.mark.slow, pytest.mark.sample_functions(2)]


def starts_late(launcher: InProcess, seconds: float, fails: Exception | None = None) -> None:
    """Let the engines of further workers take this long to start, or to fail."""

    def watch(started: InProcessWorker) -> None:
        join = started.worker.join

        async def late() -> Any:
            await anyio.sleep(seconds)
            if fails is not None:
                raise fails
            return await join()

        started.worker.join = late

    launcher.on_start = watch


async def play_on(workers: int, stall: float, seconds: float, fails: Exception | None = None) -> int:
    """Lose all workers after the second trajectory, and return the number of trajectories."""
    async with fleet(workers, stall_seconds=stall) as (engine, launcher):
        count = 0
        async with Run(Dice, engine, tasks=game_tasks(60)) as run:
            starts_late(launcher, seconds, fails)
            async for _ in run:
                count += 1
                if count == 2:
                    for worker in launcher.alive:
                        worker.kill()
        return count


@pytest.mark.parametrize("workers", [1, 2])
def test_run_is_not_stuck_while_its_fleet_waits_within_the_limit(workers: int) -> None:
    async def run() -> None:
        assert await play_on(workers, 3600, 900) == 60

    VirtualClock().run(run)


def test_fleet_without_a_machine_ends_after_stall_seconds() -> None:
    async def run() -> None:
        async with fleet(1, stall_seconds=3600) as (engine, launcher):
            with pytest.raises(EngineDead, match="for 3600 s there were fewer than 1 workers"):
                await lose_all(engine, launcher, lambda worker: worker.kill("no machine has room"))
            assert 3600 < anyio.current_time() < 3610

    VirtualClock().run(run)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.whole), 2])
def test_late_start_of_an_engine_may_take_as_long_as_the_first(workers: int) -> None:
    async def run() -> None:
        assert await play_on(workers, 600, 2000) == 60

    VirtualClock().run(run)


def test_starts_that_fail_do_not_keep_a_run_waiting_for_ever() -> None:
    async def run() -> None:
        with pytest.raises(EngineDead, match=r"for 600 s there were fewer than 1 workers, 0 now\..* no more memory"):
            await play_on(1, 600, 1500, WorkerLost("its machine has no more memory"))
        assert 1500 < anyio.current_time() < 1600

    VirtualClock().run(run)


def test_worker_that_hangs_while_it_starts_is_ended() -> None:
    def stop(worker: InProcessWorker) -> None:
        async def stopped() -> Any:
            worker.silent = True
            await anyio.sleep_forever()

        worker.worker.join = stopped

    async def run() -> None:
        async with fleet(1, stall_seconds=600) as (engine, launcher):
            with pytest.raises(EngineDead, match=r"it has not answered for 600 s while it started"):
                await lose_all(engine, launcher, stop)
            assert launcher.workers[1].killed
            assert anyio.current_time() < 700

    VirtualClock().run(run)


class Idle(Dice):
    async def rollout(self, conversation: Conversation) -> None:
        await anyio.sleep_forever()


def test_run_whose_workers_play_nothing_more_is_stuck() -> None:
    async def run() -> None:
        async with fleet(2, stall_seconds=3600) as (engine, _):
            with pytest.raises(RunStuck, match="nothing happened for 600 s; 8 episodes in flight"):
                await played(Idle, engine, limits=Limits(seconds=None))

    VirtualClock().run(run)


async def lose_all(engine: FleetEngine, launcher: InProcess, then: Callable[[InProcessWorker], None]) -> None:
    """Play, and lose all workers at once. Their replacements behave as the argument sets."""
    async with Run(Dice, engine, tasks=game_tasks(60)) as run:
        launcher.on_start = then
        for worker in launcher.alive:
            worker.kill()
        async for _ in run:
            pass
