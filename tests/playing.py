"""Helpers for tests of runs: a plain environment, engines that record their requests, and played runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from runner import Conversation, Environment, Run, Task, Trajectory, reward
from runner.engines.scripted.replies import Replies
from runner.testing import ScriptedEngine, play_many_async

__all__ = [
    "Plain",
    "Talk",
    "assert_nothing_open",
    "play",
    "play_all",
    "recording",
    "talked",
    "talking",
    "tasks",
    "twice",
    "until",
    "until_end",
]

Talk = Callable[[Conversation], Awaitable[None]]
"""Behaviour of an agent in its conversation."""


class Plain(Environment):
    """Environment with one question, whose answer is always right."""

    def tasks(self) -> list[Task]:
        return tasks(1)

    @reward
    def correct(self) -> Any:  # a subclass may return another reward, in a synchronous or an asynchronous method
        return True


def tasks(count: int) -> list[Task]:
    return [Task(id=f"t{number}", prompt=f"Question {number}?") for number in range(count)]


def recording(replies: Replies, **settings: Any) -> ScriptedEngine:
    return ScriptedEngine(replies, record=True, **settings)


def assert_nothing_open(engine: Any) -> None:
    """Assert that the engine has no request, and that no task waits for one."""
    stats = engine.stats()
    assert (stats.open, stats.waiting, stats.live_sessions) == (0, 0, 0)


async def play_all(
    environment: Environment[Any] | type[Environment[Any]], engine: Any, **options: Any
) -> list[Trajectory]:
    """Every trajectory of a run, checked to be exact. A list of replies may hold more than the run uses."""
    engine = engine if isinstance(engine, ScriptedEngine) else recording(engine)
    return await play_many_async(environment, engine, **{"breaker": 0.5, **options})


async def until_end(run: Run, got: list[Trajectory]) -> None:
    """The trajectories of a run before the error that it ends with."""
    async with run:
        async for trajectory in run:
            got.append(trajectory)  # noqa: PERF401  # the loop ends with an error


async def play(environment: Environment[Any] | type[Environment[Any]], engine: Any, **options: Any) -> Trajectory:
    """The only trajectory of a run."""
    (trajectory,) = await play_all(environment, engine, **options)
    return trajectory


def talking(talk: Talk) -> type[Plain]:
    """An environment whose agent does nothing but `talk`."""

    class Talks(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await talk(conversation)

    return Talks


async def talked(talk: Talk, engine: Any, **options: Any) -> Trajectory:
    """The only trajectory of a run whose agent does nothing but `talk`."""
    return await play(talking(talk), engine, **options)


async def twice(conversation: Conversation) -> None:
    """Speak, ask for more, and speak again."""
    await conversation.generate()
    conversation.add("And twice that?")
    await conversation.generate()


async def until(true: Callable[[], object], *, seconds: float = 600) -> None:
    """Poll until a condition is true, for changes without an event: processes, connections, an engine's counters."""
    with anyio.fail_after(seconds):
        while not true():  # noqa: ASYNC110  # there is no event
            await anyio.sleep(0.005)
