"""`deltarunner check` on an author's code that hangs: the command ends, and names the line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

GOOD = """
import asyncio
import time
import anyio
from runner import Environment, Task, reward, tool

class Game(Environment):
    def tasks(self):
        return [Task(id=str(number), prompt="Continue!") for number in range(2)]

    @reward
    def right(self) -> bool:
        return True
"""

IMPATIENT = """
import sys
from runner.cli.app import main
from runner.testing.environment_linter import hang_watch, linter
linter.EPISODE_SECONDS, linter.HOOK_SECONDS = 2.0, 1.0
hang_watch.REPORT_SECONDS, hang_watch.END_SECONDS = 1.0, 3.0
hang_watch.PLAYING_SECONDS, hang_watch.BLOCKED_SECONDS = 3.0, 1.5
main()
"""

HANGS = {
    "a loop that blocks in rollout()": (
        "    async def rollout(self, conversation):\n        while True:\n            pass  # here",
        3,
        "the event loop has been blocked",
    ),
    "sleep() that blocks in a tool": (
        '    @tool\n    async def nap(self) -> str:\n        "Nap."\n        time.sleep(1000)  # here',
        3,
        "the event loop has been blocked",
    ),
    "an await that never ends in rollout()": (
        "    async def rollout(self, conversation):\n        await self.inner()\n\n"
        "    async def inner(self):\n        await asyncio.Event().wait()  # here",
        3,
        "an await did not end within 1 s",
    ),
    "a queue that stays empty after a turn": (
        "    async def rollout(self, conversation):\n        await conversation.generate()\n"
        "        await asyncio.Queue().get()  # here",
        3,
        "an await did not end within 1 s",
    ),
    "a lock that is taken twice": (
        "    async def rollout(self, conversation):\n        lock = anyio.Lock()\n        await lock.acquire()\n"
        "        await asyncio.wait({asyncio.create_task(lock.acquire())})  # here",
        3,
        "an await did not end within 1 s",
    ),
    "a loop that polls for what never comes": (
        "    async def rollout(self, conversation):\n        while not hasattr(self, 'answer'):\n"
        "            await anyio.sleep(0.01)  # here",
        3,
        "an await did not end within 1 s",
    ),
    "an endless loop of turns": (
        "    async def rollout(self, conversation):\n        while True:\n"
        "            await conversation.generate()  # here\n            conversation.add('Again!')\n"
        "            await anyio.sleep(0.6)",
        0,
        "took longer than",
    ),
    "an await that never ends in step()": (
        "    async def step(self, turn):\n        await anyio.sleep_forever()  # here",
        3,
        "step() took longer than",
    ),
    "an await that never ends in setup()": (
        "    async def setup(self):\n        await anyio.sleep_forever()  # here",
        3,
        "setup took longer than",
    ),
    "an await that never ends in a reward": (
        "    @reward\n    async def second(self) -> bool:\n        await anyio.sleep_forever()  # here",
        3,
        "rewards took longer than",
    ),
    "a thread that never ends in a tool": (
        '    @tool\n    def spin(self) -> str:\n        "Spin."\n        while True:\n'
        "            time.sleep(0.01)  # here",
        3,
        "did not return in time",
    ),
    "a thread that never ends in setup()": (
        "    def setup(self):\n        while True:\n            time.sleep(0.01)  # here",
        3,
        "setup took longer than",
    ),
    "a thread that never ends in tasks()": (
        "    def tasks(self):\n        while True:\n            time.sleep(0.01)  # here\n        yield",
        3,
        "nothing has happened for",
    ),
    "a thread that never ends in lifespan()": (
        "    def lifespan(self):\n        while True:\n            time.sleep(0.01)  # here\n        yield",
        3,
        "nothing has happened for",
    ),
    "an await that never ends in lifespan()": (
        "    async def lifespan(self):\n        await anyio.sleep_forever()  # here\n        yield",
        3,
        "nothing has happened for",
    ),
    "a constructor that never ends": (
        "    def __init__(self):\n        while True:\n            time.sleep(0.01)  # here",
        3,
        "nothing has happened for",
    ),
    "a loop that swallows every cancellation": (
        "    async def rollout(self, conversation):\n        while True:\n            try:\n"
        "                await anyio.sleep(1000)  # here\n            except BaseException:\n                pass",
        3,
        "nothing has happened for",
    ),
}


@pytest.mark.slow
@pytest.mark.sample_cases(6)
@pytest.mark.parametrize("what", HANGS)
def test_check_ends_and_names_the_line(what: str, tmp_path: Path) -> None:
    code, exit_code, message = HANGS[what]
    file = tmp_path / "game.py"
    file.write_text(f"{GOOD}\n{code}\n")
    lines = [number for number, line in enumerate(file.read_text().splitlines(), 1) if line.endswith("# here")]
    around = range(lines[0] - 3, lines[0] + 4)  # the loop may be at any of its lines
    done = subprocess.run(
        [sys.executable, "-c", IMPATIENT, "check", f"{file}:Game"],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    said = done.stdout + done.stderr
    assert done.returncode == exit_code, said
    assert message in said
    assert any(f"{file}:{line}" in said for line in around), said
    assert "Traceback" not in said


@pytest.mark.slow
def test_check_of_a_close_that_never_ends_comes_to_an_end(tmp_path: Path) -> None:
    file = tmp_path / "game.py"
    file.write_text(f"{GOOD}\n    async def close(self):\n        await anyio.sleep_forever()\n")
    done = subprocess.run(
        [sys.executable, "-c", IMPATIENT, "check", f"{file}:Game"],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0
    assert "close() took longer than 1 s" in done.stdout
