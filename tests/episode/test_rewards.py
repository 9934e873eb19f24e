"""Scoring: the reward from metrics, weights, groups and turns."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from runner import (
    BadOption,
    Environment,
    Group,
    Limits,
    Outcome,
    Run,
    Task,
    Turn,
    group_reward,
    metric,
    reward,
)
from tests.playing import Plain, play, play_all, recording, tasks

pytestmark = pytest.mark.anyio


async def test_reward_is_the_weighted_sum_and_metrics_are_never_added() -> None:
    class Scored(Environment):
        def tasks(self) -> list[Task]:
            return tasks(1)

        @reward
        def right(self) -> bool:
            return True

        @reward(weight=0.5)
        async def style(self) -> float:
            return 0.5

        @metric
        def length(self) -> float:
            return 100

    trajectory = await play(Scored, "Yes")
    assert trajectory.rewards == {"right": 1.0, "style": 0.5}
    assert (trajectory.reward, trajectory.metrics) == (1.25, {"length": 100.0})
    assert (await play(Scored, "Yes", weights={"style": 0})).reward == 1.0
    with pytest.raises(BadOption, match="'stile' is not a reward"):
        Run(Scored, recording("Yes"), weights={"stile": 0})


async def test_one_reward_that_is_none_makes_the_sum_none() -> None:
    class Unsure(Plain):
        @reward
        def style(self) -> None:
            return None

    trajectory = await play(Unsure, "Yes")
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, None)
    assert trajectory.rewards == {"correct": 1.0, "style": None}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("0.5", "the string '0.5'"),
        (math.nan, "nan"),
        ([1], r"\[1\]"),
        ({"unknown": 1.0}, "'unknown', which is not a trained"),
        (
            {"style": 1.0},
            "For several scores write a @reward for each, or .* a @metric that returns the dict",
        ),
    ],
    ids=["string", "nan", "list", "unknown agent", "a name of its own"],
)
async def test_invalid_reward_value_is_env_error(value: Any, said: str) -> None:
    class Odd(Plain):
        @reward
        def correct(self) -> Any:
            return value

    trajectory = await play(Odd, "Yes")
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert re.search(said, trajectory.error)


async def test_a_metric_that_raises_is_absent_and_counted() -> None:
    class Fragile(Plain):
        @metric
        def length(self) -> float:
            raise ZeroDivisionError("nothing there")

        @metric
        def other(self) -> float:
            return 1

    async with Run(Fragile, recording("Yes")) as run:
        (trajectory,) = [t async for t in run]
    assert (trajectory.reward, trajectory.metrics) == (1.0, {"other": 1.0})
    assert "metric length(): ZeroDivisionError: nothing there" in run.summary.faults[0]


async def test_a_metric_of_several_numbers_is_as_many_metrics() -> None:
    class Judged(Plain):
        @metric
        def scores(self) -> dict[str, float | bool | None]:
            return {"style": 0.5, "polite": True, "unknown": None}

        @metric
        async def nothing(self) -> dict[str, float]:
            return {}

        @metric
        def by_number(self) -> dict[int, float]:
            return {1: 0.5}

        @metric
        def nested(self) -> dict[str, Any]:
            return {"style": {"clear": 1.0}}

    async with Run(Judged, recording("Yes")) as run:
        (trajectory,) = [t async for t in run]
    assert (trajectory.reward, trajectory.metrics) == (1.0, {"scores.style": 0.5, "scores.polite": 1.0})
    assert run.summary.metrics["scores.style"].mean == 0.5
    by_number, nested = run.summary.faults
    assert re.search(r"metric by_number\(\): TypeError: by_number returned keys that .*not strings: \[1\]", by_number)
    assert re.search(r"metric nested\(\): TypeError: nested\.style returned \{'clear': 1\.0\}", nested)


class Raises(Plain):
    def step(self, turn: Turn) -> str | None:
        return "more" if self.task.info.get("long") else None

    @reward
    def broken(self) -> float:
        raise ZeroDivisionError("by zero")

    @group_reward
    def compared(self, group: Group) -> list[float]:
        return [1.0 for _ in group.trajectories]


async def test_a_reward_that_raises_is_env_error_and_after_a_limit_none() -> None:
    short = await play(Raises, "Yes")
    assert (short.outcome, short.reward, short.rewards) == (Outcome.ENV_ERROR, None, {})
    assert "reward broken(): ZeroDivisionError: by zero" in short.error
    task = Task(id="a", prompt="?", info={"long": True})
    async with Run(Raises, recording(lambda turn: "Yes"), tasks=[task], limits=Limits(turns=2)) as run:
        (long,) = [trajectory async for trajectory in run]
    assert [fault.partition(" (in")[0] for fault in run.summary.faults] == [
        "a#0: reward broken(): ZeroDivisionError: by zero"
    ]
    assert (long.outcome, long.reward) == (Outcome.TURN_LIMIT, None)
    assert long.rewards == {"correct": 1.0, "broken": None, "compared": 1.0}


async def test_group_reward_is_a_term_of_the_sum_of_scored_episodes() -> None:
    class Longest(Plain):
        def tasks(self) -> list[Task]:
            return tasks(2)

        def step(self, turn: Turn) -> None:
            if self.episode.index == 1:
                raise ValueError("unlucky")

        @group_reward(weight=10)
        def longest(self, group: Group) -> list[float]:
            longest = max(len(t.text) for t in group.trajectories)
            assert [t.outcome for t in group.trajectories] == [Outcome.COMPLETED] * 2
            return [float(len(t.text) == longest) for t in group.trajectories]

    def speak(turn: Any) -> str:
        return "x" * (int(turn.episode[-1]) + 1)

    played = await play_all(Longest, speak, group_size=3, breaker=1)
    assert sorted((t.task.id, t.index, t.reward) for t in played if t.index != 1) == [
        ("t0", 0, 1.0),
        ("t0", 2, 11.0),
        ("t1", 0, 1.0),
        ("t1", 2, 11.0),
    ]
    assert {t.reward for t in played if t.index == 1} == {None}


async def test_group_reward_that_raises_leaves_the_reward_none() -> None:
    class Broken(Plain):
        @group_reward
        def compared(self, group: Group) -> list[float]:
            return [1.0]

    async with Run(Broken, recording("Yes"), group_size=2) as run:
        played = [t async for t in run]
    assert [t.reward for t in played] == [None, None]
    assert "1 numbers for 2 trajectories" in run.summary.faults[0]


async def test_turn_reward_is_recorded_beside_the_sum() -> None:
    class Credits(Plain):
        def step(self, turn: Turn) -> None:
            turn.reward = 0.25

    trajectory = await play(Credits, "Yes")
    assert (trajectory.turns[0].reward, trajectory.reward) == (0.25, 1.0)
