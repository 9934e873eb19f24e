"""Environment and API for chat tests: a sum with a tool, and an API that answers it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runner import Environment, RunFile, Task, Trajectory, reward, tool
from runner.testing import play_many_async
from tests.engines.chat.api import Says

__all__ = ["Adding", "adds", "all_agents", "played"]


class Adding(Environment):
    """Environment with a sum, and a tool for it."""

    system_prompt = "Use the tool."

    def tasks(self) -> list[Task]:
        return [Task(id=f"t{number}", prompt=f"{number} + 1?", answer=str(number + 1)) for number in range(4)]

    @tool
    def add(self, a: int, b: int) -> int:
        """Add."""
        return a + b

    @reward
    def correct(self) -> bool:
        return self.task.answer in self.episode.text


def adds(body: dict[str, Any]) -> Says:
    """Answer a request with a tool call, and then with the tool's result."""
    last = body["messages"][-1]
    if last["role"] == "tool":
        return Says(f"It is {last['content']}.", reasoning="Easy.")
    number = last["content"].partition(" ")[0]
    return Says(reasoning="A sum.", calls=(("add", json.dumps({"a": int(number), "b": 1})),))


async def played(environment: Any, engine: Any, **options: Any) -> list[Trajectory]:
    got = await play_many_async(environment, engine, **options)
    for trajectory in got:
        assert trajectory.outcome.scored, trajectory.error
    return got


async def all_agents(file: Path, environment: Any, engine: Any, **options: Any) -> list[Trajectory]:
    """Return the texts of all agents of a run, including untrained ones."""
    await played(environment, engine, file=file, **options)
    with RunFile(file) as run_file:
        return [run_file.trajectory(row) for row in run_file.rows(trained=None)]
