"""Faults of runs that were found by breaking it, each with the test that names it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from runner import (
    BadTask,
    Conversation,
    EpisodeOver,
    Outcome,
    Run,
    RunFile,
    ScriptedEngine,
    Task,
    Tool,
    Turn,
    tool,
)
from runner.testing import Latency, call
from tests.playing import Plain, play, play_all, tasks

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_turn_that_the_rollout_left_behind_ends_with_its_episode(tmp_path: Path, anyio_backend: str) -> None:
    left: list[asyncio.Task[Turn]] = []

    class Leaves(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await conversation.generate()
            conversation.add("And then?")
            left.append(asyncio.create_task(conversation.generate()))
            while not engine.stats().open:
                await asyncio.sleep(0)

    file = tmp_path / "run.db"
    async with ScriptedEngine(["Yes", "word " * 50], latency=Latency(between=30), tick=0.01) as engine:
        async with Run(Leaves, engine, file=file) as run:
            (trajectory,) = [trajectory async for trajectory in run]
            assert engine.stats().open == 0
        with pytest.raises(EpisodeOver, match="t0#0 is over"):
            await left[0]
    with RunFile(file) as stored:
        (row,) = stored
    assert trajectory.outcome is Outcome.COMPLETED
    assert row.turns == len(trajectory.turns) == 2


async def test_a_closed_conversation_refuses_to_speak() -> None:
    kept: list[Conversation] = []

    class Keeps(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            kept.append(conversation)
            await conversation.generate()
            conversation.add("And then?")

    await play(Keeps(), "Yes")
    with pytest.raises(EpisodeOver, match="'main'"):
        await kept[0].generate()


async def cancelled() -> None:
    waiting = asyncio.create_task(asyncio.sleep(9))
    waiting.cancel()
    await waiting


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_tasks_that_let_out_a_cancellation_end_the_run_with_its_reason(anyio_backend: str) -> None:
    class Cut(Plain):
        async def tasks(self) -> AsyncIterator[Task]:  # type: ignore[override]  # of the other colour
            yield Task(id="a", prompt="x")
            await cancelled()

    got = []
    with pytest.raises(BadTask, match=r"tasks\(\) cancelled"):
        async with Run(Cut(), ScriptedEngine("Yes")) as run:
            async for trajectory in run:
                got.append(trajectory.task.id)  # noqa: PERF401  # it raises in the end
    assert got == ["a"]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_source_that_lets_out_a_cancellation_when_it_hears_ends_the_run(anyio_backend: str) -> None:
    class Source(list[Task]):
        async def finished(self, trajectory: Any) -> None:
            await cancelled()

    with pytest.raises(BadTask, match=r"finished\(\) .* cancelled"):
        await play_all(Plain(), "Yes", tasks=Source(tasks(2)))


@pytest.mark.parametrize("choice", ["look", "required"])
async def test_the_tool_choice_of_the_class_is_for_main(choice: str) -> None:
    def weigh(grams: int) -> int:
        """Weigh it."""
        return grams

    class Both(Plain):
        tool_choice = choice

        @tool
        async def look(self) -> str:
            """Look."""
            self.tool_choice = "none"
            other = self.episode.conversation("other", prompt="x", tools=[Tool(weigh)])
            self.tool_choice = choice
            turn = await other.generate()
            self.tool_choice = "none"
            return turn.text

    trajectory = await play(Both(), lambda ask: "said" if ask.agent == "other" else [call("look"), "bye"][ask.turn])
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
    assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == ["said"]
