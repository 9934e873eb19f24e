"""Weights that are sent to an engine step by step, without a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from runner.engines.transfers import Announced, RelayedTransfer, TransferStep, send_parts
from runner.engines.weights import WeightTransfer
from runner.errors import EngineError

pytestmark = pytest.mark.anyio

START, LOAD, FINISH = TransferStep


class Diary:
    """Receiver of weights that records its calls."""

    def __init__(self, fails_at: object = None) -> None:
        self.steps: list[tuple[TransferStep, Any]] = []
        self.fails_at = fails_at

    async def meet(self, init: Mapping[str, Any]) -> None: ...

    async def step(self, step: TransferStep, part: Any = None) -> None:
        await checkpoint()
        if part is not None and part == self.fails_at:
            raise RuntimeError("no room")
        self.steps.append((step, part))


def relayed() -> RelayedTransfer:
    return RelayedTransfer(Announced("Weights", {}, 1.0))


async def test_relayed_steps_run_in_order_and_return_when_done() -> None:
    relay, diary = relayed(), Diary()

    async def bring() -> None:
        for step, part in ((START, None), (LOAD, 1), (LOAD, 2), (FINISH, None)):
            await relay.bring(step, part)
            assert diary.steps[-1] == (step, part)

    async with anyio.create_task_group() as group:
        group.start_soon(bring)
        await anyio.wait_all_tasks_blocked()
        assert diary.steps == [], "the engine is not paused yet"
        await relay.receive(diary)
    assert diary.steps == [(START, None), (LOAD, 1), (LOAD, 2), (FINISH, None)]


@pytest.mark.asyncio_alone
async def test_failed_part_ends_a_relayed_transfer_with_an_error() -> None:
    relay, diary = relayed(), Diary(fails_at=2)
    errors: list[str] = []

    async def bring(step: TransferStep, part: Any = None) -> None:
        try:
            await relay.bring(step, part)
        except EngineError as error:
            errors.append(str(error))

    async with anyio.create_task_group() as group:
        for part in (1, 2, 3):
            group.start_soon(bring, LOAD, part)
        with pytest.raises(RuntimeError, match="no room"):
            await relay.receive(diary)
    await bring(FINISH)
    assert diary.steps == [(LOAD, 1)]
    refusal = "the engine does not accept {} for this transfer any more: begin a new transfer"
    assert errors == [refusal.format(step) for step in (LOAD, LOAD, FINISH)]


async def test_sender_to_an_engine_that_left_gets_an_error() -> None:
    relay = relayed()
    async with anyio.create_task_group() as group:
        group.start_soon(relay.receive, Diary())
        await relay.bring(START)
        group.cancel_scope.cancel()
    with pytest.raises(EngineError, match="does not accept load"):
        await relay.bring(LOAD, 1)


async def test_engine_that_waits_for_an_abandoned_transfer_fails() -> None:
    relay = relayed()
    async with anyio.create_task_group() as group:
        group.start_soon(relay.bring, START)
        group.start_soon(closed_when_idle, relay)
        with pytest.raises(EngineError, match="closed before all weights"):
            await relay.receive(Diary())


async def closed_when_idle(relay: RelayedTransfer) -> None:
    await anyio.wait_all_tasks_blocked()
    relay.close()


async def test_send_parts_sends_all_parts_between_start_and_finish() -> None:
    diary = Diary()
    await send_parts(WeightTransfer([{"names": ["a"]}, {"names": ["b"]}]), diary)
    assert diary.steps == [(START, None), (LOAD, {"names": ["a"]}), (LOAD, {"names": ["b"]}), (FINISH, None)]
