"""The assertion of exactness finds each fault that it is meant to find."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from runner import Outcome, Run, Sampling, ToolCall, Trajectory, Turn, tool
from runner.testing import ScriptedEngine, assert_exact, call
from runner.tokens.log import Source
from tests.playing import Plain

pytestmark = pytest.mark.anyio


class Adds(Plain):
    @tool
    def add(self, a: int, b: int) -> int:
        """Add."""
        return a + b

    def step(self, turn: Turn) -> str | None:
        return "Sure?" if len(self.episode.turns) < 3 else None


@pytest.fixture
async def played() -> tuple[Trajectory, ScriptedEngine]:
    engine = ScriptedEngine([call("add", a=1, b=2), "It is 3", "Yes"], record=True)
    async with Run(Adds, engine) as run:
        (trajectory,) = [t async for t in run]
    assert_exact(trajectory, engine)
    return trajectory, engine


async def test_an_id_of_the_log_that_was_not_sent_is_found(played: tuple[Trajectory, ScriptedEngine]) -> None:
    trajectory, engine = played
    trajectory.segments[0].log.ids[trajectory.turns[1].start - 2] ^= 1
    with pytest.raises(AssertionError, match=r"t0#0 main turn 1: the engine received another prompt\n  sent: "):
        assert_exact(trajectory, engine)


async def test_a_sampled_id_that_was_changed_is_found(played: tuple[Trajectory, ScriptedEngine]) -> None:
    trajectory, engine = played
    trajectory.segments[0].log.ids[trajectory.turns[2].start] ^= 1
    with pytest.raises(AssertionError, match=r"is not what was sampled|the engine sampled"):
        assert_exact(trajectory, engine)


async def test_a_turn_that_does_not_extend_the_one_before_shows_the_seam(
    played: tuple[Trajectory, ScriptedEngine],
) -> None:
    trajectory, engine = played
    trajectory.turns[1].start = trajectory.turns[0].end - 4
    with pytest.raises(AssertionError, match=r"does not extend the turn before\n  sampled: .*add\(a=1, b=2\)"):
        assert_exact(trajectory, engine)


async def test_a_mask_that_covers_another_id_is_found(played: tuple[Trajectory, ScriptedEngine]) -> None:
    trajectory, _ = played
    trajectory.turns[2].end -= 1
    with pytest.raises(AssertionError, match="the loss mask must be True for exactly the sampled ids"):
        assert_exact(trajectory)


async def test_a_log_probability_without_a_sample_is_found(played: tuple[Trajectory, ScriptedEngine]) -> None:
    trajectory, _ = played
    trajectory.segments[0].log.logprobs[0] = -1.0
    with pytest.raises(AssertionError, match="was not sampled"):
        assert_exact(trajectory)


async def test_arrays_that_went_apart_are_found(played: tuple[Trajectory, ScriptedEngine]) -> None:
    trajectory, _ = played
    trajectory.segments[0].log.ids.extend(array("i", [1]))
    with pytest.raises(AssertionError, match="have lengths"):
        assert_exact(trajectory)


async def test_a_call_that_was_answered_twice_or_not_at_all_is_found(
    played: tuple[Trajectory, ScriptedEngine],
) -> None:
    trajectory, _ = played
    messages = trajectory.segments[0].messages
    answer = messages[2]
    messages.insert(2, answer)
    with pytest.raises(AssertionError, match=r"were answered by \['call_0', 'call_0'\]"):
        assert_exact(trajectory)
    del messages[2:4]
    with pytest.raises(AssertionError, match=r"were answered by \[\]"):
        assert_exact(trajectory)


async def test_a_mask_that_is_wrong_is_shown_where_it_is(played: tuple[Trajectory, ScriptedEngine]) -> None:
    trajectory, engine = played
    trajectory.segments[0].log.sources[2] = Source.SAMPLED
    trajectory.segments[0].log.logprobs[2] = -1.0
    with pytest.raises(
        AssertionError,
        match=r"the loss mask .* differs at \[2\]\n  ids before: '<\|im_start\|>s'\n  ids from there: 'yst",
    ):
        assert_exact(trajectory, engine)


async def test_calls_that_the_messages_do_not_hold_are_found(played: tuple[Trajectory, ScriptedEngine]) -> None:
    trajectory, _ = played
    trajectory.turns[0].tool_calls[0] = ToolCall("call_0", "add", {"a": 1, "b": 3})
    with pytest.raises(AssertionError, match=r"the turns called .*'b': 3.* but the messages contain .*'b': 2"):
        assert_exact(trajectory)


async def test_turns_that_are_out_of_order_are_found(played: tuple[Trajectory, ScriptedEngine]) -> None:
    trajectory, _ = played
    trajectory.turns[2].number = 7
    with pytest.raises(AssertionError, match=r"its turns are numbered \[0, 1, 7\]"):
        assert_exact(trajectory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outcome": Outcome.TURN_LIMIT}, "outcome turn_limit, but its limit is ''"),
        ({"limit": "turns"}, "outcome completed, but its limit is 'turns'"),
        ({"outcome": Outcome.TIME_LIMIT, "limit": "tokens"}, "outcome time_limit, but its limit is 'tokens'"),
        ({"outcome": Outcome.ENV_ERROR, "reward": None}, "outcome env_error without an error text"),
        ({"outcome": Outcome.ENV_ERROR, "error": "why"}, r"a reward of 1\.0, but env_error, 3 turns, trained"),
        ({"trained": False}, r"a reward of 1\.0, but completed, 3 turns, not trained"),
        ({"reward": float("nan")}, "a reward that is not a finite number"),
    ],
    ids=["no limit", "a limit too many", "another limit", "no error", "a failure's reward", "untrained", "nan"],
)
async def test_an_ending_that_contradicts_itself_is_found(
    played: tuple[Trajectory, ScriptedEngine], changes: dict[str, Any], message: str
) -> None:
    trajectory, _ = played
    for name, value in changes.items():
        setattr(trajectory, name, value)
    with pytest.raises(AssertionError, match=message):
        assert_exact(trajectory)


async def test_without_an_engine_the_seam_is_shown_as_ids(played: tuple[Trajectory, ScriptedEngine]) -> None:
    trajectory, _ = played
    trajectory.turns[1].start = trajectory.turns[0].end - 4
    with pytest.raises(AssertionError, match=r"does not extend the turn before\n  sampled: \[\d+, "):
        assert_exact(trajectory)


async def test_most_likely_ids_of_another_length_are_found() -> None:
    engine = ScriptedEngine([call("add", a=1, b=2), "It is 3", "Yes"], record=True)
    async with Run(Adds, engine, sampling=Sampling(logprobs=2)) as run:
        (trajectory,) = [t async for t in run]
    assert_exact(trajectory, engine)
    turn = trajectory.turns[1]
    turn.log.top_logprobs[turn.start].ids.pop()
    turn.log.top_logprobs[turn.start].ids.pop()
    with pytest.raises(AssertionError, match=r"t0#0 main turn 1: 8 ids, but top log-probabilities of 7"):
        assert_exact(trajectory, engine)
