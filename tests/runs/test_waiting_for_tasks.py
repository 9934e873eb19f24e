"""A `tasks()` or a `lifespan()` that does not end is named, and Ctrl-C ends it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from contextvars import Context
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from runner import Run, ScriptedEngine, Task
from runner.runs import state
from runner.runs.event_loop import on_event_loop
from runner.runs.live_stats import StatsReader, in_words
from runner.runs.reporter import PlainReporter
from runner.runs.summary import Summary
from tests.playing import Plain, until


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set at the end, so that no thread stays."""
    monkeypatch.setattr(state, "SHOWN_SECONDS", 0.0)
    event = threading.Event()
    yield event
    event.set()


def test_waits_for_is_readable_in_a_callback_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first Ctrl-C reads it in a callback of the event loop. It was lost if the reading raised an error."""
    monkeypatch.setattr(state, "SHOWN_SECONDS", -1.0)
    seen: list[str] = []

    async def main() -> None:
        run, asked = state.RunState(Summary()), anyio.Event()

        def ask() -> None:
            try:
                seen.append(run.waits_for)
            finally:
                asked.set()

        with run.waiting_for("tasks()"):
            asyncio.get_running_loop().call_soon(ask, context=Context())
            await asked.wait()

    on_event_loop(main)
    assert seen == ["tasks()"]


class Said(PlainReporter):
    """Display that keeps its lines."""

    def __init__(self) -> None:
        super().__init__("Waits")
        self.lines: list[str] = []
        self.shows = anyio.Event()

    def say(self, line: str) -> None:
        self.lines.append(line)

    def _starting(self, seconds: float, doing: str, what: str) -> None:
        super()._starting(10 * seconds, doing, what)  # the interval of its lines is ten seconds


async def until_said(run: Run, text: str) -> None:
    """Enter the run, wait for a line that contains `text`, and cancel."""
    reporter = Said()

    async def play() -> None:
        async with run:
            async for _ in run:
                pass

    async with anyio.create_task_group() as group:
        group.start_soon(play)
        group.start_soon(reporter.watch, run)
        with anyio.fail_after(60):
            while not any(text in line for line in reporter.lines):  # noqa: ASYNC110  # a thread adds the lines
                await anyio.sleep(0.01)
        group.cancel_scope.cancel()


@pytest.mark.anyio
async def test_start_that_waits_for_tasks_is_shown(released: threading.Event) -> None:
    class Waits(Plain):
        def tasks(self) -> Any:
            released.wait()
            return []

    class Yields(Plain):
        def tasks(self) -> Any:
            released.wait()
            yield Task(id="a", prompt="x")

    class Loads(Plain):
        @contextmanager
        def lifespan(self) -> Iterator[None]:
            released.wait()
            yield

    for environment in (Waits, Yields):
        await until_said(Run(environment(), ScriptedEngine("Yes")), "waiting for tasks()")
    await until_said(Run(Loads(), ScriptedEngine("Yes")), "waiting for lifespan()")


def shows(run: Run, line: str) -> bool:
    return line in list(in_words(StatsReader().read(run)))


@pytest.mark.anyio
async def test_run_that_waits_for_the_next_task_is_shown(released: threading.Event) -> None:
    class Waits(Plain):
        def tasks(self) -> Any:
            yield Task(id="a", prompt="x")
            released.wait()

    class Sleeps(Plain):
        # tasks() may be synchronous or asynchronous
        async def tasks(self) -> AsyncIterator[Task]:  # type: ignore[override]
            yield Task(id="a", prompt="x")
            await anyio.sleep_forever()

    for environment in (Waits, Sleeps):
        async with Run(environment(), ScriptedEngine("Yes")) as run:
            async for _ in run:
                await until(partial(shows, run, "0 running (waiting for tasks())"))
                run.cancel()
        assert run.summary.episodes == 1


COMMAND = """
import signal
from runner.cli import report, run
run.naming_slow_code = lambda: report.naming_slow_code(0.2)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell without job control makes programs ignore it
from runner.cli.app import main
main()
"""

HANGS = """
import time
from pathlib import Path
from runner import Environment, reward

class Game(Environment):
    def tasks(self):
        Path("begun").touch()
        while True:
            time.sleep(0.01)

    @reward
    def right(self):
        return True
"""


@pytest.mark.parametrize("command", ["run", "check"])
def test_ctrl_c_names_the_line_of_a_hanging_tasks(command: str, tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(HANGS)
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, command, "game.py:Game"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as process:
        until = time.monotonic() + 300
        while not (tmp_path / "begun").exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert process.stderr is not None
        before = process.stderr.readline() if command == "run" else ""
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=300)
    if command == "run":
        assert before.startswith(f"waiting for Game.tasks, {tmp_path / 'game.py'}:"), before
    assert process.returncode == 130, said
    assert f"deltarunner: interrupted in tasks(), {tmp_path / 'game.py'}:" in said
    assert "Traceback" not in said
