"""The pages say what the code does."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from runner import Concurrency, Environment, Outcome, Run, ScriptedEngine, reward
from runner.testing import Replies, call
from tests import reference
from tests.repository import DOCS

PAGE = (DOCS / "environments.md").read_text()


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


def defined(name: str, folder: Path) -> Any:
    """A class that a block of the page defines; from a file, since a tool's source is read."""
    source = folder / f"block_{name.lower()}.py"
    source.write_text(next(block for block in blocks() if f"class {name}" in block))
    spec = importlib.util.spec_from_file_location(source.stem, source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[source.stem] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


@pytest.mark.anyio
async def test_a_task_with_fields_of_its_own_and_a_source_that_hears_play(tmp_path: Path) -> None:
    sums, curriculum = defined("Sums", tmp_path), defined("Curriculum", tmp_path)()
    async with Run(sums, ScriptedEngine("2")) as run:
        (trajectory,) = [trajectory async for trajectory in run]
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 1), trajectory.error
    assert trajectory.segments[0].messages[0]["content"] == "Answer with a number below 12."

    class Easy(Environment):
        @reward
        def right(self) -> bool:
            return self.task.id == "0"

    async with Run(Easy, ScriptedEngine("2"), tasks=curriculum, concurrency=Concurrency(episodes=1)) as run:
        asked = [trajectory.task.prompt async for trajectory in run]
    assert asked[0] == "What is 10 + 1?"
    assert asked[-1] == "What is 199 + 1?", "of the next level"


@pytest.mark.anyio
async def test_the_episode_of_the_page_has_tools_of_its_setup_and_is_compared_in_its_group(tmp_path: Path) -> None:
    hunt = defined("Hunt", tmp_path)
    barn, well = call("look", place="barn"), call("look", place="well")
    looks: Replies = [[barn], "Nowhere.", [well], [barn]]
    async with Run(hunt, ScriptedEngine(looks), group_size=2) as run:
        (group,) = [group async for group in run.groups()]
    for trajectory in group.trajectories:
        assert (trajectory.outcome, trajectory.reason, trajectory.reward) == (Outcome.COMPLETED, "found", 1.0)
        assert trajectory.turns[0].reward == 1.0


# --- the reference


def test_the_reference_is_what_the_code_says() -> None:
    assert reference.page() == reference.PAGE.read_text(encoding="utf-8"), "make reference"


def test_the_reference_has_every_public_name_and_no_other() -> None:
    for package, part in zip(reference.PACKAGES, reference.page().split("\n## ")[1:], strict=True):
        names = re.findall(r"^### (\w+)$", part, flags=re.MULTILINE)
        assert sorted(names) == sorted(importlib.import_module(package).__all__)


def test_every_public_name_says_what_it_is() -> None:
    entries = re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", reference.page(), flags=re.MULTILINE | re.DOTALL)
    silent = [name for name, text in entries if not re.sub(r"```.*?```|\*\*.*?\*\*", "", text, flags=re.DOTALL).strip()]
    assert silent == []


@pytest.mark.parametrize(
    "name", ["Task.info", "TaskSource.finished", "Group.trajectories", "Episode.rng", "Conversation.remaining"]
)
def test_what_an_author_needs_is_in_the_reference(name: str) -> None:
    owner, _, member = name.partition(".")
    (entry,) = re.findall(rf"^### {owner}\n(.*?)(?=^### )", reference.page(), flags=re.MULTILINE | re.DOTALL)
    assert member in entry
