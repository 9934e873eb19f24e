"""The examples run unchanged."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from examples import groups, rollouts, two_agents
from examples.dice import Dice
from runner import Outcome, Run, VllmEngine
from tests import sweeps

pytestmark = pytest.mark.anyio


async def play_rollouts(engine: VllmEngine, capsys: pytest.CaptureFixture[str]) -> None:
    trajectories = await rollouts.main(engine)
    assert len(trajectories) == 16
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 17
    assert lines[-1].startswith("mean reward")


async def play_groups(engine: VllmEngine, capsys: pytest.CaptureFixture[str]) -> None:
    advantages = await groups.main(engine)
    assert len(advantages) == 4
    for _, values in advantages:
        assert len(values) == 4
        assert abs(sum(values)) < 1e-6
    assert capsys.readouterr().out.count("rewards") == 4


async def play_two_agents(engine: VllmEngine, capsys: pytest.CaptureFixture[str]) -> None:
    await two_agents.main(engine)
    assert capsys.readouterr().out.count("turn_limit") == 3


Example = Callable[[VllmEngine, pytest.CaptureFixture[str]], Awaitable[None]]


@pytest.mark.parametrize("example", sweeps.part([play_rollouts, play_groups, play_two_agents], 3))
async def test_an_example_plays_as_it_stands(
    example: Example, engine: VllmEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    await example(engine, capsys)


async def test_an_environment_of_under_20_lines_plays(engine: VllmEngine) -> None:
    async with Run(Dice(), engine, tasks=list(Dice().tasks())[:8]) as run:
        outcomes = [trajectory.outcome async for trajectory in run]
    assert len(outcomes) == 8
    assert set(outcomes) <= {Outcome.COMPLETED, Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT}
