"""The pages say what the code does."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from runner import Environment, Outcome, Run, ScriptedEngine
from runner.testing import call

PAGE = (Path(__file__).parents[1] / "docs" / "environments.md").read_text()


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_default_rollout_is_in_the_docs_word_for_word() -> None:
    assert inspect.getsource(Environment.rollout) in blocks()


def test_every_outcome_is_explained() -> None:
    for outcome in Outcome:
        assert f"`{outcome.value}`" in PAGE


@pytest.mark.anyio
async def test_the_first_environment_of_the_page_plays(tmp_path: Path) -> None:
    source = tmp_path / "calculator.py"
    source.write_text(blocks()[0])
    names: dict[str, Any] = {"__name__": "calculator"}
    exec(compile(blocks()[0], str(source), "exec"), names)
    environment = names["Calculator"]()
    engine = ScriptedEngine([[call("multiply", a=3, b=10)], "It is 30"])
    async with Run(environment, engine, tasks=[environment.tasks()[3]]) as run:
        (trajectory,) = [trajectory async for trajectory in run]
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
    assert trajectory.reward == 1
    assert environment.multiply(6, 7) == 42
