"""Ten thousand episodes alive at once, on one core: memory per episode, and lag of the event loop."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from typing import cast

import anyio
import anyio.lowlevel
import psutil

from runner import Concurrency, Run
from runner.engines.scripted.stream import ScriptedStream
from runner.runs.event_loop import collector_settings, on_event_loop
from runner.testing import Latency, ScriptedEngine
from tests.benchmarks.environments import AsyncSums
from tests.benchmarks.figures import Figure, main, on_one_core

EPISODE_COUNT = 10_000
REPLY_CHARS = 250
TICK_SECONDS = 0.25
MEASURED_SECONDS = 10.0
PROBE_SECONDS = 0.005


def measure() -> Iterator[Figure]:
    """Ten thousand live episodes: memory, and the loop's lag while each of them gets an id every 250 ms."""
    on_one_core()
    yield from on_event_loop(_measure)


async def _measure() -> list[Figure]:
    # One id per tick for each stream. Streams begin up to 50 ticks apart, which makes no difference once all have
    # begun.
    engine = ScriptedEngine(
        "x" * REPLY_CHARS,
        places=EPISODE_COUNT,
        chunks=1,
        latency=Latency(between=1, jitter=50),
        tick=TICK_SECONDS,
        logprobs=False,
    )
    async with Run(AsyncSums(EPISODE_COUNT), engine, concurrency=Concurrency(episodes=EPISODE_COUNT)) as run:
        empty = _resident()
        with collector_settings():
            enough = EPISODE_COUNT
            while len(run.in_flight) < enough or engine.stats().sampled_tokens < enough:  # noqa: ASYNC110  # no event is set
                await anyio.sleep(0.1)
            gc.collect()
            kilobytes = (_resident() - empty) / EPISODE_COUNT / 1000
            tokens = _token_bytes(engine) / EPISODE_COUNT / 1000
            began, sampled = time.perf_counter(), engine.stats().sampled_tokens
            by_clock, by_processor = await _lags()
            rate = (engine.stats().sampled_tokens - sampled) / (time.perf_counter() - began)
        run.cancel()
    return [
        Figure("a live episode, without its tokens", "kB", (kilobytes - tokens,), under=30),
        Figure("  its tokens at that moment", "kB", (tokens,)),
        Figure("ids that come in at the same time, one a delta", "ids/s", (rate,)),
        Figure("lag of the loop, 99th percentile", "ms", (_percentile(by_clock, 99),), under=10),
        Figure("  median", "ms", (_percentile(by_clock, 50),)),
        Figure("  a round of the loop by processor time, 99th percentile", "ms", (_percentile(by_processor, 99),)),
    ]


async def _lags() -> tuple[list[float], list[float]]:
    """Delays of a timer in ms, and the time of the round of the loop after it."""
    by_clock: list[float] = []
    by_processor: list[float] = []
    end = time.perf_counter() + MEASURED_SECONDS
    while (began := time.perf_counter()) < end:
        await anyio.sleep(PROBE_SECONDS)
        by_clock.append((time.perf_counter() - began - PROBE_SECONDS) * 1e3)
        worked = time.thread_time()
        await anyio.lowlevel.checkpoint()
        by_processor.append((time.thread_time() - worked) * 1e3)
    return by_clock, by_processor


def _token_bytes(engine: ScriptedEngine) -> int:
    """Bytes of ids, log-probabilities and sources in the logs, and of the engine's copy of its future replies."""
    streams = cast("Iterable[ScriptedStream]", engine.runtime.requests)
    logged = sum(len(stream.request.prompt) + stream.sent for stream in streams)
    return logged * 9 + EPISODE_COUNT * (REPLY_CHARS + 1) * 2 * 8


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


def _percentile(values: list[float], percent: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]


if __name__ == "__main__":
    main(measure)
