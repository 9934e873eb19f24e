"""What tests of runs have in common: a plain environment, engines that keep what they were asked, and played runs."""

from __future__ import annotations

from typing import Any

from runner import Environment, Run, Task, Trajectory, reward
from runner.engines.scripted.replies import Replies
from runner.testing import ScriptedEngine, play_many_async

__all__ = ["Plain", "play", "play_all", "recording", "tasks", "until_end"]


class Plain(Environment):
    """One question, one answer, always right."""

    def tasks(self) -> list[Task]:
        return tasks(1)

    @reward
    def correct(self) -> Any:  # a subclass may give another reward, of either colour
        return True


def tasks(count: int) -> list[Task]:
    return [Task(id=f"t{number}", prompt=f"Question {number}?") for number in range(count)]


def recording(replies: Replies, **settings: Any) -> ScriptedEngine:
    return ScriptedEngine(replies, record=True, **settings)


async def play_all(
    environment: Environment[Any] | type[Environment[Any]], engine: Any, **options: Any
) -> list[Trajectory]:
    """Every trajectory of a run, each of them exact; a list may hold more than is said."""
    engine = engine if isinstance(engine, ScriptedEngine) else recording(engine)
    return await play_many_async(environment, engine, **{"breaker": 0.5, **options})


async def until_end(run: Run, got: list[Trajectory]) -> None:
    """What a run gives before the error that it ends with."""
    async with run:
        async for trajectory in run:
            got.append(trajectory)  # noqa: PERF401  # it raises in the end


async def play(environment: Environment[Any] | type[Environment[Any]], engine: Any, **options: Any) -> Trajectory:
    """The only trajectory of a run."""
    (trajectory,) = await play_all(environment, engine, **options)
    return trajectory
