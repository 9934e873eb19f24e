"""A run at its boundaries: engines it shares, options that are wrong, what is left behind, what comes too late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import runner
from runner import (
    BadEnvironment,
    BadOption,
    BadTask,
    Concurrency,
    Conversation,
    EpisodeOver,
    Group,
    Outcome,
    Run,
    RunFile,
    Sampling,
    ScriptedEngine,
    Task,
    Tool,
    Trajectory,
    Turn,
    group_reward,
    tool,
)
from runner.concurrency.user_code import describe_error
from runner.testing import Fault, Latency, call
from tests.playing import Plain, play, play_all, tasks, until_end

pytestmark = [pytest.mark.anyio, pytest.mark.both_backends]


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


class Compared(Plain):
    """Everybody gets the size of the group."""

    @group_reward
    def size(self, group: Group) -> list[int]:
        return [len(group.trajectories)] * len(group.trajectories)


async def test_a_group_is_scored_once_its_failed_member_was_played_again(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    options: dict[str, Any] = {"tasks": tasks(2), "group_size": 3, "retries": 0, "breaker": 1, "file": file}
    failing = ScriptedEngine("Yes", faults=lambda ask: Fault.error(at=1) if ask.episode == "t0#1" else None)
    async with Run(Compared(), failing, **options) as run:
        first = {trajectory.id: trajectory.reward async for trajectory in run}
    assert first == {"t0#0": None, "t0#1": None, "t0#2": None, "t1#0": 4, "t1#1": 4, "t1#2": 4}
    assert run.summary.reward.count == 3

    async with Run(Compared(), ScriptedEngine("Yes"), **options) as run:
        assert [trajectory.id async for trajectory in run] == ["t0#1"]
    with RunFile(file) as stored:
        rewards = [row.reward for row in stored if row.outcome is Outcome.COMPLETED]
    assert rewards == [4] * 6
    assert run.summary.reward.as_dict() == {"mean": 4, "standard_error": 0, "count": 6}


async def test_without_a_file_a_group_is_scored_as_it_is() -> None:
    failing = ScriptedEngine("Yes", faults=lambda ask: Fault.error(at=1) if ask.episode == "t0#1" else None)
    async with Run(Compared(), failing, group_size=3, retries=0, breaker=1) as run:
        rewards = {trajectory.id: trajectory.reward async for trajectory in run}
    assert rewards == {"t0#0": 3, "t0#1": None, "t0#2": 3}


async def test_a_request_that_the_engine_refuses_is_not_played_again() -> None:
    async with Run(Plain(), ScriptedEngine({"judge": ["never"]}), retries=5, breaker=1) as run:
        (trajectory,) = [trajectory async for trajectory in run]
    assert trajectory.outcome is Outcome.ENGINE_ERROR
    assert "no replies for agent 'main'" in trajectory.error
    assert trajectory.attempt == run.summary.retried == 0


async def test_a_run_that_was_left_says_so_when_it_is_iterated() -> None:
    async with Run(Plain(), ScriptedEngine("Yes")) as run:
        pass
    with pytest.raises(RuntimeError, match="the run is over"):
        await anext(run)


async def test_a_run_is_entered_once() -> None:
    async with Run(Plain(), ScriptedEngine("Yes")) as run:
        with pytest.raises(RuntimeError, match="entered once"):
            await run.__aenter__()
        assert [trajectory.outcome async for trajectory in run] == [Outcome.COMPLETED]


def test_a_constructor_that_raises_is_told_with_its_cause() -> None:
    class Unmade(Plain):
        def __init__(self) -> None:
            len(5)  # type: ignore[arg-type]  # that is the point

    with pytest.raises(BadEnvironment, match=r"Unmade\(\) raised TypeError: object of type 'int' has no len"):
        Run(Unmade, ScriptedEngine("Yes"))


def test_a_constructor_that_wants_arguments_is_told_apart() -> None:
    class Wants(Plain):
        def __init__(self, level: int) -> None:
            self.level = level

    with pytest.raises(BadEnvironment, match=r"without arguments \(missing .*'level'\): give Wants\(\.\.\.\)"):
        Run(Wants, ScriptedEngine("Yes"))


def hook(self: Any) -> Any:
    """One that yields."""
    yield


async def colored(self: Any) -> Any:
    """One that is awaited."""


def weigh(self: Any) -> int:
    """Weigh it."""
    return 1


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"system_prompt": 5}, "system_prompt = 5: give a string or None"),
        ({"setup": hook}, "setup yields, so its body would never run"),
        ({"close": hook}, "close yields"),
        ({"lifespan": hook}, "lifespan is no context manager: put @contextlib.asynccontextmanager above it"),
        ({"lifespan": colored}, "lifespan is no context manager"),
        ({"weigh": property(tool(weigh))}, "weigh is a property: a tool is called"),
    ],
)
def test_a_member_that_cannot_work_is_refused_when_the_class_is_defined(members: dict[str, Any], said: str) -> None:
    with pytest.raises(BadEnvironment, match=said):
        type("Wrong", (Plain,), members)


@pytest.mark.parametrize("function", ["name", property(weigh)])
def test_a_tool_mark_on_what_is_no_method_is_refused(function: Any) -> None:
    with pytest.raises(BadEnvironment, match=r"@tool goes on a method, .* @tool\(name=\.\.\.\)"):
        tool(function)


def test_seconds_of_a_tool_that_are_no_number_are_refused() -> None:
    def slow(self: Any) -> str:
        """Take long."""
        return ""

    with pytest.raises(BadEnvironment, match="seconds='5': give a number above 0"):
        type("Wrong", (Plain,), {"slow": tool(seconds="5")(slow)})  # type: ignore[call-overload]  # that is the point


def test_a_folder_whose_name_begins_like_ours_is_the_authors() -> None:
    file = f"{Path(runner.__file__).parent}_envs/game.py"
    names: dict[str, Any] = {}
    exec(compile("def fail():\n    raise ValueError('lost')\n", file, "exec"), names)  # a file of that name
    with pytest.raises(ValueError, match="lost") as raised:
        names["fail"]()
    inner = raised.value.with_traceback(raised.tb.tb_next)  # without this test's own frame
    assert describe_error(inner) == f"ValueError: lost (in fail, {file}:2)"
