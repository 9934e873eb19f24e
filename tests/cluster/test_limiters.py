"""The limiter service, from which the episodes of all workers lease their run's limiters."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from runner import BadOption, EngineError
from runner.cluster.limiters import LeasedLimiter
from tests.cluster.in_process import InProcess, InProcessLimiterService, in_process

pytestmark = pytest.mark.anyio

RUN, OTHER_RUN = 1, 2


class Asking:
    """Client that asks a limiter service for leases, each in a task of its own, and records the answers."""

    def __init__(self, launcher: InProcess) -> None:
        self.limiter_service = launcher.limiter_service
        self.answers: dict[tuple[int, int], bool] = {}
        self._group = launcher.group

    async def acquire(self, worker: int, lease: int, *, run: int = RUN, limit: int = 1) -> None:
        async def ask() -> None:
            self.answers[worker, lease] = await self.limiter_service.acquire(run, "door", limit, worker, lease)

        self._group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()

    async def settled(self, done: Any) -> dict[tuple[int, int], bool]:
        await done
        await anyio.wait_all_tasks_blocked()
        return self.answers


@pytest.fixture
async def asking() -> AsyncIterator[Asking]:
    async with in_process() as launcher:
        yield Asking(launcher)


async def test_workers_share_a_limit_in_the_order_of_requests(asking: Asking) -> None:
    for held in ((0, 0), (1, 0), (0, 1), (2, 0)):
        await asking.acquire(*held, limit=2)
    assert asking.answers == {(0, 0): True, (1, 0): True}
    assert list(await asking.settled(asking.limiter_service.release(1, 0))) == [(0, 0), (1, 0), (0, 1)]
    assert list(await asking.settled(asking.limiter_service.release(0, 0)))[3:] == [(2, 0)]


async def test_lease_abandoned_while_waiting_takes_no_place(asking: Asking) -> None:
    for worker in range(3):
        await asking.acquire(worker, 0)
    assert await asking.settled(asking.limiter_service.release(1, 0)) == {(0, 0): True, (1, 0): False}
    assert await asking.settled(asking.limiter_service.release(0, 0)) == {(0, 0): True, (1, 0): False, (2, 0): True}


async def test_forgotten_worker_releases_its_leases_and_waits_no_more(asking: Asking) -> None:
    for held in ((0, 0), (0, 1), (1, 0)):
        await asking.acquire(*held)
    assert await asking.settled(asking.limiter_service.forget(0)) == {(0, 0): True, (0, 1): False, (1, 0): True}


async def test_a_worker_that_was_forgotten_gets_nothing_more(asking: Asking) -> None:
    await asking.limiter_service.forget(0)
    await asking.acquire(0, 0)  # a request that was under way
    await asking.acquire(1, 0)
    assert asking.answers == {(0, 0): False, (1, 0): True}


async def test_runs_do_not_share_a_limiter_and_one_that_is_over_leaves_none(asking: Asking) -> None:
    await asking.acquire(0, 0)
    await asking.acquire(0, 1, run=OTHER_RUN)
    assert asking.answers == {(0, 0): True, (0, 1): True}
    with pytest.raises(BadOption, match=r"limiter\('door', 2\): an earlier call had the limit 1"):
        await asking.limiter_service.acquire(RUN, "door", 2, 1, 0)
    await asking.limiter_service.close_run(RUN)
    await asking.acquire(1, 1, limit=2)
    assert asking.answers[1, 1], "this name may now belong to another limiter"
    with pytest.raises(BadOption, match="an earlier call had the limit 1"):
        await asking.limiter_service.acquire(OTHER_RUN, "door", 2, 1, 2)
    await asking.settled(asking.limiter_service.release(0, 0))  # of the removed limiter


async def test_cancelled_waiter_takes_no_place_of_the_limiter() -> None:
    async with in_process() as launcher:
        limiter = LeasedLimiter(InProcessLimiterService(launcher), itertools.count(), RUN, 0, "door", 1)
        await limiter.acquire_on_behalf_of("first")
        async with anyio.create_task_group() as group:
            group.start_soon(limiter.acquire_on_behalf_of, "second")
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
        limiter.release_on_behalf_of("first")
        launcher.group.start_soon(limiter.acquire_on_behalf_of, "third")
        await anyio.wait_all_tasks_blocked()
        assert list(limiter._held) == ["third"]


async def test_block_of_a_dismissed_worker_is_not_entered() -> None:
    async with in_process() as launcher:
        leases = itertools.count()
        limiters = [
            LeasedLimiter(InProcessLimiterService(launcher), leases, RUN, worker, "door", 1) for worker in (0, 1)
        ]
        await limiters[0].acquire_on_behalf_of("first")
        errors = []

        async def enter() -> None:
            try:
                await limiters[1].acquire_on_behalf_of("second")
            except EngineError as error:
                errors.append(str(error))

        launcher.group.start_soon(enter)
        await anyio.wait_all_tasks_blocked()
        await launcher.limiter_service.forget(1)
        await anyio.wait_all_tasks_blocked()
        assert errors == ["limiter('door', 1): worker 1 was dismissed, and another worker plays its episodes again."]
