"""Calls of vLLM's engine cores that hold all turns while a proof of new weights is scored.

A paused vLLM computes nothing, and a resumed vLLM computes every turn. To score only a proof of new weights, these
calls replace the scheduler's queue by an empty one, and restore it afterwards.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = ["CAN_HOLD_TURNS", "HOLD_TURNS", "RETURN_TURNS", "patch_engine_core_calls"]

CAN_HOLD_TURNS: Final = "deltarunner_can_hold_turns"
"""Call that returns whether this vLLM's scheduler supports the other two calls."""

HOLD_TURNS: Final = "deltarunner_hold_turns"
"""Call that removes all turns from the queue and resumes a paused engine core; no turn may have a place in the core's
cache."""
RETURN_TURNS: Final = "deltarunner_return_turns"
"""Call that pauses the engine core again and restores its turns."""


def patch_engine_core_calls() -> None:
    """Add the three calls of this module to vLLM's class of engine cores in this process."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, CAN_HOLD_TURNS, _can_set_aside)
    setattr(EngineCore, HOLD_TURNS, _set_aside)
    setattr(EngineCore, RETURN_TURNS, _put_back)


def _can_set_aside(core: Any) -> bool:
    try:
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.core.sched.request_queue import create_request_queue  # noqa: F401  # only to test the import
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
    aside.remove_requests([turn for turn in aside if turn.is_finished()])  # drop turns that were cut during the hold
    for turn in list(came):
        aside.add_request(turn)
    scheduler.waiting = aside
