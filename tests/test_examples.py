"""The examples run as they stand."""

from __future__ import annotations

import pytest

from examples import groups, rollouts, two_agents
from examples.dice import Dice
from runner import Outcome, Run, VllmEngine

pytestmark = pytest.mark.anyio


async def test_the_rollouts_example_prints_one_line_for_each_trajectory(
    engine: VllmEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    trajectories = await rollouts.main(engine)
    assert len(trajectories) == 16
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 17
    assert lines[-1].startswith("mean reward")


async def test_the_groups_example_gives_advantages_around_zero(engine: VllmEngine) -> None:
    advantages = await groups.main(engine)
    assert len(advantages) == 4
    for _, values in advantages:
        assert len(values) == 4
        assert abs(sum(values)) < 1e-6


async def test_the_two_agents_example_plays_to_its_turn_limit(
    engine: VllmEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    await two_agents.main(engine)
    assert capsys.readouterr().out.count("turn_limit") == 3


async def test_an_environment_of_under_20_lines_plays(engine: VllmEngine) -> None:
    async with Run(Dice(), engine, tasks=list(Dice().tasks())[:8]) as run:
        outcomes = [trajectory.outcome async for trajectory in run]
    assert len(outcomes) == 8
    assert set(outcomes) <= {Outcome.COMPLETED, Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT}
