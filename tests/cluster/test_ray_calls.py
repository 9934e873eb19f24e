"""Calls to an actor of Ray: calls are sent in batches, each has its own answer, and errors affect no other call."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from runner.cluster.protocol import WorkerLost
from runner.cluster.ray import calls
from runner.cluster.ray.calls import RayWorker
from runner.errors import BadOption
from tests.cluster.ray_actors import Counting
from tests.cluster.ray_cluster import Standing, require_ray

pytestmark = [pytest.mark.anyio, pytest.mark.ray]

WATCHDOG_SECONDS = 600.0


@pytest.fixture
def worker(cluster: Standing) -> Iterator[RayWorker]:
    require_ray()
    ray: Any = importlib.import_module("ray")
    ray.init(address=cluster.address, logging_level="ERROR")
    worker = RayWorker(ray.remote(num_cpus=0, max_concurrency=1000)(Counting).remote(), tick=0.01)
    yield worker
    worker.kill()
    ray.shutdown()


async def test_calls_of_one_tick_go_together_and_each_has_its_own_answer(worker: RayWorker) -> None:
    with anyio.fail_after(WATCHDOG_SECONDS):
        waiting = worker.send("wait")
        answers = [worker.send("double", number) for number in range(50)]
        assert [await answer for answer in reversed(answers)] == [2 * number for number in reversed(range(50))]
        assert await worker.send("how_many") == [51, 1]
        worker.kill()
        with pytest.raises(WorkerLost, match="it was ended"):
            await waiting
        with pytest.raises(WorkerLost, match="it was ended"):
            await worker.send("double", 1)


async def test_error_of_a_call_is_its_callers_and_others_are_answered(worker: RayWorker) -> None:
    with anyio.fail_after(WATCHDOG_SECONDS):
        refused, failed, unsent = worker.send("refuse"), worker.send("fail"), worker.send("lock")
        fine = worker.send("double", 4)
        assert await fine == 8
        with pytest.raises(BadOption, match="not so"):
            await refused
        with pytest.raises(WorkerLost, match=r"it failed: KeyError\(.no such key"):
            await failed
        with pytest.raises(WorkerLost, match=r"its result cannot be pickled"):
            await unsent


async def test_caller_waiting_for_an_actor_that_dies_gets_worker_lost(worker: RayWorker) -> None:
    ray: Any = importlib.import_module("ray")
    with anyio.fail_after(WATCHDOG_SECONDS):
        assert await worker.send("double", 1) == 2
        waiting = worker.send("wait")
        with anyio.move_on_after(0.2):
            await waiting
        ray.kill(worker._actor)
        with pytest.raises(WorkerLost, match="its process died"):
            await waiting


async def test_answer_can_be_awaited_again_after_a_cancelled_wait(worker: RayWorker) -> None:
    with anyio.fail_after(WATCHDOG_SECONDS):
        answer = worker.send("double", 3)
        with anyio.move_on_after(0):
            await answer
        assert await answer == 6


async def test_actor_keeps_nothing_of_a_caller_that_left(worker: RayWorker) -> None:
    guest = RayWorker(worker._actor, tick=0.01)
    with anyio.fail_after(WATCHDOG_SECONDS):
        assert await guest.send("double", 1) == 2
        assert await worker.send("who_calls") == 2
        last = guest.send("double", 2)
        guest.part()
        with pytest.raises(WorkerLost, match="this client has disconnected from it"):
            await last
        while await worker.send("who_calls") == 2:
            pass
        assert await worker.send("double", 4) == 8


@pytest.mark.parametrize("order", sorted({*itertools.permutations(["take", "answers", "take", "part"])}))
async def test_caller_that_left_is_forgotten_in_any_order_of_delivery(order: tuple[str, ...]) -> None:
    actor = Counting()
    with anyio.fail_after(WATCHDOG_SECONDS):
        async with anyio.create_task_group() as group:
            for message in order:
                match message:
                    case "take":
                        group.start_soon(actor.take, "guest", [(0, "double", (2,))])
                    case "answers":
                        group.start_soon(actor.answers, "guest")
                    case _:
                        group.start_soon(actor.part, "guest", 3)
                await anyio.wait_all_tasks_blocked()
    assert not actor._callers


@pytest.mark.parametrize(
    ("reported", "said"),
    [
        ("Worker exit detail: Worker exits with an exit code 3.", "its process died with exit code 3"),
        ("Worker exit detail: Worker exits with an exit code -11.", "its process died: SIGSEGV"),
        ("Worker unexpectedly exits with a connection error code 2. End of file.", "its process died: it was killed"),
        ("The actor is dead because it was killed by `ray.kill`.", "its process died"),
    ],
)
def test_a_lost_worker_is_reported_with_its_exit(reported: str, said: str) -> None:
    assert calls._why(died(reported)).startswith(said)


def test_error_without_a_text_is_reported_with_its_type() -> None:
    assert calls._why(ConnectionError()) == "ConnectionError"
    assert calls._why(ConnectionError("gone\nbecause")) == "gone"


def died(reported: str) -> Any:
    error: Any = pytest.importorskip("ray.exceptions").ActorDiedError()
    error.error_msg = reported
    return error


class Unavailable:
    """Actor that Ray reports as unavailable a few times, and then in its real state."""

    def __init__(self, times: int, truth: BaseException | None) -> None:
        self.take = self.answers = self
        self.left, self.truth = times, truth

    def options(self, **_: Any) -> Unavailable:
        return self

    def remote(self, _: str, *calls: Any) -> Any:
        exceptions: Any = importlib.import_module("ray.exceptions")
        answer = Future[Any]()
        if not calls and self.left:
            self.left -= 1
            answer.set_exception(exceptions.ActorUnavailableError("no way to it", None))
        elif not calls and self.truth is not None:
            answer.set_exception(self.truth)
        return SimpleNamespace(future=lambda: answer)


@pytest.mark.parametrize(("times", "dies"), [(1, True), (4, True), (1, False), (10_000, False)])
async def test_a_worker_that_ray_cannot_reach_is_lost_for_the_true_reason(times: int, dies: bool) -> None:
    require_ray()
    truth = died("Worker unexpectedly exits with a connection error code 2.") if dies else None
    worker = RayWorker(Unavailable(times, truth), tick=0)
    with anyio.fail_after(WATCHDOG_SECONDS):
        answers = [worker.send("double", number) for number in range(3)]
        for answer in answers:
            with pytest.raises(WorkerLost, match="it was killed" if dies else "its machine cannot be reached"):
                await answer
        with pytest.raises(WorkerLost):
            await worker.send("double", 1)
