"""A value that a run file cannot store fails only the episode that contains it, and the error names its place."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runner import Conversation, Outcome, Run, RunFile, Turn, reward
from runner.testing import ScriptedEngine
from tests.playing import Plain, tasks

pytestmark = [pytest.mark.anyio, pytest.mark.both_backends]

Deed = Callable[[Plain, Conversation, Turn], None]


def credit(value: Any) -> Deed:
    def deed(_: Plain, conversation: Conversation, turn: Turn) -> None:
        turn.reward = value

    return deed


def message(**keys: Any) -> Deed:
    given: Any = {"role": "user", "content": "x", **keys}
    return lambda _, conversation, turn: conversation.add(given)


def called(**arguments: Any) -> Deed:
    call: Any = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    asked: Any = {"role": "assistant", "content": "", "tool_calls": [call]}
    answered: Any = {"role": "tool", "tool_call_id": "c", "content": "y"}
    return lambda _, conversation, turn: conversation.add(asked, answered)


def end(reason: Any) -> Deed:
    return lambda environment, conversation, turn: environment.episode.end(reason)


def agent(name: Any) -> Deed:
    def deed(environment: Plain, conversation: Conversation, turn: Turn) -> None:
        environment.episode.conversation(name)

    return deed


DATE = datetime.date(2026, 1, 2)

REFUSED: dict[str, tuple[Deed, str]] = {
    "credit as text": (credit("good"), "the reward of turn 0 is 'good': give a finite number"),
    "credit none": (credit(None), "the reward of turn 0 is None"),
    "credit nan": (credit(math.nan), "the reward of turn 0 is nan"),
    "credit infinite": (credit(-math.inf), "the reward of turn 0 is -inf"),
    "credit too large": (credit(10**400), "the reward of turn 0 is 1000"),
    "credit of several": (credit([1, 2]), "the reward of turn 0 is [1, 2]"),
    "message with a date": (message(when=DATE), "messages[2]['when'] is of type datetime.date"),
    "message with bytes inside": (message(extra={"a": [b"x"]}), "messages[2]['extra']['a'][0] is of type bytes"),
    "call with a set": (called(x={1}), "messages[2]['tool_calls'][0]['function']['arguments']['x'] is of type set"),
    "call with a key": (called(x={1: 2}), "has the key 1, of type int"),
    "call with an array": (called(x=np.zeros(2)), "['x'] is of type numpy.ndarray, which a run file cannot keep: give"),
    "reason": (end(5), "Episode.end(reason=5): the reason is text, got int"),
    "agent": (agent(5), "Episode.conversation(5): the name of an agent is text"),
}


class Doing(Plain):
    """Environment in which only the first task's agent calls the function."""

    deed: Deed

    async def rollout(self, conversation: Conversation) -> None:
        turn = await conversation.generate()
        if self.task.id == "t0":
            type(self).deed(self, conversation, turn)


async def outcome_of(deed: Deed, file: Path) -> Any:
    played = type("Does", (Doing,), {"deed": staticmethod(deed)})
    async with Run(played, ScriptedEngine("Yes"), file=file, breaker=1, tasks=tasks(2)) as run:
        ended = {trajectory.task.id: trajectory async for trajectory in run}
    assert ended["t1"].outcome is Outcome.COMPLETED
    with RunFile(file) as stored:
        assert stored.complete
        kept = {row.task_id: stored.trajectory(row) for row in stored}
    assert kept["t0"].error == ended["t0"].error
    assert kept["t0"].reason == ended["t0"].reason
    assert [turn.reward for turn in kept["t0"].turns] == [turn.reward for turn in ended["t0"].turns]
    return ended["t0"]


@pytest.mark.parametrize("name", REFUSED)
async def test_value_that_cannot_be_kept_fails_its_episode_alone(tmp_path: Path, name: str) -> None:
    deed, said = REFUSED[name]
    ended = await outcome_of(deed, tmp_path / "run.db")
    assert (ended.outcome, ended.reward) == (Outcome.ENV_ERROR, None)
    assert said in ended.error


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), np.float64(0.5), torch.tensor(0.5)], ids=repr)
async def test_credit_of_any_number_is_a_float(tmp_path: Path, value: Any) -> None:
    ended = await outcome_of(credit(value), tmp_path / "run.db")
    assert [(turn.reward, type(turn.reward)) for turn in ended.turns] == [(0.5, float)]
    assert ended.outcome is Outcome.COMPLETED


async def test_message_with_json_beside_its_content_is_kept(tmp_path: Path) -> None:
    ended = await outcome_of(message(extra={"a": [1, None, "x"]}), tmp_path / "run.db")
    with RunFile(tmp_path / "run.db") as stored:
        kept = stored.trajectory(ended.id).messages
    assert kept[2] == {"role": "user", "content": "x", "extra": {"a": [1, None, "x"]}}


async def test_reason_that_was_put_there_by_hand_is_text(tmp_path: Path) -> None:
    def by_hand(environment: Plain, conversation: Conversation, turn: Turn) -> None:
        environment.episode.reason = 5  # type: ignore[assignment]  # a typical mistake of authors

    assert (await outcome_of(by_hand, tmp_path / "run.db")).reason == "5"


async def test_credit_given_while_scoring_is_checked_too(tmp_path: Path) -> None:
    class Crediting(Plain):
        @reward
        def correct(self) -> float:
            self.episode.turns[0].reward = math.nan
            return 1.0

    async with Run(Crediting, ScriptedEngine("Yes"), file=tmp_path / "run.db", breaker=1) as run:
        (ended,) = [trajectory async for trajectory in run]
    assert "the reward of turn 0 is nan" in ended.error
