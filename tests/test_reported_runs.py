"""Faults of runs that were found by breaking it, each with the test that names it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from runner import (
    BadOption,
    BadTask,
    Concurrency,
    Conversation,
    EpisodeOver,
    Outcome,
    Run,
    RunFile,
    Sampling,
    ScriptedEngine,
    Task,
    Tool,
    Trajectory,
    Turn,
    tool,
)
from runner.testing import Latency, call
from tests.playing import Plain, play, play_all, tasks, until_end

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_turn_that_the_rollout_left_behind_ends_with_its_episode(tmp_path: Path, anyio_backend: str) -> None:
    left: list[asyncio.Task[Turn]] = []

    class Leaves(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await conversation.generate()
            conversation.add("And then?")
            left.append(asyncio.create_task(conversation.generate()))
            await asyncio.sleep(0.05)
            assert engine.stats().open == 1

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

    got: list[Trajectory] = []
    with pytest.raises(BadTask, match=r"tasks\(\) cancelled"):
        await until_end(Run(Cut(), ScriptedEngine("Yes")), got)
    assert [trajectory.task.id for trajectory in got] == ["a"]


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


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"limits": {"turns": 2}}, r"limits=.*give Limits\(\.\.\.\)"),
        ({"sampling": {}}, r"sampling=.*give Sampling\(\.\.\.\)"),
        ({"concurrency": 4}, r"concurrency=4: give Concurrency\(\.\.\.\)"),
        ({"group_size": "2"}, "group_size='2': give a whole number of at least 1"),
        ({"group_size": 1.5}, "group_size=1.5: give a whole number"),
        ({"group_size": True}, "group_size=True: give a whole number"),
        ({"retries": 1.5}, "retries=1.5: give a whole number of at least 0"),
        ({"seed": "abc"}, "seed='abc': give a whole number"),
        ({"seed": 1.5}, "seed=1.5: give a whole number"),
        ({"breaker": "x"}, "breaker='x': give a share"),
        ({"engines": {"judge": "b"}}, r"engines\['judge'\]='b' is no engine"),
        ({"engines": ["b"]}, "engines=.*give a dict"),
        ({"file": 5}, "file=5: give a path"),
        ({"template_options": {"messages": []}}, r"template_options=\{'messages'"),
        ({"template_options": {"tools": []}}, r"template_options=\{'tools'"),
        ({"template_options": {"add_generation_prompt": True}}, "names that only the template reads"),
    ],
)
async def test_an_option_of_the_wrong_kind_is_refused_by_name(option: dict[str, Any], said: str) -> None:
    with pytest.raises(BadOption, match=said):
        Run(Plain, ScriptedEngine("Yes"), **option)


@pytest.mark.parametrize(
    ("engine", "said"), [("engine", "engine='engine' is no engine"), (ScriptedEngine, r"the class: .*ScriptedEngine\(")]
)
async def test_what_is_no_engine_is_refused_with_the_fix(engine: Any, said: str) -> None:
    with pytest.raises(BadOption, match=said):
        Run(Plain, engine)


@pytest.mark.parametrize("width", [{"episodes": 2.5}, {"episodes": True}, {"threads": 1.5}, {"threads": None}])
def test_a_width_that_is_no_whole_number_is_refused(width: dict[str, Any]) -> None:
    with pytest.raises(BadOption, match="give a whole number of at least 1"):
        Concurrency(**width)


@pytest.mark.parametrize("regex", ["(", 5])
def test_what_is_no_regular_expression_is_refused_when_it_is_given(regex: Any) -> None:
    with pytest.raises(BadOption, match=r"Sampling\(regex=.*no regular expression"):
        Sampling(regex=regex)


async def test_runs_that_share_an_engine_that_nobody_entered_all_play_to_their_end() -> None:
    engine = ScriptedEngine("Yes", latency=Latency(between=2), tick=0.001)
    outcomes: dict[int, list[Outcome]] = {}

    async def one(number: int) -> None:
        async with Run(Plain(), engine, tasks=tasks(number)) as run:
            outcomes[number] = [trajectory.outcome async for trajectory in run]

    for _ in range(2):  # it can be entered again after
        async with anyio.create_task_group() as runs:
            for number in (1, 20, 5):
                runs.start_soon(one, number)
        assert {number: len(played) for number, played in outcomes.items()} == {1: 1, 5: 5, 20: 20}
        assert {outcome for played in outcomes.values() for outcome in played} == {Outcome.COMPLETED}
        assert not engine.running


async def test_a_run_does_not_close_the_engine_that_somebody_else_entered() -> None:
    async with ScriptedEngine("Yes") as engine:
        await play_all(Plain(), engine)
        assert engine.running
