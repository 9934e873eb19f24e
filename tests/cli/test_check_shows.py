"""Output of `deltarunner check`: two results that differ, tasks that cannot be stored, and short lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from runner.cli.app import app

AUTHOR = '''
import datetime, itertools
from runner import Environment, Task, reward, tool

count = itertools.count()

class Odd(Environment):
    def tasks(self):
        return [Task(id=f"t-{n}", prompt="hello") for n in range(2)]

    @reward
    def right(self):
        return 1

class Tool(Odd):
    @tool
    def roll(self, n: int) -> str:
        """Roll."""
        return "x" * 100 + str(next(count)) + "y" * 100

class Reward(Odd):
    @reward
    def right(self):
        return next(count) / 4

class Prompt(Odd):
    def prompt(self):
        return f"Number {next(count)}"

class Metric(Odd):
    def tasks(self):
        return [Task(id=f"t-{n}", prompt="hello", info={"n": n, "when": (1, 2)}) for n in range(2)]

class Dated(Odd):
    def tasks(self):
        when = datetime.date(2026, 1, 2)
        return [Task(id=f"t-{n}", prompt="hello", info={"when": [when]} if n > 5 else {}) for n in range(9)]

class Generated(Dated):
    def tasks(self):
        yield from super().tasks()

class Endless(Odd):
    def tasks(self):
        for n in itertools.count():
            yield Task(id=f"t-{n}", prompt="hello", info={"seen": {1}} if n == 900 else {})

class Async(Odd):
    async def tasks(self):
        yield Task(id="t-0", prompt="hello", info={"seen": b"x"})

class Twice(Odd):
    def tasks(self):
        return [Task(id="same", prompt="hello"), Task(id="same", prompt="hello")]
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "odd.py").write_text(AUTHOR)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("odd", None)


def check(name: str) -> tuple[int, list[str]]:
    done = CliRunner().invoke(app, ["check", f"odd.py:{name}"])
    return done.exit_code, done.output.splitlines()


@pytest.mark.parametrize(
    ("name", "cause", "shape"),
    [
        ("Tool", "tool roll() returned another result", "first ...'xxxx"),
        ("Reward", "right() returned another value", "in t-"),
        ("Prompt", "prompt() returned another prompt", "first 'Number "),
    ],
)
def test_differing_results_are_shown_from_their_first_difference(
    folder: Path, name: str, cause: str, shape: str
) -> None:
    code, lines = check(name)
    (line,) = [line for line in lines if cause in line and "was repeated" in line]
    assert code == 3
    assert shape in line
    first, _, other = line.rpartition("(in t-")[2].rstrip(").").partition(" first ")[2].partition(", then ")
    assert first
    assert other
    assert first != other
    assert max(map(len, (first, other))) < 80


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Dated", "task 't-6': info['when'][0] is of type datetime.date, which a run file cannot keep: give its text"),
        ("Generated", "task 't-6': info['when'][0] is of type datetime.date"),
        ("Endless", "task 't-900': info['seen'] is of type set"),
        ("Async", "task 't-0': info['seen'] is of type bytes"),
        ("Twice", "task 2 has the same id 'same' as task 1"),
    ],
)
def test_task_that_cannot_be_kept_is_an_error(folder: Path, name: str, said: str) -> None:
    code, lines = check(name)
    found = [line for line in lines if line.startswith("error") and said in line]
    assert (code, len(found)) == (3, 1), lines
    assert ("3 of 9 tasks have such a value." in found[0]) == (name in ("Dated", "Generated"))


def test_tuple_of_a_task_is_a_warning(folder: Path) -> None:
    code, lines = check("Metric")
    (line,) = [line for line in lines if line.startswith("warning")]
    assert code == 0
    assert "task 't-0': info['when'] is a tuple, which a run file returns as a list (in 2 of 2 tasks)" in line


def test_check_without_findings_prints_short_lines(folder: Path) -> None:
    code, lines = check("Odd")
    assert (code, lines[-1]) == (0, "ok")
    assert max(map(len, lines)) <= 120


FROM_A_FILE = """
from runner import Environment, reward

class Env(Environment):
    @reward
    def right(self):
        return 1
"""


def test_tasks_of_a_file_are_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("from_a_file.py").write_text(FROM_A_FILE)
    line = '{"id": "%s", "prompt": "Roll."}\n'

    def check(*more: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["check", "from_a_file.py:Env", *more])
        return result.exit_code, result.output

    assert "Env has no tasks" in check()[1]
    Path("tasks.jsonl").write_text(line % "a" + line % "b")
    code, output = check("--tasks", "tasks.jsonl")
    assert code == 0
    assert "completed 4;" in output
    Path("tasks.jsonl").write_text(line % "a" + line % "a")
    code, output = check("--tasks", "tasks.jsonl")
    assert code == 3
    assert "has the same id 'a'" in output
