"""Lifetimes of runs on fleets: begin, wait, growth and end, with remaining objects and with events."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from runner import Conversation, EngineDead, Outcome, Run, RunFile, Trajectory
from runner.cluster.fleet import MAX_RESTARTS
from runner.cluster.protocol import WorkerLost
from runner.engines.proofs import WeightProof
from runner.options import Concurrency
from runner.testing import VirtualClock, assert_exact
from tests.cluster.in_process import InProcessWorker
from tests.cluster.playing import WATCHDOG_SECONDS, Dice, compared, dice_engine, fleet, game_tasks, played
from tests.playing import until

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.sample_functions(2)]

EVENTS: list[str] = []
"""Events of this module's environments; workers are in this process."""


@pytest.fixture(autouse=True)
def _no_events() -> None:
    EVENTS.clear()


class Waiting(Dice):
    """Environment with one turn, which then waits for ever or until the test ends the episode."""

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate()
        await anyio.sleep_forever()


class WaitingAtFirst(Waiting):
    """The same environment, which waits only until an event, and later plays on."""

    async def rollout(self, conversation: Conversation) -> None:
        await (Dice if EVENTS else Waiting).rollout(self, conversation)


async def test_drain_begins_nothing_and_finishes_what_was_begun() -> None:
    async with fleet(2) as (engine, _), Run(Dice, engine, tasks=game_tasks(200)) as run:
        got = []
        async for trajectory in run:
            got.append(trajectory)
            run.drain()
    assert len(got) < 200
    assert {each.outcome for each in got} == {Outcome.COMPLETED}


async def test_cut_episode_is_partial_and_the_next_run_plays_it_again(
    tmp_path: Any,
) -> None:
    file = tmp_path / "run.db"
    async with fleet(2) as (engine, launcher), Run(WaitingAtFirst, engine, file=file) as run:
        await until(lambda: all(worker.worker.engine.stats().sampled_tokens for worker in launcher.alive))
        run.cancel()
        got = [trajectory async for trajectory in run]
    assert {each.outcome for each in got} == {Outcome.CANCELLED}
    spoke = [each for each in got if each.turns]
    assert spoke
    for each in spoke:
        assert_exact(each)
    with RunFile(file) as stored:
        assert {row.id for row in stored} == {each.id for each in got}
    EVENTS.append("the first run is over")
    async with fleet(1) as (engine, _):
        again = await played(WaitingAtFirst, engine, file=file)
    assert {each.id for each in again} >= {each.id for each in got}
    with RunFile(file) as stored:
        assert stored.outcomes() == {Outcome.COMPLETED: 8}
        assert stored.complete


async def test_leaving_the_run_early_keeps_what_was_being_played_as_partial(tmp_path: Any) -> None:
    file = tmp_path / "run.db"
    async with fleet(2) as (engine, launcher):
        async with Run(Waiting, engine, file=file):
            await until(lambda: all(worker.worker.engine.stats().sampled_tokens for worker in launcher.alive))
        assert not any(worker.worker._runs for worker in launcher.workers.values()), "a run is still open"
    with RunFile(file) as stored:
        rows = list(stored)
        assert {row.outcome for row in rows} == {Outcome.CANCELLED}
        assert any(stored.trajectory(row).turns for row in rows)


async def test_a_reader_that_does_not_read_holds_the_workers_up() -> None:
    async with fleet(2) as (engine, launcher), Run(Dice, engine, tasks=game_tasks(500)) as run:
        width = engine.driver.fleet.width
        await anyio.wait_all_tasks_blocked()
        asked = sum(call == "play" for worker in launcher.alive for call, _ in worker.calls)
        await anyio.wait_all_tasks_blocked()
        assert asked == sum(call == "play" for worker in launcher.alive for call, _ in worker.calls)
        assert asked <= 2 * width
        assert len(run.in_flight) <= width
        assert len([None async for _ in run]) == 500


def test_a_worker_that_comes_late_makes_the_run_wider() -> None:
    async def run() -> None:
        async with fleet((1, 3)) as (engine, launcher), Run(Waiting, engine, tasks=game_tasks(100)) as run:
            await until(lambda: len(engine.workers()) == 3)
            await until(lambda: len(run.in_flight) == 18)
            assert [each.playing for each in engine.workers()] == [6, 6, 6]
            launcher.workers[0].kill()
            await until(lambda: len(engine.workers()) == 3 and 3 in {each.number for each in engine.workers()})
            await until(lambda: [each.playing for each in engine.workers()] == [6, 6, 6])
            assert engine.places == 9

    VirtualClock().run(run)


async def test_a_width_that_is_asked_for_stays() -> None:
    async with fleet(3) as (engine, _), Run(Waiting, engine, concurrency=Concurrency(episodes=4)) as run:
        await until(lambda: len(run.in_flight) == 4)
        await anyio.wait_all_tasks_blocked()
        assert len(run.in_flight) == 4


def test_fleet_without_workers_waits_for_a_new_one_and_continues() -> None:
    async def run() -> None:
        async with fleet(1) as (engine, launcher), Run(Dice, engine) as run:
            got = []
            async for trajectory in run:
                got.append(trajectory)
                if len(got) == 2:
                    launcher.workers[0].kill()
        alone = compared(await played(Dice, dice_engine()))
        assert compared(got) == alone
        assert engine.driver.lost_count == 1

    VirtualClock().run(run)


def test_workers_that_die_at_start_end_the_start_by_name() -> None:
    async def run() -> None:
        async with fleet(2) as (engine, launcher):
            launcher.on_start = lambda worker: worker.fail_in.update(join=WorkerLost("its machine has no memory left"))
            with pytest.raises(EngineDead, match="workers die as they start: its machine has no memory left"):
                await played(Dice, engine)
            assert len(launcher.workers) <= 2 * (MAX_RESTARTS + 1)

    VirtualClock().run(run)


def test_a_fleet_that_no_machine_has_room_for_ends_the_start_by_name() -> None:
    async def run() -> None:
        async with fleet(2, stall_seconds=100) as (engine, launcher):
            launcher.on_start = lambda worker: setattr(worker, "silent", worker.worker.number == 1)
            with pytest.raises(EngineDead, match="for 100 s there was room for 1 of at least 2 workers"):
                await played(Dice, engine)
            assert anyio.current_time() > 100

    VirtualClock().run(run)


def test_reason_of_a_failed_start_is_reported_once() -> None:
    async def run() -> None:
        async with fleet(2, stall_seconds=100) as (engine, launcher):
            reasons = iter(["its machine is full"] * 3 + ["its machine is gone"] * 200)
            launcher.on_start = lambda worker: worker.kill(next(reasons)) if worker.worker.number else None
            with pytest.raises(EngineDead, match=r"room for 1 of at least 2 workers: .*\. its machine is gone"):
                await played(Dice, engine)
            assert [event.partition(" was not started: ")[2] for event in engine.driver.events] == [
                "its machine is full",
                "its machine is gone",
            ]
            assert len(launcher.workers) > 5

    VirtualClock().run(run)


def test_reason_that_returns_after_a_start_is_reported_again() -> None:
    async def run() -> None:
        async with fleet(2) as (engine, launcher):
            launcher.on_start = lambda worker: worker.kill("its machine is full") if worker.worker.number == 1 else None
            async with Run(Waiting, engine) as run:
                await until(lambda: len(engine.driver.fleet.ready) == 2)
                full = iter([True])
                launcher.on_start = lambda worker: worker.kill("its machine is full") if next(full, False) else None
                launcher.alive[1].kill()
                await until(lambda: len(engine.driver.fleet.ready) == 1)
                await until(lambda: len(engine.driver.fleet.ready) == 2)
                run.cancel()
                [_ async for _ in run]
            assert sum(event.endswith(" was not started: its machine is full") for event in engine.driver.events) == 2

    VirtualClock().run(run)


def test_a_run_ends_by_name_when_its_workers_are_gone_for_too_long() -> None:
    async def run() -> None:
        async with fleet(2, stall_seconds=20) as (engine, launcher):
            got: list[Trajectory] = []

            def all_die(trajectory: Trajectory) -> None:
                got.append(trajectory)
                launcher.on_start = lambda worker: worker.kill()
                for worker in launcher.alive:
                    worker.kill()

            with pytest.raises(EngineDead, match="worker"):
                await played(Dice, engine, tasks=game_tasks(300), breaker=1, on_trajectory=all_die)
            assert len(compared(got)) < 300

    VirtualClock().run(run)


class Shared(Dice):
    """Environment that records its lifespan, and has a block for one episode of the whole run at a time."""

    def lifespan(self) -> Any:
        return Noted()

    async def rollout(self, conversation: Conversation) -> None:
        assert self.shared == "open"
        async with self.episode.limiter("block", 2):
            EVENTS.append("in")
            for _ in range(5):
                await checkpoint()
            EVENTS.append("out")
        await conversation.generate()


class Noted:
    async def __aenter__(self) -> str:
        EVENTS.append("open")
        return "open"

    async def __aexit__(self, *_: object) -> None:
        EVENTS.append("close")


async def test_lifespan_is_entered_once_per_worker_and_once_in_the_run() -> None:
    async with fleet(3) as (engine, _):
        await played(Shared, engine)
    assert EVENTS.count("open") == EVENTS.count("close") == 4


async def test_limiter_place_of_a_lost_worker_is_free_for_other_workers() -> None:
    async with fleet(2) as (engine, launcher), engine:
        assert await launcher.limiter_service.acquire(0, "door", 1, 0, 0)
        launcher.workers[0].kill()
        with anyio.fail_after(WATCHDOG_SECONDS):
            assert await launcher.limiter_service.acquire(0, "door", 1, 1, 0)


async def test_a_limiter_is_the_whole_runs_and_not_a_workers() -> None:
    async with fleet(3) as (engine, _):
        await played(Shared, engine, tasks=game_tasks(40))
    inside = most = 0
    for event in EVENTS:
        inside += {"in": 1, "out": -1}.get(event, 0)
        most = max(most, inside)
    assert EVENTS.count("in") == 40
    assert most == 2, "two may be inside at once, and two were"


def test_run_completes_after_a_worker_dies_holding_a_limiter() -> None:
    async def run() -> None:
        async with fleet(2) as (engine, launcher):
            got = []
            async with Run(Holding, engine, tasks=game_tasks(6)) as run:
                await until(lambda: EVENTS)
                holder = int(EVENTS[0])
                launcher.workers[holder].kill()
                HOLDS.set()
                got = [trajectory async for trajectory in run]
            assert {each.outcome for each in got} == {Outcome.COMPLETED}
            assert len(got) == 6

    VirtualClock().run(run)


class _Flag:
    on = False

    def set(self) -> None:
        self.on = True


HOLDS = _Flag()


class Holding(Dice):
    """Environment whose first episode stays inside until the test releases it."""

    async def rollout(self, conversation: Conversation) -> None:
        async with self.episode.limiter("one", 1):
            limiter: Any = self.episode._state.shared.limiter("one", 1)
            EVENTS.append(str(limiter._worker))
            await until(lambda: HOLDS.on)
        await conversation.generate()


async def test_the_reader_finds_the_very_task_that_it_gave() -> None:
    given = game_tasks(5)
    async with fleet(2) as (engine, _):
        got = await played(Dice, engine, tasks=given)
    assert {id(each.task) for each in got} == {id(task) for task in given}


async def test_sampled_ids_of_workers_are_counted_while_the_fleet_ends() -> None:
    async with fleet(2) as (engine, _):
        async with engine:
            driver = engine.driver
            await played(Dice, engine, tasks=game_tasks(4))
            await until(lambda: engine.stats().sampled_tokens > 0)
            said = engine.stats().sampled_tokens
        assert driver.handles == []
        assert driver.sampled_by_the_gone >= said


def test_worker_silent_while_starting_is_dismissed_without_a_delay() -> None:
    async def run() -> None:
        async with fleet(2) as (engine, launcher), engine:
            await engine.update_weights("new")

            def fall_silent(joins: InProcessWorker) -> None:
                async def hang(snapshot: Any) -> None:
                    joins.silent = True
                    await anyio.sleep_forever()

                if joins.worker.number == 2:
                    joins.worker.catch_up = hang

            launcher.on_start = fall_silent
            launcher.workers[0].kill()
            await until(lambda: 2 in launcher.workers and launcher.workers[2].silent)
            assert (await engine.update_weights("newer")).version == "2"
            await until(lambda: len(engine.workers()) == 2)
            assert launcher.workers[2].killed
            assert {each.version for each in engine.workers()} == {"2"}
            assert any("worker 2 on" in event and "it has not answered for 90 s" in event for event in engine.events)

    VirtualClock().run(run)


@pytest.mark.parametrize("stage", ["lifespan", "catch_up"])
def test_endless_start_delays_neither_trainer_nor_end_of_the_run(stage: str) -> None:
    async def run() -> None:
        async with fleet((1, 2), stall_seconds=60) as (engine, launcher), engine:
            await until(lambda: len(engine.workers()) == 2)
            await engine.update_weights("new")

            def hang(joins: InProcessWorker) -> None:
                async def for_ever(*_: Any) -> None:
                    await anyio.sleep_forever()

                setattr(joins.worker, "run_opened" if stage == "lifespan" else "catch_up", for_ever)

            launcher.on_start = hang
            async with Run(Dice, engine, tasks=game_tasks(8), retries=9) as run:
                launcher.workers[0].kill()
                await until(lambda: 2 in launcher.workers)
                await engine.pause()
                await engine.resume()
                got = [trajectory async for trajectory in run]
            assert len(got) == 8
            await anyio.sleep(60)
            assert any("did not catch up" in event for event in engine.events) is (stage == "catch_up")

    VirtualClock().run(run)


async def test_answer_that_cannot_be_sent_is_the_reason_why_a_fleet_ends() -> None:
    """The worker stays in the fleet, so no event has the reason."""
    async with fleet(1) as (engine, launcher):
        lost = WorkerLost("it failed: the tokenizer cannot be sent")
        launcher.on_start = lambda worker: worker.fail_in.update(engine_known=lost)
        with pytest.raises(
            EngineDead, match=r"engine_known: no worker plays now: worker 0.*: it failed: the tokenizer"
        ):
            async with engine:
                pass


async def test_proof_without_an_answer_is_an_error_of_the_engine() -> None:
    async with fleet((1, 2)) as (engine, launcher), engine:
        proof = WeightProof(list(range(40)), [-1.0] * 39)
        for worker in launcher.workers.values():
            worker.fail_in.update(control=WorkerLost("the connection broke"))
        with pytest.raises(EngineDead, match=r"prove\(\): no worker answered"):
            await engine.prove(proof)


async def test_worker_that_joins_a_draining_run_receives_drain() -> None:
    async with fleet((1, 2)) as (engine, launcher), Run(Dice, engine, tasks=game_tasks(40), retries=9) as run:
        await until(lambda: len(engine.workers()) == 2)
        await anext(run)
        run.drain()
        launcher.workers[0].kill()
        await until(lambda: 2 in launcher.workers and any(call == "drain" for call, _ in launcher.workers[2].calls))
        async for _ in run:
            pass


class SlowToConstruct(Dice):
    """Environment whose constructor waits for `go` once `held` is set, like one that reads a large file."""

    held = threading.Event()
    go = threading.Event()

    def __init__(self) -> None:
        if self.held.is_set():
            EVENTS.append("constructs")
            assert self.go.wait(WATCHDOG_SECONDS), "the worker did not answer during the wait"


async def test_worker_answers_while_its_environment_is_constructed() -> None:
    for event in (SlowToConstruct.held, SlowToConstruct.go):
        event.clear()  # the same test has set it on another event loop
    environment = SlowToConstruct()
    async with fleet(2) as (engine, launcher), engine, anyio.create_task_group() as group:

        async def let_go_once_all_are_heard() -> None:
            await until(lambda: EVENTS == ["constructs"] * 2)
            for worker in launcher.alive:
                await worker.send("heartbeat")
            SlowToConstruct.go.set()

        SlowToConstruct.held.set()
        group.start_soon(let_go_once_all_are_heard)
        got = await played(environment, engine)
    assert {each.outcome for each in got} == {Outcome.COMPLETED}


def test_run_that_ends_during_a_workers_setup_is_closed_there_too() -> None:
    async def run() -> None:
        async with fleet((1, 2)) as (engine, launcher), engine:
            await until(lambda: len(engine.workers()) == 2)
            set_up = anyio.Event()
            launcher.on_start = lambda worker: worker.held_in.update(run_opened=set_up)
            async with Run(Dice, engine, retries=9) as play:
                launcher.workers[0].kill()
                await until(
                    lambda: 2 in launcher.workers and any(call == "run_opened" for call, _ in launcher.workers[2].calls)
                )
                async for _ in play:
                    pass
            set_up.set()
            await until(lambda: len(engine.workers()) == 2)
            await anyio.wait_all_tasks_blocked()
            assert not launcher.workers[2].worker._runs

    VirtualClock().run(run)
