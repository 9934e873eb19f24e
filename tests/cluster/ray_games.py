"""Environments that workers import from this module in tests, and a process that plays them.

Usage: python -m tests.cluster.ray_games FILE WORKERS
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from runner import (
    Conversation,
    Environment,
    RayEngines,
    Run,
    Sampling,
    ScriptedEngine,
    Task,
    Turn,
    metric,
    reward,
    tool,
)
from runner.concurrency.loop_lag import LagMonitor
from runner.engines.scripted.script import Answer, Latency, ModelCall, call
from runner.runs.event_loop import on_event_loop
from tests.faults.crowd import Crowd, talk

__all__ = [
    "Crowd",
    "Endless",
    "Hangs",
    "Hungry",
    "Leased",
    "Poison",
    "Reads",
    "Says",
    "Slow",
    "Sworn",
    "TalksLong",
    "slow_crowd",
]

GROUP_SIZE = 4


def slow_crowd() -> ScriptedEngine:
    """The model of a `Crowd`, slow enough for a worker to die in the middle of an episode."""
    return ScriptedEngine(talk, seed=5, places=4, chunks="random", latency=Latency(first=20, jitter=5))


def crowd() -> ScriptedEngine:
    return ScriptedEngine(talk, seed=5, places=4, chunks="random", latency=Latency(jitter=5))


class Leased(Environment):
    """Environment with a limiter of one lease for the whole run. Each episode records when it is inside."""

    def __init__(self, diary: str) -> None:
        self.diary = diary

    def tasks(self) -> list[Task]:
        return [Task(id=str(number), prompt="knock") for number in range(12)]

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate()
        async with self.episode.limiter("door", 1):
            _write(self.diary, f"in {os.getpid()}")
            await anyio.sleep(0.01)
            _write(self.diary, f"out {os.getpid()}")

    @reward
    def there(self) -> bool:
        return True


class Sworn(Environment):
    """Environment whose lifespan records when it is entered and left, and by which process."""

    def __init__(self, diary: str) -> None:
        self.diary = diary

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[int]:
        _write(self.diary, f"enter {os.getpid()}")
        yield os.getpid()
        _write(self.diary, f"leave {os.getpid()}")

    def tasks(self) -> list[Task]:
        return [Task(id=str(number), prompt="hello") for number in range(8)]

    @reward
    def same_process(self) -> bool:
        return bool(self.shared == os.getpid())


class Slow(Environment):
    """Environment with long episodes."""

    def tasks(self) -> list[Task]:
        return [Task(id=str(number), prompt="hello") for number in range(40)]

    async def rollout(self, conversation: Conversation) -> None:
        for _ in range(3):
            await conversation.generate()
            await anyio.sleep(0.2)
            conversation.add("and?")

    @reward
    def spoke(self) -> float:
        return self.episode.rng.random()


class Poison(Environment):
    """Environment in which one episode kills the process that plays it."""

    def tasks(self) -> list[Task]:
        return [Task(id=name, prompt=name) for name in ("a", "b", "poison", "c", "d")]

    @tool
    def drink(self) -> str:
        """Drink it."""
        if self.task.id == "poison":
            os.kill(os.getpid(), signal.SIGKILL)
        return "water"

    @reward
    def alive(self) -> bool:
        return True


class Hungry(Environment):
    """Environment in which one episode takes up to 2 GB of memory, and keeps it."""

    def tasks(self) -> list[Task]:
        return [Task(id=name, prompt=name) for name in ("a", "b", "hungry", "c", "d")]

    async def step(self, turn: Turn) -> str | None:
        taken: list[bytes] = []
        while self.task.id == "hungry" and len(taken) < 40:
            taken.append(bytes(range(256)) * (50 * 2**12))
            await anyio.sleep(0.1)
        return None

    @reward
    def alive(self) -> bool:
        return True


def drinks(asked: ModelCall) -> Answer:
    return call("drink") if asked.turn == 0 else "It was good."


class Hangs(Environment):
    """Environment in which one episode blocks the first worker's event loop for ever, but never the driver's."""

    def __init__(self, trace: str, driver: int) -> None:
        self.trace = trace
        if os.getpid() != driver:  # a worker's limit is two seconds instead of a minute
            defaults: Any = LagMonitor.__init__.__kwdefaults__
            defaults["stuck_seconds"] = 2.0

    def tasks(self) -> list[Task]:
        return [Task(id=str(number), prompt="hello") for number in range(6)]

    async def step(self, turn: Turn) -> str | None:
        if self.task.id == "3":
            self._block_once()
        return None

    def _block_once(self) -> None:
        if not Path(self.trace).exists():
            Path(self.trace).write_text(str(os.getpid()))
            time.sleep(3600)

    @reward
    def spoke(self) -> bool:
        return True


class Reads(Environment):
    """Environment that reads a file, and the variable READ_ON if it is set, before an episode."""

    def __init__(self, file: str) -> None:
        self.file = file

    def tasks(self) -> list[Task]:
        return [Task(id="one", prompt="hello")]

    def setup(self) -> None:
        self.text = " ".join([Path(self.file).read_text(), *filter(None, [os.environ.get("READ_ON")])])

    @metric
    def read(self) -> int:
        return len(self.text)

    @reward
    def spoke(self) -> bool:
        return True


class TalksLong(Environment):
    """Environment in which a real model samples until the limit."""

    sampling = Sampling(max_tokens=96, min_tokens=96)

    def tasks(self) -> Iterator[Task]:
        for number in range(8):
            yield Task(id=str(number), prompt=f"Tell me a long story of {number} wolves.")

    @reward
    def spoke(self) -> bool:
        return True


class Says(Environment):
    """Environment in which a real model samples greedily."""

    sampling = Sampling(max_tokens=8, min_tokens=8, temperature=0.0)

    def tasks(self) -> Iterator[Task]:
        for number in range(6):
            yield Task(id=str(number), prompt=f"What do {number} wolves eat?")

    @reward
    def spoke(self) -> bool:
        return True


class Endless(Environment):
    """Environment that reports its process, and generates turns until it is cut."""

    def __init__(self, diary: str) -> None:
        self.diary = diary

    def tasks(self) -> Iterator[Task]:
        for number in range(100):
            yield Task(id=str(number), prompt="hello")

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate()
        _write(self.diary, f"spoke {os.getpid()}")
        await anyio.sleep_forever()

    @reward
    def there(self) -> bool:
        return True


def _write(diary: str, line: str) -> None:
    """Append a line in one write, so that lines of several processes do not mix."""
    descriptor = os.open(diary, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


async def _announce(file: Path, workers: int, tasks: int) -> None:
    engine: Any = RayEngines(slow_crowd(), workers=workers)
    async with Run(Crowd(tasks), engine, group_size=GROUP_SIZE, file=file, seed=9) as run:
        pids = " ".join(str(worker.pid) for worker in engine.workers())
        os.write(1, f"workers {pids}\n".encode())
        async for trajectory in run:
            os.write(1, f"{trajectory.id}\t{trajectory.agent}\n".encode())


if __name__ == "__main__":
    on_event_loop(_announce, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
