"""Values in the form that Gymnasium's methods return are refused, and the error names the right ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runner import Outcome, Turn
from tests.playing import Plain, play

pytestmark = [pytest.mark.anyio, pytest.mark.both_backends]

STEPS: dict[str, tuple[Any, str]] = {
    "five": (("continue", 1.0, False, False, {}), r"step() returned a tuple of 5 (str, float, bool, bool, dict)"),
    "four": (("continue", 1.0, True, {}), r"step() returned a tuple of 4 (str, float, bool, dict)"),
    "array first": ((np.zeros(2), 0.0, False, False, {}), r"step() returned a tuple of 5 (ndarray, float"),
    "message first": (({"role": "user", "content": "x"}, 1.0, False, False, {}), r"returned a tuple of 5 (dict, float"),
    "two": (("continue", 1.0), r"step() returned a tuple of 2 (str, float)"),
    "a list": (["continue", 1.0, False, False, {}], r"step() returned a list of 5 (str, float, bool, bool, dict)"),
    "texts": (("continue", "and on"), r"step() returned a tuple of 2 (str, str)"),
    "a number": (1.0, r"step() returned 1.0, of type float"),
    "a flag": (True, r"step() returned True, of type bool"),
    "an array": (np.zeros(2), r"of type ndarray"),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("is_async", [False, True])
async def test_step_that_returns_no_messages_names_the_fix(name: str, is_async: bool) -> None:
    value, said = STEPS[name]

    class Sync(Plain):
        def step(self, turn: Turn) -> Any:
            return value

    class Async(Plain):
        async def step(self, turn: Turn) -> Any:
            return value

    ended = await play(Async if is_async else Sync, "Yes")
    assert ended.outcome is Outcome.ENV_ERROR
    assert said in ended.error
    assert "a string, a message, or a list of messages; None ends the episode" in ended.error


async def test_prompt_that_returns_what_reset_does_names_the_fix() -> None:
    class Reset(Plain):
        def prompt(self) -> Any:
            return "the first observation", {}

    ended = await play(Reset, "Yes")
    assert "prompt() returned a tuple of 2 (str, dict), as Gymnasium environments do" in ended.error
    assert "None ends the episode" not in ended.error


@pytest.mark.parametrize(
    "reply",
    [
        "continue",
        {"role": "user", "content": "continue"},
        [{"role": "user", "content": "continue"}],
        ({"role": "user", "content": "continue"}, {"role": "user", "content": "please"}),
    ],
)
async def test_messages_in_any_form_are_taken(reply: Any) -> None:
    class Once(Plain):
        def step(self, turn: Turn) -> Any:
            return reply if len(self.episode.turns) == 1 else None

    ended = await play(Once, "Yes")
    assert (ended.outcome, len(ended.turns)) == (Outcome.COMPLETED, 2)
