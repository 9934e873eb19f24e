"""Runs inside vLLM's engine cores: all turns are set aside while a proof of new weights is scored.

A paused vLLM computes nothing, and one that goes on computes every turn. Between the two, the proof of new weights has
to be scored alone: the scheduler is given an empty queue, and gets the other one back afterwards.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = ["CAN_HOLD_TURNS", "HOLD_TURNS", "RETURN_TURNS", "add_turn_hold"]

CAN_HOLD_TURNS: Final = "deltarunner_can_hold_turns"
"""The call that returns whether this vLLM's scheduler has what the other two need."""

HOLD_TURNS: Final = "deltarunner_hold_turns"
"""The call of an engine core that sets all turns aside and goes on; it is paused, and no turn has a place in its
cache."""
RETURN_TURNS: Final = "deltarunner_return_turns"
"""The call that ends it: the engine core is paused again, and has its turns."""


def add_turn_hold() -> None:
    """Give the engine cores of this process these calls."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, CAN_HOLD_TURNS, _can_set_aside)
    setattr(EngineCore, HOLD_TURNS, _set_aside)
    setattr(EngineCore, RETURN_TURNS, _put_back)


def _can_set_aside(core: Any) -> bool:
    try:
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.core.sched.request_queue import create_request_queue  # noqa: F401  # whether it is there
    except ImportError:
        return False
    has = all(hasattr(core.scheduler, name) for name in ("running", "waiting", "policy", "set_pause_state"))
    return has and {"UNPAUSED", "PAUSED_ALL"} <= set(PauseState.__members__)


def _set_aside(core: Any) -> None:
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.request_queue import create_request_queue

    scheduler = core.scheduler
    if scheduler.running:
        raise RuntimeError(f"{len(scheduler.running)} turns still have a place in the cache")
    core.turns_aside = scheduler.waiting
    scheduler.waiting = create_request_queue(scheduler.policy)
    scheduler.set_pause_state(PauseState.UNPAUSED)


def _put_back(core: Any) -> None:
    from vllm.v1.core.sched.interface import PauseState

    scheduler = core.scheduler
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    aside, came = core.turns_aside, scheduler.waiting
    del core.turns_aside
    aside.remove_requests([turn for turn in aside if turn.is_finished()])  # those that were cut meanwhile
    for turn in list(came):
        aside.add_request(turn)
    scheduler.waiting = aside
