"""An environment that uses everything that could depend on the width of a run, and a process that plays it.

Usage: python -m tests.faults.crowd FILE
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.lowlevel

from runner import (
    Concurrency,
    Conversation,
    Environment,
    Group,
    Reply,
    Run,
    ScriptedEngine,
    Task,
    Turn,
    group_reward,
    metric,
    reward,
    tool,
)
from runner.engines.scripted.script import Answer, Latency, ModelCall, call
from runner.runs.event_loop import on_event_loop

GROUP_SIZE = 4


class Crowd(Environment):
    """Environment with sync and async tools under a limiter, a simulated user, a trained opponent and group rewards."""

    def __init__(self, tasks: int = 24) -> None:
        self.count = tasks
        self.written: list[int] = []
        self.lucky = 0

    def tasks(self) -> Iterator[Task]:
        for number in range(self.count):
            yield Task(id=f"task {number}", prompt=f"This is task {number}.")

    def setup(self) -> None:
        self.lucky = self.episode.rng.randrange(100)

    @tool
    def write(self, number: int) -> list[int]:
        """Write a number down; the order of the calls matters."""
        self.written.append(number)
        return self.written

    @tool
    async def look(self, number: int) -> str:
        """Look a number up, as one of three."""
        async with self.episode.limiter("library", 3):
            await anyio.lowlevel.checkpoint()
            return f"{number} and {self.lucky}"

    async def step(self, turn: Turn) -> Reply:
        if len(self.episode.turns) > 3:
            return None
        user = self.episode.conversation("user", system_prompt="You are the user.")
        user.add(turn.text)
        opponent = self.episode.conversation("opponent", train=True)
        opponent.add(f"They said {turn.text}")
        return f"{(await user.generate()).text} against {(await opponent.generate()).text}"

    @reward
    def wrote(self) -> dict[str, float]:
        return {"main": sum(self.written) / 1000, "opponent": self.lucky / 100}

    @reward(weight=0.5)
    async def luck(self) -> float:
        return self.episode.rng.random()

    @group_reward
    def rank(self, group: Group) -> list[float]:
        first = group.rng.random()
        sizes = [trajectory.sampled for trajectory in group.trajectories]
        return [first + sorted(sizes).index(size) for size in sizes]

    @metric
    def length(self) -> float:
        return len(self.written)


def talk(turn: ModelCall) -> Answer:
    """The model of all agents. Its text is drawn from the seed of the turn."""
    number = turn.rng.randrange(1000)
    if turn.agent == "main" and turn.turn % 2 == 0:
        return [call("write", number=number), call("look", number=number), call("write", number=number + 1)]
    return f"{turn.agent} says {number} " * turn.rng.randrange(1, 9)


def engine() -> ScriptedEngine:
    return ScriptedEngine(talk, seed=5, places=16, chunks="random", latency=Latency(jitter=5))


class Rollouts(Crowd):
    """The same environment with its own loop."""

    async def rollout(self, conversation: Conversation) -> None:
        while len(conversation.turns) < 5:
            reply = await self.episode.answer(await conversation.generate())
            conversation.add(reply or "Continue.")


async def announce(file: Path) -> None:
    run = Run(Crowd(), engine(), group_size=GROUP_SIZE, file=file, seed=9, concurrency=Concurrency(episodes=12))
    async with run:
        async for trajectory in run:
            os.write(1, f"{trajectory.id}\t{trajectory.agent}\n".encode())


if __name__ == "__main__":
    on_event_loop(announce, Path(sys.argv[1]))
