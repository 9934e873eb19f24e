"""Time until the driver of a fleet detects a lost worker or machine, and until it has replaced it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import anyio.to_thread

from runner import RayEngines, ScriptedEngine
from runner.runs.event_loop import on_event_loop
from tests.benchmarks.figures import Figure, main
from tests.cluster.ray_cluster import standing

WORKER_KILL_COUNT = 4
"""Number of workers that are killed, in two slots in turn: a slot gets at most three new workers an hour."""
MACHINE_KILL_COUNT = 3
POLL_SECONDS = 0.002
"""Seconds between two looks at the list of workers."""


def measure() -> Iterator[Figure]:
    """Time from `kill -9` until the driver reports it, and until a replacement plays."""
    noticed, replaced = zip(*on_event_loop(_workers), strict=True)
    yield Figure("a worker's process is killed: noticed", "s", noticed, under=0.5)
    yield Figure("another one is ready to play, its back-off of 1 to 2 s included", "s", replaced, under=5)
    with TemporaryDirectory(prefix="dr-", dir="/tmp") as folder:  # a short path, since Ray's sockets lie in it
        yield Figure("a machine is killed: noticed", "s", tuple(on_event_loop(_machines, Path(folder))), under=5)


async def _workers() -> list[tuple[float, float]]:
    measured = []
    async with RayEngines(ScriptedEngine("hi"), workers=2) as engine:
        for number in range(WORKER_KILL_COUNT):
            victim = engine.workers()[number % 2]
            began = time.perf_counter()
            os.kill(victim.pid, signal.SIGKILL)
            noticed = await _after(engine, began, workers=1)
            measured.append((noticed, await _after(engine, began, workers=2)))
    return measured


async def _machines(folder: Path) -> list[float]:
    measured = []
    with standing(folder, cpus=1) as cluster:
        async with RayEngines(ScriptedEngine("hi"), workers=(1, 2), address=cluster.address) as engine:
            for _ in range(MACHINE_KILL_COUNT):
                await anyio.to_thread.run_sync(cluster.tell, "add")
                await _after(engine, 0.0, workers=2)
                began = time.perf_counter()
                async with anyio.create_task_group() as group:
                    group.start_soon(anyio.to_thread.run_sync, cluster.tell, "kill")
                    measured.append(await _after(engine, began, workers=1))
    return measured


async def _after(engine: RayEngines, began: float, *, workers: int) -> float:
    """Wait until this many workers exist, and return the seconds since `began`."""
    while len(engine.workers()) != workers:  # noqa: ASYNC110  # no event is set
        await anyio.sleep(POLL_SECONDS)
    return time.perf_counter() - began


if __name__ == "__main__":
    main(measure)
