"""Limits of an episode: whether an agent may take a turn, and the effect of a turn on the counts."""

from __future__ import annotations

import pytest

from runner import ContextFull, EpisodeOver, Limits, Outcome
from runner.engines.base import FinishReason
from runner.episode.limits import EpisodeLimits
from runner.tokens.log import TokenLog
from runner.trajectory import Turn

pytestmark = pytest.mark.anyio


def limits_of(**limits: int) -> EpisodeLimits:
    return EpisodeLimits(Limits(**limits).over(Limits.defaults()))


async def test_agent_without_a_token_left_takes_no_turn() -> None:
    limits = limits_of(tokens=5)
    limits.tokens = 4
    await limits.check_may_take_turn("main", counted=True)
    limits.tokens = 5
    await limits.check_may_take_turn("judge", counted=False)
    with pytest.raises(EpisodeOver):
        await limits.check_may_take_turn("main", counted=True)
    assert limits.silenced_by is not None
    assert (limits.silenced_by.outcome, limits.silenced_by.limit) == (Outcome.TOKEN_LIMIT, "tokens")


@pytest.mark.parametrize("counted", [True, False])
async def test_turn_after_a_prompt_that_did_not_fit_clears_it(counted: bool) -> None:
    limits = limits_of()
    with pytest.raises(ContextFull):
        limits.refuse_prompt("main", "too long", counted=True, prompt=9, context=8)
    assert limits.context_full is not None
    turn = Turn(agent="main", number=0, log=TokenLog(), start=0, end=0, finish=FinishReason.STOP)
    limits.count(turn, counted=counted)
    assert limits.context_full is None
