"""An engine in another process: cost of a delta of many streams in each of the two processes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import anyio
import psutil

from runner import RayEngine, Sampling, ScriptedEngine
from runner.engines.base import Engine, GenerationRequest
from runner.engines.scripted.script import Latency
from runner.runs.event_loop import collector_settings, on_event_loop
from tests.benchmarks.figures import Figure, main

ROUND_COUNT = 5
STREAM_COUNT = 256
STREAM_IDS = 400
"""Ids of each stream, one a delta."""
TICK_SECONDS = 0.02


def measure() -> Iterator[Figure]:
    """Deltas of one id each, from streams that are sampled together."""
    here, there, rate = zip(*on_event_loop(_shared, TICK_SECONDS), strict=True)
    hurried, _, most = zip(*on_event_loop(_shared, 0.0), strict=True)
    alone = tuple(on_event_loop(_alone))
    yield Figure("processor time here for a delta of a shared engine that is never idle", "us", hurried, under=6.0)
    yield Figure("deltas of that", "/s", most)
    yield Figure(f"processor time here for a delta of one with {1 / TICK_SECONDS:.0f} steps a second", "us", here)
    yield Figure("processor time of the engine's process for it, the scripted engine's own included", "us", there)
    yield Figure("processor time of both together in one process", "us", alone)
    yield Figure("deltas of that", "/s", rate)


def _engine(tick: float) -> ScriptedEngine:
    return ScriptedEngine(
        "one two three " * STREAM_IDS, places=STREAM_COUNT, chunks=1, latency=Latency(between=1), tick=tick
    )


async def _shared(tick: float) -> list[tuple[float, float, float]]:
    measured = []
    async with RayEngine(_engine(tick)) as engine:
        process = psutil.Process(engine.pid)
        for _ in range(ROUND_COUNT):
            before = _worked(process)
            here, seconds = await _read(engine)
            deltas = STREAM_COUNT * STREAM_IDS
            measured.append((here, (_worked(process) - before) * 1e6 / deltas, deltas / seconds))
    return measured


async def _alone() -> list[float]:
    async with _engine(TICK_SECONDS) as engine:
        return [(await _read(engine))[0] for _ in range(ROUND_COUNT)]


async def _read(engine: Engine) -> tuple[float, float]:
    """Return this process's microseconds for each delta, and the seconds for all of them."""

    async def read(number: int) -> None:
        sampling = dataclasses.replace(Sampling.defaults(), max_tokens=STREAM_IDS)
        request = GenerationRequest(name=f"{number}/main/0", prompt=[5, 6, 7], sampling=sampling, acts_on_deltas=True)
        async with engine.stream(request) as stream:
            deltas = [delta async for delta in stream]
        if sum(len(delta.token_ids) for delta in deltas) != STREAM_IDS:
            raise AssertionError(f"{len(deltas)} deltas, {stream.finish}")

    with collector_settings():
        began, worked = time.perf_counter(), time.process_time()
        async with anyio.create_task_group() as group:
            for number in range(STREAM_COUNT):
                group.start_soon(read, number)
        return (time.process_time() - worked) * 1e6 / (STREAM_COUNT * STREAM_IDS), time.perf_counter() - began


def _worked(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    main(measure)
