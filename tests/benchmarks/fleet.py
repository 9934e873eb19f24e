"""Whole episodes on workers of Ray: what each costs its driver and its worker, and whether waiting workers add up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from runner import Concurrency, RayEngines, Run
from runner.engines.scripted.script import Latency
from runner.runs.process import collector_settings, on_event_loop
from runner.testing import ScriptedEngine
from tests.benchmarks.environments import REPLIES, AsyncSums
from tests.benchmarks.figures import Figure, main

EPISODES = 2_000
WAITING_EPISODES = 400
ROUNDS = 5
WORKERS = 4
PLACES = 8
WAIT = 80
"""Ticks from a request to its first id, of those engines that wait."""
TICK = 0.002
"""Seconds of a tick: some twelve trajectories a second of one of them, so that none of them is busy."""


def measure() -> Iterator[Figure]:
    """Whole episodes on workers of Ray: trajectories a second, processor time, efficiency."""
    alone = [on_event_loop(_alone) for _ in range(ROUNDS)]
    rates, driver, worker = zip(*on_event_loop(_busy), strict=True)
    yield Figure("trajectories of four turns through a driver, run file", "/s", rates, at_least=1000)
    yield Figure("processor time of the driver for each", "ms", driver, under=1.0)
    yield Figure("processor time of the worker for each", "ms", worker)
    yield Figure("processor time of the same in one process, driver's part included", "ms", tuple(alone))
    waiting = on_event_loop(_waiting)
    yield Figure(f"{WORKERS} workers that wait, beside {WORKERS} times one process", "", waiting, at_least=0.95)


async def _alone() -> float:
    with TemporaryDirectory() as folder:
        return (await _play(ScriptedEngine(REPLIES), EPISODES, Path(folder) / "run.db"))[1]


async def _busy() -> list[tuple[float, float, float]]:
    engine = RayEngines(ScriptedEngine(REPLIES), workers=2)
    measured = []
    async with engine:
        for _ in range(ROUNDS):
            before = _worked(engine)
            with TemporaryDirectory() as folder:
                rate, cost = await _play(engine, EPISODES, Path(folder) / "run.db")
            measured.append((rate, cost, (_worked(engine) - before) * 1e3 / EPISODES))
    return measured


async def _waiting() -> tuple[float, ...]:
    ratios = []
    async with RayEngines(_slow(), workers=WORKERS) as engine:
        for _ in range(ROUNDS):
            one, _ = await _play(_slow(), WAITING_EPISODES // WORKERS, None)
            many, _ = await _play(engine, WAITING_EPISODES, None)
            ratios.append(many / one / WORKERS)
    return tuple(ratios)


def _slow() -> ScriptedEngine:
    return ScriptedEngine(REPLIES, places=PLACES, latency=Latency(first=WAIT), tick=TICK)


async def _play(engine: Any, episodes: int, file: Path | None) -> tuple[float, float]:
    """Trajectories a second, and this process's own milliseconds for each."""
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
    """Seconds of processor time that the workers took so far."""
    times = [psutil.Process(worker.pid).cpu_times() for worker in engine.workers()]
    return sum(each.user + each.system for each in times)


if __name__ == "__main__":
    main(measure)
