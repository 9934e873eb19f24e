"""The environments that the author's API was designed for, unchanged, on two workers."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from runner import Environment, ScriptedEngine, Trajectory
from runner.cluster.engines import FleetEngine
from runner.testing import assert_exact
from tests.cluster.in_process import in_process
from tests.cluster.playing import played
from tests.environment import test_kinds_of_environments as author_api

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ENVIRONMENTS = {
    name.removeprefix("test_"): function
    for name, function in vars(author_api).items()
    if name.startswith("test_") and inspect.iscoroutinefunction(function)
}


def test_sixteen_environments_of_the_authors_api_are_collected() -> None:
    assert len(ENVIRONMENTS) == 16


@pytest.mark.sample_cases(3)
@pytest.mark.asyncio_alone
@pytest.mark.parametrize("environment", ENVIRONMENTS)
async def test_an_environment_of_the_authors_api_plays_on_two_workers(
    environment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers_played: list[int] = []
    groups: set[str] = set()

    async def play_all(environment: type[Environment[Any]], replies: Any, **options: Any) -> list[Trajectory]:
        engine = replies if isinstance(replies, ScriptedEngine) else ScriptedEngine(replies)
        async with in_process() as launcher:
            trajectories = await played(environment, FleetEngine(engine, launcher, 2), **options)
            groups.update(trajectory.task.id for trajectory in trajectories)
            workers_played.extend(
                number for number, worker in launcher.workers.items() if "play" in (call for call, _ in worker.calls)
            )
        for trajectory in trajectories:
            assert_exact(trajectory)
        return sorted(trajectories, key=lambda each: (each.id, each.agent != "main"))

    async def play(environment: type[Environment[Any]], replies: Any, **options: Any) -> Trajectory:
        (trajectory,) = await play_all(environment, replies, **options)
        return trajectory

    monkeypatch.setattr(author_api, "play_all", play_all)
    monkeypatch.setattr(author_api, "play", play)
    plays: Callable[[], Awaitable[None]] = ENVIRONMENTS[environment]
    await plays()
    assert len(workers_played) == min(2, len(groups)), "one worker plays all members of a group"
