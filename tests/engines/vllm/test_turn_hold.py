"""Calls of vLLM's engine cores that hold turns: the patch adds them, and vLLM has nothing that replaces them."""

from __future__ import annotations

import pytest

from runner.engines.vllm.start import contained_vllm
from runner.engines.vllm.worker.turn_hold import CAN_HOLD_TURNS, HOLD_TURNS, RETURN_TURNS, patch_engine_core_calls

CALLS = (CAN_HOLD_TURNS, HOLD_TURNS, RETURN_TURNS)


@pytest.mark.engine
def test_unpatched_scheduler_cannot_score_while_it_holds_turns() -> None:
    with contained_vllm():
        from vllm.v1.core.sched.interface import PauseState

    states = set(PauseState.__members__)
    assert states == {"UNPAUSED", "PAUSED_NEW", "PAUSED_ALL"}, "if the new state can score, remove the patch"


@pytest.mark.engine
def test_patched_engine_cores_have_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    with contained_vllm():
        from vllm.v1.engine.core import EngineCore

    for name in CALLS:
        monkeypatch.setattr(EngineCore, name, None, raising=False)  # deleted after the test
    patch_engine_core_calls()
    assert all(callable(getattr(EngineCore, name)) for name in CALLS)
