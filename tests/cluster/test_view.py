"""The view of workers during a run: identity, work of each worker, and faults of lost workers."""

from __future__ import annotations

import re
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from runner import Conversation, Environment, Limits, Run, ScriptedEngine, Task, reward
from runner.cluster.driver import HEARTBEAT_SECONDS
from runner.cluster.engines import FleetEngine
from runner.cluster.fleet import WorkerSlot
from runner.cluster.protocol import Heartbeat, PlayingNow
from runner.cluster.worker_handle import WorkerHandle
from runner.engines.base import EngineStats
from runner.errors import RunStuck
from runner.runs.fleet_stats import SILENT_SECONDS, WAITED_SECONDS, FleetStats, Trouble
from runner.runs.live_stats import LiveStats, StatsReader, in_words
from runner.runs.player import IdleReason
from runner.runs.reporter import PlainReporter
from runner.testing import VirtualClock
from tests.cluster.in_process import InProcess, InProcessWorker, in_process

pytestmark = [pytest.mark.anyio, pytest.mark.sample_functions(2)]

CLOCK = VirtualClock()


@pytest.fixture
def anyio_backend() -> Any:
    return CLOCK.asyncio_backend


class Waiting(Environment):
    """Environment with one turn, which then waits for ever for a limiter that it already holds."""

    def tasks(self) -> list[Task]:
        return [Task(id=str(number), prompt="hello") for number in range(16)]

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate()
        async with self.episode.limiter(self.task.id, 1), self.episode.limiter(self.task.id, 1):
            raise AssertionError("one cannot go through a door twice at once")

    @reward
    def spoke(self) -> bool:
        return True


def fleet_of(launcher: InProcess, workers: int | tuple[int, int]) -> FleetEngine:
    return FleetEngine(ScriptedEngine("hi", places=8), launcher, workers)


async def until_pulses(run: Run) -> None:
    """Wait until every worker has reported its state twice."""
    await anyio.sleep(3 * HEARTBEAT_SECONDS)
    await checkpoint()


def fleet_seen(stats: LiveStats) -> FleetStats:
    assert stats.fleet is not None, "the engine has workers that play"
    return stats.fleet


def trouble_of(fleet: FleetStats) -> dict[int, list[Trouble]]:
    """Return the troubles of each worker, without its lag, which depends on the load of the machine."""
    late = {Trouble.LATE}
    found = {each.number: [it for it in fleet.troubles(each) if it not in late] for each in fleet.workers}
    return {number: troubles for number, troubles in found.items() if troubles}


LONG = Limits.defaults().lifted()


async def test_figures_count_workers_and_name_waits_of_episodes() -> None:
    async with in_process() as launcher, Run(Waiting, fleet_of(launcher, 2), limits=LONG) as run:
        reader = StatsReader()
        await until_pulses(run)
        stats = reader.read(run)
        seen = fleet_seen(stats)
        assert (len(seen.workers), seen.most, seen.few, seen.absent) == (2, 2, False, {})
        assert trouble_of(seen) == {}
        assert "2 of 2 workers" in list(in_words(stats))
        assert len(stats.slowest) == 5
        for stuck in stats.slowest:
            assert re.fullmatch(r"limiter .*, on worker [01] on \S+", stuck.activity), stuck
            assert stuck.turns == 1
        await anyio.sleep(120)
        seen = fleet_seen(reader.read(run))
        late = seen.troubled()
        assert sorted((worker.number, worker.playing, worker.width) for worker in late) == [(0, 8, 16), (1, 8, 16)]
        assert all(worker.waited > WAITED_SECONDS for worker in late)
        assert all(worker.oldest.startswith("limiter") for worker in late)
        assert trouble_of(seen) == {0: [Trouble.STUCK], 1: [Trouble.STUCK]}
        run.cancel()


async def test_others_are_seen_with_new_weights_while_one_worker_updates() -> None:
    async with in_process() as launcher, Run(Waiting, engine := fleet_of(launcher, 3), limits=LONG) as run:
        reader = StatsReader()
        await until_pulses(run)
        assert {worker.version for worker in fleet_seen(reader.read(run)).workers} == {"scripted"}
        held = launcher.workers[1].held_in["update_weights"] = anyio.Event()
        async with anyio.create_task_group() as updating:
            updating.start_soon(engine.update_weights, "new")
            await until_pulses(run)
            stats = reader.read(run)
            assert [worker.version for worker in fleet_seen(stats).workers] == ["1", "scripted", "1"]
            assert trouble_of(fleet_seen(stats)) == {1: [Trouble.OUTDATED]}
            assert "3 of 3 workers (1 on weights scripted instead of 1)" in list(in_words(stats))
            held.set()
        stats = reader.read(run)
        assert {worker.version for worker in fleet_seen(stats).workers} == {"1"}
        assert "3 of 3 workers" in list(in_words(stats))
        run.cancel()


async def test_worker_without_a_heartbeat_since_its_start_is_silent() -> None:
    async with in_process() as launcher:

        def mute(worker: InProcessWorker) -> None:
            worker.held_in["heartbeat"] = anyio.Event()

        launcher.on_start = mute
        async with Run(Waiting, fleet_of(launcher, 1), limits=LONG) as run:
            await anyio.sleep(2 * SILENT_SECONDS)
            seen = fleet_seen(StatsReader().read(run))
            assert [seen.troubles(worker) for worker in seen.workers] == [[Trouble.SILENT]]
            run.cancel()


async def test_absent_workers_are_counted_by_reason() -> None:
    async with in_process() as launcher:

        def begin(worker: InProcessWorker) -> None:
            match worker.worker.number:
                case 1 | 2:
                    worker.silent = True  # as if it had no machine
                case 3:
                    worker.held_in["join"] = anyio.Event()
                case number if number >= 4:
                    worker.killed_in = "join"  # each process in this slot dies

        launcher.on_start = begin
        async with Run(Waiting, fleet_of(launcher, (1, 5)), limits=LONG) as run:
            reader = StatsReader()
            await anyio.sleep(0.1)
            stats = reader.read(run)
            lost = {IdleReason.LOST: 1, IdleReason.STARTING: 1, IdleReason.UNPLACED: 2}
            assert (len(fleet_seen(stats).workers), fleet_seen(stats).absent) == (1, lost)
            assert "1 of 5 workers (1 lost, being replaced; 1 starting; 2 without a machine)" in list(in_words(stats))
            await anyio.sleep(60)
            resting = {IdleReason.RESTING: 1, IdleReason.STARTING: 1, IdleReason.UNPLACED: 2}
            assert fleet_seen(reader.read(run)).absent == resting
            launcher.workers[3].held_in["join"].set()
            await anyio.sleep(0.1)
            assert fleet_seen(reader.read(run)).absent == {IdleReason.RESTING: 1, IdleReason.UNPLACED: 2}
            run.cancel()


async def test_a_worker_that_is_being_ended_does_not_play_any_more() -> None:
    async with in_process() as launcher, Run(Waiting, engine := fleet_of(launcher, (1, 2)), limits=LONG) as run:
        await until_pulses(run)
        engine.driver.handles[1].dismiss("for the test")
        seen = fleet_seen(StatsReader().read(run))
        assert ([worker.number for worker in seen.workers], seen.absent) == ([0], {IdleReason.LOST: 1})
        run.cancel()


async def test_worker_that_no_machine_takes_stays_unplaced_between_tries() -> None:
    async with in_process() as launcher:
        launcher.on_start = lambda worker: worker.kill("its machine is full") if worker.worker.number else None
        async with Run(Waiting, fleet_of(launcher, (1, 2)), limits=LONG) as run:
            for _ in range(20):
                await anyio.sleep(0.7)
                assert fleet_seen(StatsReader().read(run)).absent == {IdleReason.UNPLACED: 1}
            run.cancel()


async def test_lost_worker_is_reported_once_and_in_the_summary() -> None:
    async with in_process() as launcher, Run(Waiting, fleet_of(launcher, (1, 2)), limits=LONG) as run:
        reader = StatsReader()
        await until_pulses(run)
        assert reader.read(run).worker_events == ()
        launcher.workers[1].kill()
        await checkpoint()
        await anyio.sleep(0.1)
        stats = reader.read(run)
        assert (len(fleet_seen(stats).workers), fleet_seen(stats).most) == (1, 2)
        (event,) = stats.worker_events
        assert re.match(r"worker 1 on \S+ is lost: its process died; the \d+ episodes .* are played again", event)
        assert reader.read(run).worker_events == ()
        assert event in run.summary.faults
        run.cancel()


class Said(PlainReporter):
    def __init__(self) -> None:
        super().__init__("waiting")
        self.said: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)


async def test_lost_worker_is_in_plain_lines_and_the_last_fault() -> None:
    reporter = Said()
    async with in_process() as launcher, Run(Waiting, fleet_of(launcher, (1, 2)), limits=LONG) as run:
        async with anyio.create_task_group() as watching:
            watching.start_soon(reporter.watch, run)
            await until_pulses(run)
            launcher.workers[0].kill()
            await anyio.sleep(10)
            watching.cancel_scope.cancel()
        run.cancel()
    assert any(line.lstrip(" :0123456789").startswith("worker 0 on") for line in reporter.said), reporter.said
    assert reporter.last_fault.startswith("worker 0 on")


class Starting(Said):
    def _starting(self, seconds: float, workers: str, what: str) -> None:
        self.said.append(workers)


@pytest.mark.parametrize(("workers", "shown"), [(2, "1 of 2 workers"), ((2, 3), "1 of at least 2 workers")])
async def test_start_of_a_fleet_shows_how_many_workers_are_ready(workers: int | tuple[int, int], shown: str) -> None:
    reporter = Starting()
    async with in_process() as launcher, anyio.create_task_group() as watching:

        def begin(worker: InProcessWorker) -> None:
            worker.silent = worker.worker.number == 1
            if worker.worker.number == 2:
                worker.held_in["join"] = anyio.Event()

        launcher.on_start = begin
        run = Run(Waiting, fleet_of(launcher, workers), limits=LONG)
        watching.start_soon(reporter.watch, run)
        watching.start_soon(run.__aenter__)
        await anyio.sleep(5)
        watching.cancel_scope.cancel()
    absent = "1 without a machine" if workers == 2 else "1 starting; 1 without a machine"
    assert reporter.said[-1] == f", {shown} ({absent})"


async def test_idle_fleet_is_stuck_and_names_workers_and_waits() -> None:
    async def play() -> None:
        async with in_process() as launcher, Run(Waiting, fleet_of(launcher, 2), limits=LONG) as run:
            async for _ in run:
                pass

    with pytest.raises(RunStuck, match=r"limiter .*, on worker \d on \S+ for 6\d\d s"):
        await play()


async def test_paused_episode_does_not_seem_to_move_with_a_late_heartbeat() -> None:
    starts: list[float] = []

    class Attempt:
        def note_heartbeat(self, playing: PlayingNow | None, since: float) -> None:
            starts.append(since)

    process: Any = None  # the process is not used
    handle = WorkerHandle(0, WorkerSlot(0), process, attempts={7: Attempt()})
    for late in (0.0, 5.0):
        await anyio.sleep(HEARTBEAT_SECONDS + late)
        now = 100.0 + anyio.current_time() - late
        stands = PlayingNow(number=7, turns=1, activity="a tool", since=90.0)
        handle.note_heartbeat(Heartbeat(now=now, stats=EngineStats(open=1), lag=0.0, playing=1, oldest=[stands]))
    assert starts[0] == starts[1]
