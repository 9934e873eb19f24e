"""Test files of an author, run by a pytest of their own."""

from __future__ import annotations

import sys

import pytest

import runner.testing.engine_pool
import runner.testing.failure_report
import runner.testing.playing

# Here, since modules that are first imported in an inner run are forgotten after it, and would be loaded again.
import runner.testing.recordings
import runner.testing.strategies  # noqa: F401  # all of them are used in inner runs only
from tests.repository import ROOT

__all__ = ["CALCULATOR", "PLAIN", "run", "run_apart"]

CALCULATOR = '''
from runner import Environment, Task, reward, tool


class Calculator(Environment):
    def tasks(self):
        return [Task(id=str(n), prompt=f"What is {n} * 7?", answer=str(7 * n)) for n in range(6, 9)]

    @tool
    def multiply(self, a: int, b: int) -> int:
        """Multiply two integers."""
        return a * b

    @reward
    def correct(self) -> bool:
        return self.task.answer in self.episode.text.split()
'''

PLAIN = ("-pno:asyncio", "-pno:cacheprovider", "-pno:faulthandler")
"""Options of every pytest inside this process: its handler of crashes would leave ours writing to what is captured."""

HEAD = """
import pytest
from calculator import Calculator
from runner import *
from runner.testing import *
"""


def written(pytester: pytest.Pytester, test: str, **files: str) -> None:
    pytester.makepyfile(test_it=HEAD + test, calculator=CALCULATOR, **files)


def run(pytester: pytest.Pytester, test: str, *options: str, **files: str) -> pytest.RunResult:
    """The outcome of a test file, by a pytest inside this process."""
    written(pytester, test, **files)
    return pytester.runpytest_inprocess(*PLAIN, *options)


def run_apart(pytester: pytest.Pytester, test: str, *options: str, **files: str) -> pytest.RunResult:
    """The same, by a pytest in a process of its own."""
    written(pytester, test, **files)
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    return pytester.run(
        sys.executable,
        "-m",
        "pytest",
        "--strict-markers",
        "-p",
        "no:cacheprovider",
        *options,
        f"--rootdir={ROOT.anchor}",
    )
