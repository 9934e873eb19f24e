"""Test files of an author, run by a nested pytest."""

from __future__ import annotations

import sys

import pytest

import runner.testing.engine_pool
import runner.testing.failure_report
import runner.testing.playing

# Imported here, since modules that an inner run imports first are dropped after it, and would be loaded again.
import runner.testing.recordings
import runner.testing.strategies  # noqa: F401  # used only in inner runs
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
"""Options of every pytest inside this process. Otherwise, a later crash of this process would be reported to a captured
file.
"""

HEAD = """
import pytest
from calculator import Calculator
from runner import *
from runner.testing import *
"""


def written(pytester: pytest.Pytester, test: str, **files: str) -> None:
    pytester.makepyfile(test_it=HEAD + test, calculator=CALCULATOR, **files)


def run(pytester: pytest.Pytester, test: str, *options: str, **files: str) -> pytest.RunResult:
    """Run a test file by a pytest inside this process, and return its outcome."""
    written(pytester, test, **files)
    return pytester.runpytest_inprocess(*PLAIN, *options)


def run_apart(pytester: pytest.Pytester, test: str, *options: str, **files: str) -> pytest.RunResult:
    """Run a test file by a pytest in another process, and return its outcome."""
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
