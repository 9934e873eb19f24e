"""After many episodes no object is left, and memory depends only on the episodes in flight."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from runner import Concurrency, Outcome, Run, ScriptedEngine, Task
from runner.testing import no_leaks
from runner.trajectory import Trajectory
from tests import sweeps
from tests.faults.suspects import AsyncPupils, Pupils, SyncPupils, speak

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.sample_cases(5)]

EPISODES = sweeps.times(1000, 400)
CONCURRENT_EPISODES = 16
MAX_GROWTH_BYTES = 300_000
"""Allowed growth of the allocated memory during the second half, in bytes. One episode takes some 20 kB."""


def many(base: type[Pupils]) -> Pupils:
    class Many(base):  # type: ignore[misc, valid-type]
        def tasks(self) -> Any:
            return (Task(id=str(number), prompt=f"Task {number}: add two numbers.") for number in range(EPISODES))

    return Many()


@pytest.mark.both_backends
@pytest.mark.parametrize("environment", [SyncPupils, AsyncPupils])
async def test_nothing_leaks_after_many_episodes(tmp_path: Path, environment: type[Pupils]) -> None:
    engine = ScriptedEngine(speak)
    async with engine:
        with no_leaks(engine):
            run = Run(
                many(environment),
                engine,
                file=tmp_path / "run.db",
                concurrency=Concurrency(episodes=CONCURRENT_EPISODES),
            )
            async with run:
                async for _ in run:
                    pass
        assert run.summary.outcomes == {Outcome.COMPLETED: EPISODES}


async def test_memory_does_not_grow_with_the_run(tmp_path: Path) -> None:
    sizes: dict[int, int] = {}
    tracemalloc.start()
    try:
        width = Concurrency(episodes=CONCURRENT_EPISODES)
        async with Run(many(AsyncPupils), ScriptedEngine(speak), file=tmp_path / "run.db", concurrency=width) as run:
            read = 0
            async for _ in run:
                read += 1
                if read in (EPISODES // 2, EPISODES):
                    gc.collect()
                    sizes[read], _peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sizes[EPISODES] - sizes[EPISODES // 2] < MAX_GROWTH_BYTES


async def test_live_trajectories_are_bounded_by_episodes_in_flight() -> None:
    def living() -> int:
        return sum(type(thing) is Trajectory for thing in gc.get_objects())

    gc.collect()
    others = living()  # objects of earlier tests, which pytest may still refer to
    async with Run(
        many(AsyncPupils), ScriptedEngine(speak), concurrency=Concurrency(episodes=CONCURRENT_EPISODES)
    ) as run:
        alive = [living() - others async for trajectory in run if int(trajectory.task.id) % 40 == 0]
    assert len(alive) == EPISODES / 40
    assert min(alive) >= 1, "the trajectory that is being read"
    assert max(alive) <= 3 * CONCURRENT_EPISODES
