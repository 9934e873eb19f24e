"""Time limit of a worker's answer: seconds in which the driver itself was blocked do not count."""

from __future__ import annotations

import time

import anyio
import anyio.lowlevel
import pytest

from runner.cluster import worker_handle
from runner.cluster.protocol import WorkerLost
from runner.cluster.worker_handle import answer_within
from tests.cluster.in_process import Answer

pytestmark = pytest.mark.anyio


async def test_worker_is_not_lost_while_the_driver_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_handle, "SILENCE_STEP_SECONDS", 0.1)
    answer = Answer()

    async def answers() -> None:
        time.sleep(0.8)  # noqa: ASYNC251  # a trainer that computes on the event loop for longer than the limit
        for _ in range(5):
            await anyio.lowlevel.checkpoint()  # an answer of Ray takes some rounds to reach this loop
        answer.succeed("here")

    async with anyio.create_task_group() as group:
        group.start_soon(answers)
        assert await answer_within(0.4, answer) == "here"


async def test_worker_that_sends_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_handle, "SILENCE_STEP_SECONDS", 0.01)
    with pytest.raises(WorkerLost, match=r"^it has not answered for 0.05 s while it started$"):
        await answer_within(0.05, Answer(), " while it started")
