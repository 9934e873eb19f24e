"""Errors of an author's code that fail no episode: the testing kit does not hide them."""

from __future__ import annotations

from typing import Any

import pytest

from runner import Group, Run, ScriptedEngine, group_reward, metric, reward
from runner.options import Limits
from runner.testing import play, play_many, play_many_async
from tests.playing import Plain, tasks


class Ranked(Plain):
    @group_reward
    def rank(self, group: Group) -> list[float]:
        raise KeyError("best")


class Short(Plain):
    @group_reward
    async def rank(self, group: Group) -> list[float]:
        return [1.0]


class Measured(Plain):
    @metric
    def length(self) -> float:
        raise ValueError("no text")


class Worded(Plain):
    @metric
    def length(self) -> Any:
        return "long"


class Closing(Plain):
    def close(self) -> None:
        raise OSError("the server is gone")


class Stacked(Plain):
    def setup(self) -> None:
        self.episode.exit_stack.callback(self.leave)

    def leave(self) -> None:
        raise OSError("the pool is gone")


class Limited(Plain):
    limits = Limits(turns=1)

    def step(self, turn: Any) -> str:
        return "Continue."

    @reward
    def correct(self) -> float:
        raise ConnectionError("503")


WRONG: dict[type[Plain], str] = {
    Ranked: r"group_reward rank\(\) of task 't0': KeyError: 'best' \(in rank, .*test_raised.py:\d+\)",
    Short: r"group_reward rank\(\) of task 't0': ValueError: 1 numbers for 2 trajectories",
    Measured: r"t0#[01]: metric length\(\): ValueError: no text \(in length, .*test_raised.py:\d+\)",
    Worded: r"t0#[01]: metric length\(\): TypeError: length returned 'long'; return a number",
    Closing: r"t0#[01]: close\(\): OSError: the server is gone",
    Stacked: r"t0#[01]: exit_stack: OSError: the pool is gone",
    Limited: r"t0#[01]: reward correct\(\): ConnectionError: 503",
}


@pytest.mark.parametrize("environment", WRONG, ids=lambda cls: cls.__name__)
def test_error_that_fails_no_episode_is_raised_with_its_place(environment: type[Plain]) -> None:
    with pytest.raises(AssertionError, match=WRONG[environment]):
        play_many(environment, "Yes", group_size=2)
    if environment is not Short:
        with pytest.raises(AssertionError, match="the environment's code raised"):
            play(environment, "Yes")


@pytest.mark.anyio
@pytest.mark.both_backends
async def test_error_is_raised_on_an_event_loop_too() -> None:
    with pytest.raises(AssertionError, match=WRONG[Ranked]):
        await play_many_async(Ranked, "Yes", group_size=2)


def test_errors_of_many_episodes_are_named_a_few_times() -> None:
    with pytest.raises(AssertionError, match=r"(?s)t\d#0: metric.*\nand 4 more"):
        play_many(Measured, "Yes", tasks=tasks(9))


@pytest.mark.anyio
async def test_run_names_the_same_error_among_its_faults() -> None:
    async with Run(Ranked, ScriptedEngine("Yes"), group_size=2) as run:
        rewards = [trajectory.reward async for trajectory in run]
    assert rewards == [None, None]
    assert run.summary.faults[0].startswith("group_reward rank() of task 't0': KeyError: 'best'")
