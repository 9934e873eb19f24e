"""Cost of the scripted engine itself for a turn and a token, on one core. All figures on this engine contain it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import anyio

from runner.engines.base import GenerationRequest
from runner.options import Sampling
from runner.runs.event_loop import collector_settings, on_event_loop
from runner.testing import Latency, ScriptedEngine
from tests.benchmarks.figures import Figure, main, on_one_core

TEXT = "[add(a=17, b=25)]"
IDS = len(TEXT) + 1
TURN_COUNT = 10
ROUND_COUNT = 3
SAMPLING = Sampling.defaults()


def measure() -> Iterator[Figure]:
    """Cost of the scripted engine itself."""
    on_one_core()
    trickle = Latency(between=1)
    kinds = {
        f"scripted engine: a turn of {IDS} ids, whole": (256, 1, ScriptedEngine(TEXT, chunks="whole")),
        "  in deltas of eight": (256, 1, ScriptedEngine(TEXT)),
        "  an id that is a delta and wakes a task, 1,000 streams": (
            1_000,
            IDS,
            ScriptedEngine(TEXT, chunks=1, latency=trickle, places=1_000),
        ),
    }
    for name, (streams, parts, engine) in kinds.items():
        costs = tuple(on_event_loop(_microseconds, streams, engine) / parts for _ in range(ROUND_COUNT))
        yield Figure(name, "us", costs)


async def _microseconds(streams: int, engine: ScriptedEngine) -> float:
    async with engine:
        with collector_settings():
            began = time.process_time()
            async with anyio.create_task_group() as tasks:
                for number in range(streams):
                    tasks.start_soon(_talk, engine, number)
            return (time.process_time() - began) / streams / TURN_COUNT * 1e6


async def _talk(engine: ScriptedEngine, number: int) -> None:
    session = engine.session()
    for turn in range(TURN_COUNT):
        request = GenerationRequest(
            name=f"{number}/main/{turn}",
            prompt=[1] * 350,
            sampling=SAMPLING,
            stop_ids=engine.stop_ids,
            seed=number,
            session=session,
        )
        async with engine.stream(request) as stream:
            async for _ in stream:
                pass
    engine.close_session(session)


if __name__ == "__main__":
    main(measure)
