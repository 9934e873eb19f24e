"""Turns a second on one core, with a scripted engine that takes no time: the cost of the runner itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from runner import Concurrency, Environment, Run
from runner.runs.event_loop import collector_settings, on_event_loop
from runner.testing import ScriptedEngine
from tests.benchmarks.environments import REPLIES, AsyncSums, SyncSums
from tests.benchmarks.figures import Figure, main, on_one_core

EPISODE_COUNT = 500
ROUND_COUNT = 7


def measure() -> Iterator[Figure]:
    """Turns a second on one core, with a scripted engine that takes no time."""
    on_one_core()
    kinds: dict[str, tuple[Environment, bool]] = {
        "async tools": (AsyncSums(EPISODE_COUNT), False),
        "async tools, run file": (AsyncSums(EPISODE_COUNT), True),
        "sync tools": (SyncSums(EPISODE_COUNT), False),
        "sync tools, run file": (SyncSums(EPISODE_COUNT), True),
    }
    rounds = [{name: _round(*kind) for name, kind in kinds.items()} for _ in range(ROUND_COUNT)]
    for name in kinds:
        by_clock, by_processor = zip(*(results[name] for results in rounds), strict=True)
        yield Figure(f"turns, {name}", "turns/s", by_clock, at_least=2000)
        yield Figure(f"turns, {name}, by processor time", "turns/s", by_processor)


def _round(environment: Environment, keep: bool) -> tuple[float, float]:
    with TemporaryDirectory() as folder:
        return on_event_loop(_play, environment, Path(folder) / "run.db" if keep else None)


async def _play(environment: Environment, file: Path | None) -> tuple[float, float]:
    engine = ScriptedEngine(REPLIES)
    async with Run(environment, engine, file=file, concurrency=Concurrency(episodes=128)) as run:
        with collector_settings():
            began, worked = time.perf_counter(), time.process_time()
            turns = 0
            async for trajectory in run:
                turns += len(trajectory.turns)
            return turns / (time.perf_counter() - began), turns / (time.process_time() - worked)


if __name__ == "__main__":
    main(measure)
