"""Methods that look like hooks and are never called: they are named before anything is played, and by `check`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from runner import Conversation, Environment, Run, Task, Trajectory, Turn, metric, reward, tool
from runner.cli.app import app
from runner.environment.environment import HOOKS
from runner.environment.loading import bundled_environments, find_environment
from runner.environment.uncalled_methods import HOOK_SYNONYMS, SETTING_SYNONYMS, uncalled_methods
from runner.testing import ScriptedEngine
from tests.playing import Plain


def uncalled(kind: type[Environment[Any]]) -> list[str]:
    return list(uncalled_methods(kind()))


def does_nothing(self: Any, *_: object) -> None:
    pass


MISSPELT = ["setpu", "set_up", "promt", "prompt_", "rolout", "roll_out", "clsoe", "close_", "steps", "taks", "lifespam"]


@pytest.mark.parametrize("name", [*MISSPELT, *(name for names in HOOK_SYNONYMS.values() for name in names.split())])
def test_a_method_with_a_name_like_a_hooks_is_named_with_the_hook(name: str) -> None:
    (text,) = uncalled(type("Odd", (Plain,), {name: does_nothing}))
    assert text.startswith(f"Odd.{name}() is never called: ")
    assert "mark it with @" in text or any(f"the hook is called {hook}()" in text for hook in HOOKS)


@pytest.mark.parametrize("name", [name for names in SETTING_SYNONYMS.values() for name in names.split()])
def test_misnamed_setting_is_reported_with_the_right_name(name: str) -> None:
    (text,) = uncalled(type("Odd", (Plain,), {name: "You are brief."}))
    assert text.startswith(f"Odd.{name} is never read: the setting is called ")
    assert hasattr(Environment, text.partition("called ")[2].partition(".")[0])

    def reads(self: Any) -> Any:
        return self.max_turns

    assert uncalled(type("Reads", (Plain,), {"max_turns": 5, "setup": reads})) == []


def test_misplaced_finished_is_reported_with_the_right_place() -> None:
    class Curriculum(Plain):
        async def tasks(self) -> AsyncIterator[Task]:  # type: ignore[override]
            yield Task(id="a", prompt="?")

        def finished(self, trajectory: Trajectory) -> None:
            pass

    (text,) = uncalled(Curriculum)
    assert text.startswith(
        "Curriculum.finished() is never called: results are sent to the object that `tasks()` returns"
    )


def test_an_environment_that_is_the_source_of_its_tasks_is_fine() -> None:
    class Source(Plain):
        def tasks(self) -> Any:
            return self

        def __iter__(self) -> Iterator[Task]:
            yield Task(id="a", prompt="?")

        def finished(self, trajectory: Trajectory) -> None:
            pass

    assert uncalled(Source) == []


class Steps(Plain):
    def step(self, turn: Turn) -> None:
        return None


def test_step_that_the_rollout_never_calls_is_named() -> None:
    class Both(Steps):
        async def rollout(self, conversation: Conversation) -> None:
            await conversation.generate()

    (text,) = uncalled(Both)
    assert "Both.step() is never called: rollout() replaces it" in text


def test_a_step_that_a_rollout_has_called_is_fine() -> None:
    class Answers(Steps):
        async def rollout(self, conversation: Conversation) -> None:
            await self.episode.answer(await conversation.generate())

    class Calls(Steps):
        async def rollout(self, conversation: Conversation) -> None:
            self.step(await conversation.generate())

    class GoesUp(Steps):
        async def rollout(self, conversation: Conversation) -> None:
            await super().rollout(conversation)

    assert [uncalled(kind) for kind in (Answers, Calls, GoesUp, Steps)] == [[], [], [], []]


def test_called_marked_or_unrelated_methods_are_not_reported() -> None:
    class Fine(Plain):
        def setup(self) -> None:
            self.reset()

        def reset(self) -> None:
            self.play = self.evaluate

        def evaluate(self) -> None:
            pass

        @reward
        def score(self) -> float:
            return self.helper()

        @metric
        def metrics(self) -> float:
            return 1

        @tool
        def run(self) -> str:
            """Run."""
            return ""

        def helper(self) -> float:
            return 1

        def look_around(self) -> str:
            return ""

        def _teardown(self) -> None:
            pass

    assert uncalled(Fine) == []


def test_bundled_environments_have_no_uncalled_method() -> None:
    for bundled in bundled_environments():
        kind = find_environment(bundled.name)
        # some classes need arguments, and none must be constructed for this
        assert list(uncalled_methods(kind.__new__(kind))) == []


@pytest.mark.anyio
async def test_run_reports_uncalled_methods_before_the_first_episode() -> None:
    class Odd(Plain):
        def teardown(self) -> None:
            pass

    async with Run(Odd, ScriptedEngine("Yes")) as run:
        assert any("Odd.teardown() is never called" in fault for fault in run.summary.faults)
        assert [t.outcome async for t in run]


def test_check_reports_an_uncalled_method_once_as_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "odd.py"
    file.write_text(
        "from runner import Environment, Task, reward\n"
        "class Odd(Environment):\n"
        "    def tasks(self):\n        return [Task(id='a', prompt='?')]\n"
        "    def teardown(self):\n        pass\n"
        "    @reward\n    def right(self) -> bool:\n        return True\n"
    )
    result = CliRunner().invoke(app, ["check", f"{file}:Odd"])
    assert result.exit_code == 0
    assert result.output.count("Odd.teardown() is never called: the hook is called close()") == 1
