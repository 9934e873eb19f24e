"""Helpers for tests of fleets: environments that can be pickled, an engine, and comparison of trajectories."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from anyio.lowlevel import checkpoint

from runner import Conversation, Environment, Group, Run, Task, Trajectory, group_reward, reward
from runner.cluster.engines import FleetEngine
from runner.engines.scripted.script import Latency, ModelCall
from runner.testing import ScriptedEngine
from tests.cluster.in_process import InProcess, in_process

__all__ = ["WATCHDOG_SECONDS", "Dice", "Grouped", "Judged", "compared", "dice_engine", "fleet", "game_tasks", "played"]


WATCHDOG_SECONDS = 600.0


def game_tasks(count: int) -> list[Task]:
    return [Task(id=f"t{number}", prompt=f"Game {number}: throw.") for number in range(count)]


class Dice(Environment):
    """Environment with three turns, whose answers and rewards follow from the episode's own random numbers."""

    def tasks(self) -> list[Task]:
        return game_tasks(8)

    async def rollout(self, conversation: Conversation) -> None:
        for _ in range(3):
            await conversation.generate()
            conversation.add(f"It shows {self.episode.rng.randrange(6)}.")
            await checkpoint()

    @reward
    def length(self) -> float:
        return len(self.episode.text) / 100


class Grouped(Dice):
    """The same environment with a reward that compares the members of a group."""

    @group_reward
    def rank(self, group: Group) -> list[float]:
        lengths = sorted(len(member.text) for member in group.trajectories)
        return [lengths.index(len(member.text)) for member in group.trajectories]


class Judged(Dice):
    """Environment in which an agent on another engine judges the throws, in two turns."""

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate()
        judge = self.episode.conversation("judge", prompt=f"How was it: {self.episode.text}")
        await judge.generate()
        judge.add("Are you sure?")
        await judge.generate()


def throws(call: ModelCall) -> str:
    """Return replies whose length differs in every turn of every episode, and is the same in each repetition."""
    return f"I throw for {call.request.name}" + "!" * (sum(call.request.name.encode()) % 17)


def dice_engine(**settings: Any) -> ScriptedEngine:
    return ScriptedEngine(throws, **{"places": 3, "latency": Latency(first=2, between=1), **settings})


@asynccontextmanager
async def fleet(
    workers: int | tuple[int, int] = 2, engine: Any = None, **settings: Any
) -> AsyncIterator[tuple[FleetEngine, InProcess]]:
    async with in_process() as launcher:
        yield FleetEngine(engine or dice_engine(), launcher, workers, **settings), launcher


async def played(
    environment: Any, engine: Any, *, on_trajectory: Callable[[Trajectory], None] = lambda _: None, **options: Any
) -> list[Trajectory]:
    async with Run(environment, engine, **options) as run:
        got = []
        async for trajectory in run:
            on_trajectory(trajectory)
            got.append(trajectory)
        return got


def compared(trajectories: list[Trajectory]) -> dict[tuple[str, str], Any]:
    """Return all values that must not depend on the place of play, by episode and agent, each of which occurs once."""
    rows = {(each.id, each.agent): _compared(each) for each in trajectories}
    assert len(rows) == len(trajectories), "an episode was announced twice"
    return rows


def _compared(trajectory: Trajectory) -> Any:
    logs = [segment.log for segment in trajectory.segments]
    return {
        "task": trajectory.task,
        "seed": trajectory.seed,
        "outcome": trajectory.outcome,
        "reward": trajectory.reward,
        "rewards": trajectory.rewards,
        "ids": [log.ids.tolist() for log in logs],
        "logprobs": [log.logprobs.tobytes() for log in logs],
        "sources": [log.sources.tolist() for log in logs],
        "texts": [turn.text for turn in trajectory.turns],
        "finishes": [(turn.finish, turn.stop) for turn in trajectory.turns],
    }
