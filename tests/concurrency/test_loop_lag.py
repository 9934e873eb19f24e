"""The lag monitor names the code that blocks the event loop, and names none after the process was stopped."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from runner.concurrency import loop_lag
from runner.concurrency.loop_lag import LagMonitor
from runner.concurrency.threads import Workers


def looks(monkeypatch: pytest.MonkeyPatch, times: list[float]) -> list[Any]:
    """Reports of a watching thread at these times, if its event loop has left no mark since time 0."""
    reports: list[Any] = []
    monitor = LagMonitor(Workers(1))
    monitor.on_stuck = reports.append
    monitor._loop_thread = threading.get_ident()
    left = itertools.chain(times, itertools.repeat(times[-1]))
    waits = iter([False] * (len(times) - 1) + [True])
    monkeypatch.setattr(monitor, "_stop", SimpleNamespace(wait=lambda _: next(waits)))
    monkeypatch.setattr(loop_lag, "time", SimpleNamespace(monotonic=lambda: next(left), sleep=time.sleep))
    monitor._look()
    return reports


def test_loop_blocked_for_minutes_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(looks(monkeypatch, [float(second) for second in range(200)])) == 1


@pytest.mark.parametrize("seconds", [61.0, 600.0, 86_400.0])
def test_a_process_that_was_stopped_is_not_stuck(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    began = [0.0, 0.02, 0.04]
    assert looks(monkeypatch, [*began, *(seconds + later / 50 for later in range(40))]) == []


def test_loop_that_blocks_after_a_stopped_process_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(looks(monkeypatch, [0.0, 0.02, *(600.0 + later for later in range(100))])) == 1
