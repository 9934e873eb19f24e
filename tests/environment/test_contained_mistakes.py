"""Mistakes of an author that end only their episode or are refused by name, in a run that continues."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from runner import (
    BadOption,
    BadTask,
    Environment,
    Outcome,
    Prompt,
    Run,
    ScriptedEngine,
    Task,
    Tool,
    ToolError,
    Turn,
    reward,
    tool,
)
from runner.testing import call
from tests.playing import Plain, play, play_all, tasks

pytestmark = [pytest.mark.anyio, pytest.mark.both_backends]


def function_that_takes_a(a: int) -> int:
    return a


class Calls(Plain):
    """Environment with tools that misbehave."""

    @tool
    def stop(self) -> str:
        """Interrupt."""
        raise KeyboardInterrupt

    @tool
    async def grouped(self) -> str:
        """Fail in a task group."""
        async with anyio.create_task_group() as group:
            group.start_soon(self.refuse)
        return "never"

    async def refuse(self) -> None:
        raise ToolError("not today")

    @tool
    def strange(self) -> Any:
        """Return what has no JSON form."""
        return object()


async def test_keyboard_interrupt_in_sync_tool_fails_one_episode() -> None:
    trajectory = await play(Calls(), [[call("stop")], "bye"])
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert "tool stop()" in trajectory.error


async def test_a_tool_error_inside_a_task_group_is_read_by_the_model() -> None:
    trajectory = await play(Calls(), [[call("grouped")], "bye"])
    assert trajectory.outcome is Outcome.COMPLETED
    assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == ["not today"]


async def test_a_result_without_json_form_names_its_tool() -> None:
    trajectory = await play(Calls(), [[call("strange")], "bye"])
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert "tool strange()" in trajectory.error


async def test_argument_outside_explicit_schema_is_the_models_error() -> None:
    class Explicit(Plain):
        def setup(self) -> None:
            schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
            self.tools.append(Tool(function_that_takes_a, name="take", description="Take it.", parameters=schema))

    trajectory = await play(Explicit(), [[call("take", a=1, b=2)], "bye"])
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
    (said,) = [m["content"] for m in trajectory.messages if m["role"] == "tool"]
    assert said.startswith("Wrong arguments for take")


async def test_a_plain_function_among_the_tools_is_refused_with_the_fix() -> None:
    class Functions(Plain):
        def setup(self) -> None:
            self.tools.append(function_that_takes_a)  # type: ignore[arg-type]  # wrong on purpose

    trajectory = await play(Functions(), "bye")
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert "write Tool(function)" in trajectory.error


async def test_a_required_call_without_any_tool_is_refused_at_start() -> None:
    class Required(Plain):
        tool_choice = "required"

    with pytest.raises(BadOption, match=r"tool_choice='required': no such tool; give one of 'auto', 'none'"):
        await play_all(Required(), "bye")


async def test_an_engine_for_an_agent_that_never_speaks_is_reported() -> None:
    async with Run(Plain(), ScriptedEngine("Yes"), engines={"jduge": ScriptedEngine("No")}, tasks=tasks(1)) as run:
        async for _ in run:
            pass
    assert list(run.summary.faults) == ["engines: agent 'jduge' never had a turn"]


async def test_a_synchronous_source_may_hear_of_results_asynchronously() -> None:
    task_ids = []

    class Source(list[Task]):
        async def finished(self, trajectory: Any) -> None:
            task_ids.append(trajectory.task.id)

    await play_all(Plain(), "Yes", tasks=Source(tasks(2)))
    assert sorted(task_ids) == ["t0", "t1"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"id": 5}', r"tasks.jsonl:1: id: a string is needed, got 5"),
        ('{"id": "a", "prompt": 5}', r"tasks.jsonl:1: expected a string, a message or a list of messages, got int"),
        ('{"id": "a", "info": []}', r"tasks.jsonl:1: info: an object is needed"),
    ],
)
async def test_a_line_of_wrong_types_is_refused_by_file_and_line(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(line)
    with pytest.raises(BadTask, match=said):
        await play_all(Plain(), "Yes", tasks=file)


async def test_no_reward_of_the_wrong_kind_is_taken_for_a_number() -> None:
    class Texts(Environment):
        def tasks(self) -> list[Task]:
            return tasks(1)

        @reward
        def good(self) -> str:
            return "1.0"

    trajectory = await play(Texts(), "Yes")
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert "return a number, a bool or None" in trajectory.error


class Gone(Plain):
    """Environment that cancels its own task in the hook that `where` names."""

    where = ""

    async def vanish(self, where: str) -> None:
        if self.where == where and self.task.id == "t1":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await anyio.lowlevel.checkpoint()

    async def setup(self) -> None:
        await self.vanish("setup")

    async def prompt(self) -> Prompt:
        await self.vanish("prompt")
        return self.task.prompt

    async def step(self, turn: Turn) -> None:
        await self.vanish("step")

    async def close(self) -> None:
        await self.vanish("close")

    @reward
    async def correct(self) -> bool:
        await self.vanish("reward")
        return True


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("where", ["setup", "prompt", "step", "reward", "close"])
async def test_an_episode_that_cancels_its_own_task_fails_alone(where: str, anyio_backend: str) -> None:
    class Here(Gone):
        pass

    Here.where = where
    async with Run(Here(), ScriptedEngine("Yes"), tasks=tasks(4), breaker=0.5) as run:
        outcomes = {trajectory.task.id: trajectory.outcome async for trajectory in run}
    expected = Outcome.COMPLETED if where == "close" else Outcome.ENV_ERROR
    assert outcomes == {"t0": "completed", "t1": expected, "t2": "completed", "t3": "completed"}


@pytest.mark.parametrize("when", ["playing", "scoring"])
async def test_failed_task_group_in_exit_stack_fails_one_episode(when: str) -> None:
    class Connected(Plain):
        async def setup(self) -> None:
            self.lost = anyio.Event()
            if self.task.id == "t1":
                group = await self.episode.exit_stack.enter_async_context(anyio.create_task_group())
                group.start_soon(self.lose)

        async def lose(self) -> None:
            await self.lost.wait()
            raise ConnectionError("the server went away")

        async def meet(self, moment: str) -> None:
            if moment == when and self.task.id == "t1":
                self.lost.set()
                await anyio.sleep_forever()

        async def step(self, turn: Turn) -> None:
            await self.meet("playing")

        @reward
        async def correct(self) -> bool:
            await self.meet("scoring")
            return True

    trajectories = await play_all(Connected(), "Yes", tasks=tasks(4))
    outcomes = {t.task.id: t.outcome for t in trajectories}
    assert outcomes == {"t0": "completed", "t1": "env_error", "t2": "completed", "t3": "completed"}
    (lost,) = [t for t in trajectories if t.task.id == "t1"]
    assert "the server went away" in lost.error
    assert lost.reward is None


async def test_coroutine_from_sync_hook_keeps_limits_and_containment() -> None:
    async def leave() -> None:
        raise SystemExit(3)

    class Hidden(Plain):
        def step(self, turn: Turn) -> Any:
            return leave() if self.task.id == "t1" else None

    outcomes = {t.task.id: t.outcome for t in await play_all(Hidden(), "Yes", tasks=tasks(2))}
    assert outcomes == {"t0": "completed", "t1": "env_error"}


async def test_limiter_with_0_places_is_env_error() -> None:
    class Shut(Plain):
        async def step(self, turn: Turn) -> None:
            async with self.episode.limiter("door", 0):
                pass

    trajectory = await play(Shut(), "Yes")
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert "give a limit of at least 1" in trajectory.error


async def test_task_with_a_non_string_answer_is_refused_by_id() -> None:
    with pytest.raises(BadTask, match=r"task 'a': answer: a string is needed, got 5"):
        await play_all(Plain(), "Yes", tasks=[Task(id="a", prompt="x", answer=5)])  # type: ignore[arg-type]


def test_an_environment_without_a_constructor_has_no_arguments() -> None:
    assert Plain().construction() == {}
