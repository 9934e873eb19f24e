"""What is seen of workers while a run plays: how many, which of them are late, and what happened to those lost."""

from __future__ import annotations

import re
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from runner import Conversation, Environment, Limits, Run, ScriptedEngine, Task, reward
from runner.cluster.driver import PULSE_SECONDS
from runner.cluster.engines import FleetEngine
from runner.errors import RunStuck
from runner.runs.figures import WAITED_SECONDS, Gauge, in_words
from runner.runs.reporter import PlainReporter
from runner.testing import VirtualClock
from tests.cluster.in_process import InProcess, in_process

pytestmark = pytest.mark.anyio

CLOCK = VirtualClock()


@pytest.fixture
def anyio_backend() -> Any:
    return CLOCK.asyncio_backend


class Waiting(Environment):
    """Speaks once, and then waits for ever for what it has itself."""

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
    """Let every worker say how it does, twice."""
    await anyio.sleep(3 * PULSE_SECONDS)
    await checkpoint()


LONG = Limits.defaults().lifted()


async def test_figures_count_the_workers_and_name_what_their_episodes_wait_for() -> None:
    async with in_process() as launcher, Run(Waiting, fleet_of(launcher, 2), limits=LONG) as run:
        gauge = Gauge()
        await until_pulses(run)
        figures = gauge.read(run)
        assert (figures.workers, figures.most_workers, figures.few_workers) == (2, 2, False)
        assert not any(worker.waited > WAITED_SECONDS for worker in figures.late_workers)
        assert "2 of 2 workers" in list(in_words(figures))
        assert len(figures.slowest) == 5
        for stuck in figures.slowest:
            assert re.fullmatch(r"limiter .*, on worker [01] on \S+", stuck.activity), stuck
            assert stuck.turns == 1
        await anyio.sleep(120)
        late = gauge.read(run).late_workers
        assert sorted((worker.number, worker.playing) for worker in late) == [(0, 8), (1, 8)]
        assert all(worker.waited > WAITED_SECONDS for worker in late)
        assert all(worker.oldest.startswith("limiter") for worker in late)
        run.cancel()


async def test_a_worker_that_is_lost_is_news_once_and_a_fault_of_the_summary() -> None:
    async with in_process() as launcher, Run(Waiting, fleet_of(launcher, (1, 2)), limits=LONG) as run:
        gauge = Gauge()
        await until_pulses(run)
        assert gauge.read(run).news == ()
        launcher.workers[1].kill()
        await checkpoint()
        await anyio.sleep(0.1)
        figures = gauge.read(run)
        assert (figures.workers, figures.most_workers) == (1, 2)
        (event,) = figures.news
        assert re.match(r"worker 1 on \S+ is lost: its process died; the \d+ episodes .* are played again", event)
        assert gauge.read(run).news == ()
        assert event in run.summary.faults
        run.cancel()


class Said(PlainReporter):
    def __init__(self) -> None:
        super().__init__("waiting")
        self.said: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)


async def test_plain_lines_tell_of_a_lost_worker_and_it_is_the_last_fault() -> None:
    reporter = Said()
    async with in_process() as launcher, Run(Waiting, fleet_of(launcher, (1, 2)), limits=LONG) as run:
        async with anyio.create_task_group() as watching:
            watching.start_soon(reporter.watch, run)
            await until_pulses(run)
            launcher.workers[0].kill()
            await anyio.sleep(10)
            watching.cancel_scope.cancel()
        run.cancel()
    assert any(line.startswith("worker 0 on") for line in reporter.said), reporter.said
    assert reporter.last_fault.startswith("worker 0 on")


async def test_a_fleet_where_nothing_happens_is_stuck_and_says_on_which_worker_who_waits_for_what() -> None:
    async def play() -> None:
        async with in_process() as launcher, Run(Waiting, fleet_of(launcher, 2), limits=LONG) as run:
            async for _ in run:
                pass

    with pytest.raises(RunStuck, match=r"limiter .*, on worker \d on \S+ since 6\d\d s"):
        await play()
