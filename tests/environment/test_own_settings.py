"""Settings that an environment sets for its own episode: `self.sampling`, and `self.limits` in `setup()`."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from runner import Conversation, Limits, Outcome, Sampling, Turn, reward, tool
from runner.testing import call
from tests.playing import Plain, play, play_all, recording

pytestmark = pytest.mark.anyio


class Sets(Plain):
    """Environment that assigns the given values in `setup()`."""

    def __init__(self, sampling: Any = None, limits: Any = None) -> None:
        self.given = {name: value for name, value in (("sampling", sampling), ("limits", limits)) if value is not None}

    def setup(self) -> None:
        for name, value in self.given.items():
            setattr(self, name, value)

    def step(self, turn: Turn) -> str | None:
        return "Continue." if turn.number < 3 else None


async def test_sampling_from_setup_holds_and_the_run_overrides_it() -> None:
    environment = Sets(Sampling(max_tokens=2, temperature=0.5, stop=("!",)))
    trajectory = await play(environment, lambda turn: "12345", sampling=Sampling(temperature=0))
    assert [len(turn.token_ids) for turn in trajectory.turns] == [2] * 4
    used = [turn.sampling for turn in trajectory.turns]
    assert [(one.max_tokens, one.temperature, one.stop) for one in used if one] == [(2, 0, ("!",))] * 4


async def test_sampling_may_be_assigned_before_any_turn() -> None:
    class Narrows(Sets):
        def step(self, turn: Turn) -> str | None:
            self.sampling = Sampling(max_tokens=turn.number + 1)
            return super().step(turn)

    trajectory = await play(Narrows(), lambda turn: "12345")
    assert [len(turn.token_ids) for turn in trajectory.turns] == [6, 1, 2, 3]


async def test_settings_from_setup_do_not_reach_other_episodes() -> None:
    class First(Sets):
        def setup(self) -> None:
            if self.episode.index == 0:
                super().setup()

    environment = First(Sampling(max_tokens=2), Limits(turns=1))
    played = await play_all(environment, lambda turn: "12345", group_size=2)
    assert [(t.outcome, t.sampled) for t in played] == [(Outcome.TURN_LIMIT, 2), (Outcome.COMPLETED, 24)]


@pytest.mark.parametrize(
    ("limits", "outcome"),
    [
        (Limits(turns=2), Outcome.TURN_LIMIT),
        (Limits(tokens=9), Outcome.TOKEN_LIMIT),
        (Limits(context=60), Outcome.CONTEXT_LIMIT),
    ],
)
async def test_limits_from_setup_hold_and_the_run_overrides_them(limits: Limits, outcome: Outcome) -> None:
    trajectory = await play(Sets(limits=limits), lambda turn: "12345")
    assert (trajectory.outcome, trajectory.limit) == (outcome, next(iter(limits.given())))
    of_the_run = Limits(turns=50, tokens=None, context=None)
    trajectory = await play(Sets(limits=limits), lambda turn: "12345", limits=of_the_run)
    assert trajectory.outcome is Outcome.COMPLETED


@pytest.mark.parametrize("name", ["step", "tool", "reward", "seconds"])
async def test_time_limits_from_setup_hold(name: str) -> None:
    field = name if name == "seconds" else f"{name}_seconds"

    class Slow(Sets):
        async def work(self, hook: str) -> None:
            if hook == name or (hook == "step" and name == "seconds"):
                await anyio.sleep(30)

        @tool
        async def use(self) -> str:
            """Use it."""
            await self.work("tool")
            return "used"

        async def step(self, turn: Turn) -> None:  # type: ignore[override]  # a hook may be synchronous or asynchronous
            await self.work("step")

        @reward
        async def correct(self) -> bool:
            await self.work("reward")
            return True

    given: Any = {field: 0.05}
    with anyio.fail_after(300):
        trajectory = await play(Slow(limits=Limits(**given)), [call("use"), "Done"])
    results = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert (trajectory.limit or results) == (["use took longer than 0.05 s."] if name == "tool" else field)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"limits": Limits(setup_seconds=5)}, "setup_seconds=5) in setup(): the clock of setup() runs already"),
        ({"limits": {"turns": 2}}, "self.limits = {'turns': 2}: give Limits(...)"),
        ({"sampling": {"max_tokens": 2}}, "self.sampling = {'max_tokens': 2}: give Sampling(...)"),
    ],
)
async def test_unusable_setting_from_setup_is_env_error_and_named(given: dict[str, Any], said: str) -> None:
    trajectory = await play(Sets(**given), "Yes")
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert said in trajectory.error


@pytest.mark.parametrize("hook", ["prompt", "step", "rollout"])
async def test_limits_that_are_assigned_too_late_are_refused(hook: str) -> None:
    class Late(Plain):
        def change(self, where: str) -> None:
            if where == hook:
                self.limits = Limits(turns=1)

        def prompt(self) -> str:
            self.change("prompt")
            return "Go."

        def step(self, turn: Turn) -> str | None:
            self.change("step")
            return "Continue." if turn.number == 0 else None

        async def rollout(self, conversation: Conversation) -> None:
            await super().rollout(conversation)
            self.change("rollout")

    trajectory = await play(Late, recording(lambda turn: "Yes"))
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert "self.limits was assigned after setup()" in trajectory.error
