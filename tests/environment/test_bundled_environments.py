"""The environments that deltarunner contains, played with scripted replies."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import pytest

from envs.calculator import Calculator, question, solved
from envs.guess_number import GuessNumber
from envs.reasoning import Reasoning
from runner import BadEnvironment, Outcome, Run, ScriptedEngine, Task, Trajectory
from runner.engines.scripted.replies import Replies
from runner.environment.environment import Environment
from runner.testing import ModelCall, call

pytestmark = pytest.mark.anyio


def take_one(environment: Environment[Any]) -> list[Task]:
    tasks = environment.tasks()
    assert isinstance(tasks, Iterable)
    return list(islice(tasks, 1))


async def play(environment: Environment[Any], replies: Replies) -> Trajectory:
    async with Run(environment, ScriptedEngine(replies), tasks=take_one(environment)) as run:
        (trajectory,) = [trajectory async for trajectory in run]
    return trajectory


async def test_calculator_rewards_answer_and_calls_separately() -> None:
    task = question(0)
    (name, a, b), (after, c, d) = task.calls
    right = [[call(name, a=a, b=b)], [call(after, a=c, b=d)], [call("answer", value=task.value)]]
    trajectory = await play(Calculator(), right)
    assert trajectory.outcome is Outcome.COMPLETED
    assert trajectory.reason == "answered"
    assert trajectory.rewards == {"exact": 1.0, "right_calls": 1.0}
    assert trajectory.reward == pytest.approx(1.2)

    guessed = await play(Calculator(), [[call("answer", value=task.value)]])
    assert guessed.rewards == {"exact": 1.0, "right_calls": 0.0}

    wrong = await play(Calculator(), [[call(name, a=a, b=b)], [call("answer", value=task.value + 1)]])
    assert wrong.rewards == {"exact": 0.0, "right_calls": 0.5}


def test_calculator_shows_solved_questions_that_are_right() -> None:
    for number in range(-20, 0):
        example = question(number, "+-*", "+-*")
        messages = list(solved(example))
        assert eval(str(example.prompt)[len("What is ") : -1]) == example.value
        assert [m["content"] for m in messages if m["role"] == "tool"] == [
            str(example.calls[1][1]),
            str(example.value),
            "thank you",
        ]


def test_calculator_refuses_operators_that_it_does_not_have() -> None:
    with pytest.raises(BadEnvironment, match="inner='/': give one or more of"):
        Calculator(inner="/")


async def test_guess_number_answers_higher_and_lower_until_it_is_found() -> None:
    def bisect(model_call: ModelCall) -> str:
        low, high = 1, 100
        said = model_call.prompt.split("<|im_start|>")
        for guess, answer in zip(said[3::2], said[4::2], strict=False):
            number = int(guess.split("\n")[1].removesuffix("<|im_end|>"))
            low, high = (number + 1, high) if "higher" in answer else (low, number - 1)
        return str((low + high) // 2)

    trajectory = await play(GuessNumber(), bisect)
    assert trajectory.outcome is Outcome.COMPLETED
    assert trajectory.reward == 1
    assert trajectory.metrics["tries"] == len(trajectory.turns) <= 7
    answers = [m["content"] for m in trajectory.messages if m["role"] == "user"][1:]
    assert set(answers) <= {"higher", "lower"}


async def test_guess_number_unsolved_ends_at_turn_limit_with_zero() -> None:
    trajectory = await play(GuessNumber(), "no idea")
    assert trajectory.outcome is Outcome.TURN_LIMIT
    assert trajectory.reward == 0


async def test_reasoning_is_scored_by_the_scorer_of_its_data_set() -> None:
    environment = Reasoning(dataset="chain_sum", size=2, seed=1)
    task = next(environment.tasks())
    assert (await play(environment, f"Let me see. <answer>{task.answer}</answer>")).reward == 1
    assert (await play(environment, "<answer>no number</answer>")).reward == pytest.approx(0, abs=0.05)


def test_reasoning_with_an_unknown_data_set_names_it_and_the_fix() -> None:
    with pytest.raises(BadEnvironment, match=r"no data set 'chess_mate'.*--set dataset=NAME"):
        list(Reasoning(dataset="chess_mate").tasks())
