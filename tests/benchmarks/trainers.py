"""Costs for a trainer: rows and batches of played episodes, the player's thread, and an observer."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import anyio

from runner import BackgroundPlayer, Group, Run, RunObserver, Summary, Task
from runner.runs.observers import ObserverThreads
from runner.testing import ScriptedEngine
from runner.training import TrainingBatch, sample_rows
from tests.benchmarks.figures import Figure, main, on_one_core
from tests.histories import Twice

EPISODE_COUNT = 512
GROUP_SIZE = 8
ROUND_COUNT = 5
REPEAT_COUNT = 20
CALL_COUNT = 2_000
TEXT = "A sentence of the model that is about as long as a call of a tool. " * 3


class Counting(RunObserver):
    """An observer that only counts."""

    count = 0

    def episode(self, trajectories: Any) -> None:
        self.count += len(trajectories)


def measure() -> Iterator[Figure]:
    """Costs for a trainer: processor time on one core, with episodes of two turns on the scripted engine."""
    on_one_core()
    groups = _played()
    trajectories = [each for group in groups for each in group.trajectories]
    ids = sum(len(segment.log) for each in trajectories for segment in each.segments) / len(trajectories)
    rows = [_seconds(lambda: [sample_rows(each) for each in trajectories]) for _ in range(ROUND_COUNT)]
    yield Figure(f"sample_rows: rows of {ids:.0f} ids", "1/s", tuple(len(trajectories) / each for each in rows))
    padded = [_seconds(lambda: TrainingBatch.padded(groups, pad_id=0)) for _ in range(ROUND_COUNT)]
    yield Figure("TrainingBatch.padded: rows", "1/s", tuple(len(trajectories) / each for each in padded))
    yield Figure("  memory of the batch, an id", "bytes", (_bytes(groups) / (ids * len(trajectories)),))
    yield Figure("Run: an episode", "us", tuple(_run() for _ in range(ROUND_COUNT)))
    # Measured alone, since both are smaller than the differences between runs.
    yield Figure("  an observer of it, its thread included", "us", tuple(_observer(groups) for _ in range(ROUND_COUNT)))
    yield Figure("  BackgroundPlayer: a call and its result, in place of an await", "us", tuple(_calls(ROUND_COUNT)))


def _tasks() -> list[Task]:
    return [Task(id=f"t{number}", prompt="Say something.") for number in range(EPISODE_COUNT // GROUP_SIZE)]


def _played() -> list[Group]:
    with BackgroundPlayer(Twice, ScriptedEngine([TEXT, TEXT]), group_size=GROUP_SIZE) as player:
        return player.play_groups(_tasks())


def _seconds(call: Any) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def _bytes(groups: list[Group]) -> int:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        batch = TrainingBatch.padded(groups, pad_id=0)
        return tracemalloc.get_traced_memory()[0] - before if batch else 0
    finally:
        tracemalloc.stop()


def _run() -> float:
    """Microseconds of an episode in a run."""

    async def play() -> None:
        engine = ScriptedEngine([TEXT, TEXT])
        async with Run(Twice, engine, tasks=_tasks(), group_size=GROUP_SIZE) as run:
            async for _ in run.groups():
                pass

    return _seconds(lambda: anyio.run(play)) / EPISODE_COUNT * 1e6


def _observer(groups: list[Group]) -> float:
    """Microseconds until an observer has the events of an episode of two turns."""

    def send() -> None:
        for _ in range(REPEAT_COUNT):
            threads = ObserverThreads([Counting()], group_size=GROUP_SIZE, seed=0)
            threads.start({})
            for group in groups:
                for trajectory in group.trajectories:
                    threads.episode([trajectory], GROUP_SIZE)
            threads.end(Summary())

    return _seconds(send) / REPEAT_COUNT / EPISODE_COUNT * 1e6


def _calls(rounds: int) -> Iterator[float]:
    """Microseconds of a call from another thread, with nothing to play."""

    async def nothing() -> None:
        pass

    with BackgroundPlayer(Twice, ScriptedEngine([TEXT])) as player:
        for _ in range(rounds):
            yield _seconds(lambda: [player._call(nothing()) for _ in range(CALL_COUNT)]) / CALL_COUNT * 1e6


if __name__ == "__main__":
    main(measure)
