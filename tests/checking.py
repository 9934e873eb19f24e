"""Helpers for tests of `deltarunner check`: an environment without a mistake, and the command."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from runner.cli.app import app
from runner.testing.environment_linter import leak_checks

GOOD = '''
import asyncio, contextlib, itertools, random, threading, time
from runner import Environment, Group, Limits, Task, Tool, ToolError, group_reward, metric, reward, tool

class Good(Environment):
    """Everything an environment may do, and nothing that it may not."""

    FACES = (1, 2, 3, 4, 5, 6)

    def __init__(self, count: int = 4, faces: list[int] | None = None):
        self.count = count
        self.faces = list(faces or self.FACES)
        self.rolled = []

    def tasks(self):
        return [Task(id=f"t-{n}", prompt=f"Roll a {n + 1}.", answer=str(n + 1)) for n in range(self.count)]

    @contextlib.contextmanager
    def lifespan(self):
        yield {"lifted": True}

    async def setup(self):
        self.lock = self.episode.exit_stack.enter_context(open(__file__))

    @tool
    async def roll(self, times: int) -> list[int]:
        """Roll the die."""
        rolls = [self.episode.rng.choice(self.faces) for _ in range(times)]
        self.rolled += rolls
        await asyncio.sleep(0)
        return rolls

    def step(self, turn):
        return None if self.rolled else "Roll first."

    @reward
    def right(self) -> bool:
        return int(self.task.answer) in self.rolled

    @metric
    def rolls(self) -> float:
        return len(self.rolled)

    def close(self):
        self.rolled.clear()
'''


def folder_of_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The body of a fixture: a folder whose mine.py each test imports again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # the leaks of these tests would not end in five seconds either
    monkeypatch.setattr(leak_checks, "SETTLE_SECONDS", 0.5)
    yield tmp_path
    sys.modules.pop("mine", None)
    gc.collect()


def check(folder: Path, source: str, *options: str) -> Result:
    (folder / "mine.py").write_text(source)
    return CliRunner().invoke(app, ["check", "mine.py:Env", *options])


def findings(result: Result) -> list[str]:
    return [line for line in result.output.splitlines() if re.match("error|warning|deltarunner: ", line)]
