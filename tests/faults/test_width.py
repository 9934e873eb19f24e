"""The results of a run depend neither on its width nor on another simultaneous run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from runner import Concurrency, EngineDead, Environment, Run, ScriptedEngine
from runner.engines.scripted.script import Fault
from tests.faults.comparing import by_key, stored
from tests.faults.crowd import GROUP_SIZE, Crowd, Rollouts, engine
from tests.faults.suspects import AsyncPupils, SyncPupils, speak

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.sample_cases(5)]


async def played(environment: Environment[Any], file: Path, **options: Any) -> dict[Any, Any]:
    async with Run(environment, engine(), group_size=GROUP_SIZE, file=file, seed=9, **options) as run:
        async for _ in run:
            pass
    return stored(file)


@pytest.mark.parametrize("environment", [pytest.param(Crowd, marks=pytest.mark.whole), Rollouts])
async def test_results_are_identical_at_concurrency_1_8_and_64(tmp_path: Path, environment: type[Crowd]) -> None:
    narrow = await played(environment(), tmp_path / "1.db", concurrency=Concurrency(episodes=1, threads=1))
    assert len(narrow) == 24 * GROUP_SIZE * 3, "three agents in each episode"
    for width in (8, 64):
        wide = await played(environment(), tmp_path / f"{width}.db", concurrency=Concurrency(episodes=width))
        assert wide == narrow


async def results(run: Run, into: dict[Any, Any]) -> None:
    async with run:
        into.update(by_key([trajectory async for trajectory in run]))


@pytest.mark.parametrize("shared", [False, True], ids=["an engine each", "one engine"])
async def test_two_runs_on_one_loop_do_not_touch_each_other(shared: bool) -> None:
    def pupils(number: int) -> AsyncPupils | SyncPupils:
        return (AsyncPupils, SyncPupils)[number]()

    alone: list[dict[Any, Any]] = [{}, {}]
    together: list[dict[Any, Any]] = [{}, {}]
    for number in range(2):
        await results(Run(pupils(number), ScriptedEngine(speak), seed=number), alone[number])
    async with ScriptedEngine(speak, places=16) as first, ScriptedEngine(speak, places=16) as second:
        engines = (first, first) if shared else (first, second)
        async with anyio.create_task_group() as tasks:
            for number in range(2):
                tasks.start_soon(results, Run(pupils(number), engines[number], seed=number), together[number])
        assert first.running
        assert first.stats().open == first.stats().live_sessions == 0
    assert together == alone


async def test_failing_run_does_not_affect_the_one_beside_it() -> None:
    alone: dict[Any, Any] = {}
    await results(Run(AsyncPupils(), ScriptedEngine(speak)), alone)
    beside: dict[Any, Any] = {}

    async def fails() -> None:
        with pytest.raises(EngineDead):
            await results(Run(SyncPupils(), ScriptedEngine(speak, faults={40: Fault.death()})), {})

    async def is_left() -> None:
        async with Run(SyncPupils(), ScriptedEngine(speak)) as run:
            async for _ in run:
                break

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fails)
        tasks.start_soon(is_left)
        tasks.start_soon(results, Run(AsyncPupils(), ScriptedEngine(speak)), beside)
    assert beside == alone
