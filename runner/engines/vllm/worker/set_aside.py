"""Runs inside vLLM's engine cores: all turns are set aside while a proof of new weights is scored.

A paused vLLM computes nothing, and one that goes on computes every turn. Between the two, the proof of new weights has
to be scored alone: the scheduler is given an empty queue, and gets the other one back afterwards.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = ["CAN_SET_ASIDE", "TURNS_ASIDE", "TURNS_BACK", "add_set_aside"]

CAN_SET_ASIDE: Final = "deltarunner_can_set_turns_aside"
"""The call that returns whether this vLLM's scheduler has what the other two need."""

TURNS_ASIDE: Final = "deltarunner_turns_aside"
"""The call of an engine core that sets all turns aside and goes on; it is paused, and no turn has a place in its
cache."""
TURNS_BACK: Final = "deltarunner_turns_back"
"""The call that ends it: the engine core is paused again, and has its turns."""


def add_set_aside() -> None:
    """Give the engine cores of this process these calls."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, CAN_SET_ASIDE, _can_set_aside)
    setattr(EngineCore, TURNS_ASIDE, _set_aside)
    setattr(EngineCore, TURNS_BACK, _put_back)


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
