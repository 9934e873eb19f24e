"""Refusals of runs and checks: missing modules and tasks, group rewards, options that do not fit the file."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from runner import BadOption, BadTask, ConfigurationChanged, RunFile, RunFileError, ScriptedEngine
from runner.cli.app import app
from runner.cli.run import run_command
from runner.cli.settings import RunSettings
from runner.errors import DeltarunnerError

pytestmark = pytest.mark.sample_functions(2)

AUTHOR = """
from runner import Environment, Task, group_reward, reward

class Greeting(Environment):
    def tasks(self):
        return [Task(id=f"t-{n}", prompt="hello") for n in range(2)]

    @reward
    def polite(self):
        return self.episode.text == "hi"

class Raising(Greeting):
    def tasks(self):
        raise FileNotFoundError("no puzzles here")

class Leaving(Greeting):
    def tasks(self):
        raise SystemExit(0)

class LeavingLate(Greeting):
    def tasks(self):
        yield Task(id="first", prompt="hello")
        raise SystemExit(0)

class Nothing(Greeting):
    def tasks(self):
        return None

class Awaited(Greeting):
    async def tasks(self):
        return []

class Ranked(Greeting):
    @group_reward
    def rank(self, group):
        first, second = group.trajectories
        return [0.0, 1.0]

class RankedByError(Greeting):
    @group_reward
    def rank(self, group):
        raise KeyError("best")

class RankedShort(Greeting):
    @group_reward
    def rank(self, group):
        return [1.0]
"""


@pytest.fixture
def run_file(folder: Path) -> Path:
    play(environment="mine.py:Greeting", file=Path("w.db"))
    return Path("w.db")


def play(**options: Any) -> int:
    return run_command(RunSettings(**options), lambda settings: ScriptedEngine("hi"))


def deltarunner(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


# --- run files


@pytest.mark.parametrize("kind", ["mktemp", "killed at its beginning"])
def test_a_file_that_is_empty_is_begun(folder: Path, kind: str) -> None:
    file = folder / "empty.db"
    file.touch()
    if kind != "mktemp":
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
    assert play(environment="mine.py:Greeting", file=file) == 0
    with RunFile(file) as stored:
        assert (len(stored), stored.complete) == (2, True)


def test_output_of_environment_import_is_not_in_json(folder: Path) -> None:
    (folder / "loud.py").write_text("print('loading')\n")
    command = [sys.executable, "-m", "runner.cli.app", "run", "loud.py", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert json.loads(done.stdout)["summary"] is None
    assert "loading" in done.stderr


# --- mistakes of authors


@pytest.mark.parametrize("command", ["run", "check"])
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import sys\nsys.exit(0)", "SystemExit: 0 (in <module>,"),
        ("1 / 0", "ZeroDivisionError: division by zero (in <module>,"),
        ("def broken(:", "SyntaxError: invalid syntax"),
    ],
)
def test_a_module_that_cannot_be_loaded_is_named(folder: Path, command: str, source: str, said: str) -> None:
    (folder / "broken.py").write_text(source)
    refused = deltarunner(command, "broken.py:Broken")
    assert refused.exit_code == 3, refused.output
    assert f"broken.py cannot be loaded: {said}" in refused.output
    assert "broken.py" in refused.output.partition(said)[2]
    assert "Traceback" not in refused.output


@pytest.mark.parametrize("command", ["run", "check"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Raising", "tasks() raised FileNotFoundError: no puzzles here (in tasks,"),
        ("Leaving", "tasks() raised SystemExit: 0 (in tasks,"),
        ("Nothing", "tasks() returned None: return a list of Task"),
        ("Awaited", "tasks() returned <coroutine object Awaited.tasks"),
    ],
)
def test_tasks_that_cannot_be_loaded_are_a_task_error(folder: Path, command: str, name: str, said: str) -> None:
    refused = deltarunner(command, f"mine.py:{name}")
    assert refused.exit_code == 4, refused.output
    assert said in refused.output
    assert "Traceback" not in refused.output


def test_system_exit_in_tasks_ends_the_run_only(folder: Path) -> None:
    with pytest.raises(BadTask, match=r"tasks\(\) raised SystemExit: 0"):
        play(environment="mine.py:LeavingLate", file=Path("late.db"))
    checked = deltarunner("check", "mine.py:LeavingLate")
    assert (checked.exit_code, "tasks() raised SystemExit: 0" in checked.output) == (3, True)


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("Ranked", 0, "ok"),
        ("RankedByError", 3, "KeyError: 'best' (in rank,"),
        ("RankedShort", 3, ""),
    ],
)
def test_check_refuses_a_group_reward_that_cannot_be_had(folder: Path, name: str, code: int, said: str) -> None:
    checked = deltarunner("check", f"mine.py:{name}")
    assert checked.exit_code == code, checked.output
    assert said in checked.output
    # Two groups are played at once, and the error names the one that ended first.
    assert bool(re.search(r"error    group_reward rank\(\) of task 't-[01]'", checked.output)) is bool(code)


# --- refusals before the engine is created


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"task": "nowhere"}, BadTask, "None of 2 tasks has the id 'nowhere'"),
        ({"tasks": Path("typo.jsonl"), "episodes": 2}, BadTask, r"typo.jsonl:2: unknown field 'promt'"),
        ({"seed": 1}, ConfigurationChanged, "seed: 0 -> 1"),
        ({"group_size": 2}, ConfigurationChanged, "group_size: 1 -> 2"),
        ({"sampling": {"temperature": 0.5}}, ConfigurationChanged, r"sampling.temperature: \(not set\) -> 0.5"),
        ({"limits": ("turns=3",)}, ConfigurationChanged, "limits.turns"),
        ({"environment": "mine.py:Ranked"}, ConfigurationChanged, "environment: .*Greeting.* -> .*Ranked"),
        ({"file": Path("mine.py")}, RunFileError, "not a run file"),
    ],
)
def test_bad_task_or_run_file_is_refused_before_an_engine_is_made(
    run_file: Path, options: dict[str, Any], error: type[DeltarunnerError], said: str
) -> None:
    Path("typo.jsonl").write_text('{"id": "a", "prompt": "hello"}\n{"id": "b", "promt": "hello"}\n')
    made: list[ScriptedEngine] = []

    def make_engine(settings: RunSettings) -> ScriptedEngine:
        made.append(ScriptedEngine("hi"))
        return made[-1]

    settings = RunSettings(**{"environment": "mine.py:Greeting", "file": run_file, **options})
    with pytest.raises(error, match=said):
        run_command(settings, make_engine)
    assert made == []


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"history": "rewrite"}, "rewrite.*give one of append, fork, refuse"),
        ({"template_options": ["messages=1"]}, "messages.*only the template reads"),
        ({"index": 1}, "the episodes of a group are 0 to 0"),
    ],
)
def test_invalid_option_is_refused_before_the_engine(
    folder: Path, options: dict[str, Any], said: str, debug: bool
) -> None:
    def make_engine(settings: RunSettings) -> ScriptedEngine:
        raise AssertionError("an engine was made")

    with pytest.raises(BadOption, match=said):
        run_command(RunSettings(environment="mine.py:Greeting", debug=debug, **options), make_engine)


def test_run_with_an_unchanged_configuration_resumes_its_file(run_file: Path) -> None:
    assert play(environment="mine.py:Greeting", file=run_file, concurrency=1) == 0
    with RunFile(run_file) as stored:
        assert len(stored) == 2
