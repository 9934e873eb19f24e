"""The testing kit: the time that its pytest plugin adds to every test run, and the time of an episode in a test."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

from runner import Environment, Task, reward, tool
from runner.testing import call, play
from tests.benchmarks.figures import Figure, main

ROUND_COUNT = 9

IMPORT = """
import time, pytest
began = time.perf_counter()
import runner.pytest_plugin
print((time.perf_counter() - began) * 1e3)
"""


class Product(Environment):
    """Environment with one tool and two turns."""

    def tasks(self) -> list[Task]:
        return [Task(id="product", prompt="What is 6 * 7?", answer="42")]

    @tool
    async def multiply(self, a: int, b: int) -> int:
        """Multiply two integers."""
        return a * b

    @reward
    async def correct(self) -> bool:
        return self.task.answer in self.episode.text.split()


def measure() -> Iterator[Figure]:
    """The testing kit: its plugin, and an episode in a plain test."""
    yield Figure(
        "import runner.pytest_plugin, pytest being there", "ms", tuple(map(_imported, range(ROUND_COUNT))), under=30
    )
    _played(0)  # loads everything that is loaded once
    yield Figure(
        "play() of two turns, an event loop of its own each time", "ms", tuple(map(_played, range(ROUND_COUNT)))
    )


def _imported(_: int) -> float:
    return float(subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True).stdout)


def _played(_: int) -> float:
    began = time.perf_counter()
    trajectory = play(Product, [call("multiply", a=6, b=7), "It is 42"])
    milliseconds = (time.perf_counter() - began) * 1e3
    if trajectory.reward != 1:
        raise AssertionError(f"{trajectory.outcome.value}: {trajectory.error}")
    return milliseconds


if __name__ == "__main__":
    main(measure)
