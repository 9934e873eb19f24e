"""Whole episodes on Ray workers: cost for the driver and for a worker, and the efficiency of workers that only wait."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from runner import Concurrency, RayEngines, Run
from runner.cluster.engine_process import EngineProcess
from runner.cluster.protocol import AttemptResult
from runner.cluster.ray.actors import WorkerActor
from runner.cluster.ray.launcher import RayLauncher
from runner.cluster.worker import Worker
from runner.engines.base import BaseEngine
from runner.engines.scripted.script import Latency
from runner.runs.event_loop import collector_settings, on_event_loop
from runner.testing import ScriptedEngine
from tests.benchmarks.environments import REPLIES, AsyncSums
from tests.benchmarks.figures import Figure, main

EPISODE_COUNT = 2_000
WAITING_EPISODE_COUNT = 400
ROUND_COUNT = 5
WORKER_COUNT = 4
PLACE_COUNT = 8
FIRST_ID_TICK_COUNT = 8
"""Ticks from a request to its first id, for engines that only wait."""
TICK_SECONDS = 0.02
"""Seconds of a tick: an engine then plays some twelve trajectories a second, so that no engine is busy.

A late tick on busy cores delays all later ones, so the ticks are few.
"""


def measure() -> Iterator[Figure]:
    """Whole episodes on workers of Ray: trajectories a second, processor time, efficiency."""
    alone = [on_event_loop(_alone) for _ in range(ROUND_COUNT)]
    rates, driver, worker = zip(*on_event_loop(_busy), strict=True)
    yield Figure("trajectories of four turns played by two workers, run file", "/s", rates)
    yield Figure("processor time of the driver for each", "ms", driver, under=1.0)
    yield Figure("processor time of the worker for each", "ms", worker)
    yield Figure("processor time of the same in one process, driver's part included", "ms", tuple(alone))
    rates, driver, worker = zip(*on_event_loop(_replaying), strict=True)
    yield Figure("the same trajectories where a worker plays none of them again, run file", "/s", rates, at_least=1000)
    yield Figure("processor time of the driver for each of these", "ms", driver, under=1.0)
    yield Figure("processor time of the worker for each of these, which is its share", "ms", worker, under=0.6)
    waiting = on_event_loop(_waiting)
    yield Figure(
        f"{WORKER_COUNT} workers that wait, beside {WORKER_COUNT} times one process", "", waiting, at_least=0.95
    )


async def _alone() -> float:
    with TemporaryDirectory() as folder:
        return (await _play(ScriptedEngine(REPLIES), EPISODE_COUNT, Path(folder) / "run.db"))[1]


class ReplayingWorker(Worker):
    """Worker that plays one episode, and returns its trajectories for all later episodes."""

    _first: AttemptResult | None = None

    async def play(self, run_number: int, number: int, packed: bytes) -> AttemptResult:
        """Return the trajectories of the first episode, with the name of this one."""
        key = self._key(packed)
        first = self._first = self._first or await super().play(run_number, number, packed)
        renamed = [
            dataclasses.replace(each, id=key.id, index=key.index, seed=key.seed(0)) for each in first.trajectories
        ]
        return AttemptResult(renamed, first.faults, first.permanent)


class ReplayingActor(WorkerActor):
    """A `ReplayingWorker` in an actor."""

    def make(self, engine: BaseEngine, *arguments: Any) -> EngineProcess:
        number, _ = arguments
        return ReplayingWorker(engine, number, NoLimiterService())


class NoLimiterService:
    """Limiter service for episodes without limiters."""

    async def acquire(self, run: int, name: str, limit: int, worker: int, lease: int) -> bool:
        raise AssertionError(f"a limiter {name}")

    def release(self, worker: int, lease: int) -> None:
        raise AssertionError("a lease")


class ReplayingEngines(RayEngines):
    """Engines of a fleet that replays. The driver is measured on its own core, and playing would use both cores."""

    def __init__(self) -> None:
        super().__init__(ScriptedEngine(REPLIES), workers=1)
        assert isinstance(self.launcher, RayLauncher)
        self.launcher.worker_kind = ReplayingActor


async def _replaying() -> list[tuple[float, float, float]]:
    return await _measured(ReplayingEngines())


async def _busy() -> list[tuple[float, float, float]]:
    return await _measured(RayEngines(ScriptedEngine(REPLIES), workers=2))


async def _measured(engine: RayEngines) -> list[tuple[float, float, float]]:
    """Trajectories a second, and the milliseconds of the driver and of the workers per trajectory, for each round."""
    measured = []
    async with engine:
        for _ in range(ROUND_COUNT):
            before = _worked(engine)
            with TemporaryDirectory() as folder:
                rate, cost = await _play(engine, EPISODE_COUNT, Path(folder) / "run.db")
            measured.append((rate, cost, (_worked(engine) - before) * 1e3 / EPISODE_COUNT))
    return measured


async def _waiting() -> tuple[float, ...]:
    ratios = []
    async with RayEngines(_slow(), workers=WORKER_COUNT) as engine:
        for _ in range(ROUND_COUNT):
            one, _ = await _play(_slow(), WAITING_EPISODE_COUNT // WORKER_COUNT, None)
            many, _ = await _play(engine, WAITING_EPISODE_COUNT, None)
            ratios.append(many / one / WORKER_COUNT)
    return tuple(ratios)


def _slow() -> ScriptedEngine:
    return ScriptedEngine(REPLIES, places=PLACE_COUNT, latency=Latency(first=FIRST_ID_TICK_COUNT), tick=TICK_SECONDS)


async def _play(engine: Any, episodes: int, file: Path | None) -> tuple[float, float]:
    """Return the trajectories a second, and this process's milliseconds per trajectory."""
    concurrency = Concurrency(episodes=None if file is None else 256)
    async with Run(AsyncSums(episodes), engine, file=file, concurrency=concurrency) as run:
        with collector_settings():
            began, worked = time.perf_counter(), time.process_time()
            played = 0
            async for trajectory in run:
                if trajectory.reward != 1:
                    raise AssertionError(f"{trajectory.outcome.value}: {trajectory.error}")
                played += 1
            seconds, cost = time.perf_counter() - began, time.process_time() - worked
    return played / seconds, cost * 1e3 / played


def _worked(engine: RayEngines) -> float:
    """Seconds of processor time that the workers have used so far."""
    times = [psutil.Process(worker.pid).cpu_times() for worker in engine.workers()]
    return sum(each.user + each.system for each in times)


if __name__ == "__main__":
    main(measure)
