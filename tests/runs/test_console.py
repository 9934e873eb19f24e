"""Output without a reader: a run continues, and other commands end as Unix tools do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runner import Outcome, RunFile
from tests.repository import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.sample_cases(5), pytest.mark.sample_functions(2)]

WATCHDOG_SECONDS = 600.0

AUTHOR = """
from runner import Environment, Task, reward

class Greeting(Environment):
    def tasks(self):
        return [Task(id=f"t-{n}", prompt="hello") for n in range(8)]
    @reward
    def polite(self):
        return True

class Failing(Greeting):
    def setup(self):
        raise ValueError("no luck")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(AUTHOR)
    return tmp_path


def without_reader(folder: Path, *command: str, both: bool = False) -> subprocess.CompletedProcess[str]:
    """Run `python ...` with an unread stdout, and with `both` an unread stderr."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=writer,
            stderr=writer if both else subprocess.PIPE,
            text=True,
            timeout=WATCHDOG_SECONDS,
            check=False,
        )
    finally:
        os.close(writer)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file, which is played once without a reader of its output, for all commands that read run files."""
    folder = tmp_path_factory.mktemp("played")
    (folder / "mine.py").write_text(AUTHOR)
    assert without_reader(folder, *command("run", "mine.py:Greeting", "--file", "w.db")).returncode == 0
    return folder / "w.db"


def command(*arguments: str) -> tuple[str, ...]:
    return ("-m", "tests.faults.command", *arguments)


@pytest.mark.parametrize("both", [False, True], ids=["stdout", "both"])
@pytest.mark.parametrize(
    "options", [(), ("--json",), ("--debug",), ("--show", "3")], ids=["plain", "json", "debug", "show"]
)
def test_run_without_its_stderr_reader_ends_with_its_exit_code(
    folder: Path, options: tuple[str, ...], both: bool
) -> None:
    done = without_reader(folder, *command("run", "mine.py:Greeting", "--file", "w.db", *options), both=both)
    assert done.returncode == 0, done.stderr
    assert both or "Traceback" not in done.stderr
    with RunFile(folder / "w.db") as stored:
        assert (stored.complete, stored.outcomes()) == (True, {Outcome.COMPLETED: 8})


@pytest.mark.parametrize("both", [False, True], ids=["stdout", "both"])
def test_failing_run_without_a_reader_keeps_its_exit_code(folder: Path, both: bool) -> None:
    done = without_reader(folder, *command("run", "mine.py:Failing", "--file", "w.db"), both=both)
    assert done.returncode == 10, done.stderr


@pytest.mark.parametrize("quiet", [False, True])
def test_run_from_python_continues_without_a_stderr_reader(folder: Path, quiet: bool) -> None:
    script = f"""
import os, signal
from mine import Greeting
from runner import ScriptedEngine, run

class Pressing(Greeting):
    def setup(self):
        if self.task.id == "t-0":
            os.kill(os.getpid(), signal.SIGINT)  # the console shows it

try:
    run(Pressing(), ScriptedEngine("hi"), quiet={quiet}, file="w.db")
except KeyboardInterrupt:
    os._exit(7)
"""
    assert without_reader(folder, "-c", script, both=True).returncode == 7
    with RunFile(folder / "w.db") as stored:
        assert set(stored.outcomes()) == {Outcome.COMPLETED}


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize(
    "arguments",
    [
        "show w.db",
        "show w.db t-0",
        "export w.db",
        "verify w.db",
        "verify w.db --json",
        "list",
        "check mine.py:Greeting",
        "check-template hermes",
        "check-template hermes --json",
    ],
)
def test_other_commands_end_as_unix_tools_do(folder: Path, played: Path, arguments: str) -> None:
    shutil.copy(played, folder)
    done = without_reader(folder, *command(*arguments.split()))
    assert (done.returncode, done.stderr) == (141, "")
