"""Faults that were found by breaking it, each with the test that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from runner import BadOption, BadTask, Environment, Outcome, Run, ScriptedEngine, Task, Tool, ToolError, reward, tool
from runner.testing import call
from tests.playing import Plain, play, play_all, tasks

pytestmark = pytest.mark.anyio


def function_that_takes_a(a: int) -> int:
    return a


class Calls(Plain):
    """Tools that misbehave."""

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


async def test_a_synchronous_tool_that_raises_keyboard_interrupt_fails_its_own_episode_only() -> None:
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


async def test_an_argument_that_an_explicit_schema_does_not_name_is_the_models_mistake() -> None:
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
            self.tools.append(function_that_takes_a)  # type: ignore[arg-type]  # that is the point

    trajectory = await play(Functions(), "bye")
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert "write Tool(function)" in trajectory.error


async def test_a_required_call_without_any_tool_is_refused_at_start() -> None:
    class Required(Plain):
        tool_choice = "required"

    with pytest.raises(BadOption, match=r"tool_choice='required': no such tool. Tools: none"):
        await play_all(Required(), "bye")


async def test_an_engine_for_an_agent_that_never_speaks_is_reported() -> None:
    async with Run(Plain(), ScriptedEngine("Yes"), engines={"jduge": ScriptedEngine("No")}, tasks=tasks(1)) as run:
        async for _ in run:
            pass
    assert list(run.summary.faults) == ["engines: no agent 'jduge' ever spoke"]


async def test_a_synchronous_source_may_hear_of_results_asynchronously() -> None:
    heard = []

    class Source(list[Task]):
        async def finished(self, trajectory: Any) -> None:
            heard.append(trajectory.task.id)

    await play_all(Plain(), "Yes", tasks=Source(tasks(2)))
    assert sorted(heard) == ["t0", "t1"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"id": 5}', r"tasks.jsonl:1: id: a string is needed, got 5"),
        ('{"id": "a", "prompt": 5}', r"tasks.jsonl:1: expected a string, a message or a list of messages, got int"),
        ('{"id": "a", "info": []}', r"tasks.jsonl:1: info: a object is needed"),
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
