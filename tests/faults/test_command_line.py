"""Bad input and faults through the command line: one clear message with the fix, no traceback, a code of its own."""

from __future__ import annotations

import os
import resource
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

import pytest

from runner import Outcome, RunFile
from tests.repository import ROOT

WATCHDOG = 100.0
ENDS_WITHIN = 20.0  # ten times the promise

AUTHOR = '''
import contextlib, time
from runner import Environment, Limits, Task, reward

class Greeting(Environment):
    """Says hello."""
    def __init__(self, count: int = 8):
        self.count = count
    def tasks(self):
        return [Task(id=f"t-{n}", prompt="hello " * 100) for n in range(self.count)]
    @reward
    def polite(self):
        return self.episode.text == "hi"

class Rewardless(Environment):
    def tasks(self):
        return [Task(id="1", prompt="hello")]

class Nameless(Greeting):
    def tasks(self):
        return [Task(id="1", prompt="hello"), Task(id="", prompt="who am I?")]

class Twice(Greeting):
    def tasks(self):
        return [Task(id="1", prompt="hello"), Task(id="same", prompt="a"), Task(id="same", prompt="b")]

class Long(Greeting):
    def tasks(self):
        return [Task(id="endless", prompt="hello " * 1000)]

class OneLong(Greeting):
    def tasks(self):
        return [*super().tasks(), Task(id="endless", prompt="hello " * 1000)]

class Exploding(Greeting):
    def tasks(self):
        yield Task(id="1", prompt="hello")
        raise OSError("the dataset is gone")

class Disconnected(Greeting):
    @contextlib.contextmanager
    def lifespan(self):
        raise OSError("the database is gone")
        yield

class Hanging(Greeting):
    limits = Limits(setup_seconds=0.5)
    def setup(self):
        if self.task.id == "t-3":
            time.sleep(3600)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(AUTHOR)
    return tmp_path


def deltarunner(
    folder: Path, *arguments: str, engine: str = "scripted", before: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    module = "tests.faults.command" if engine == "scripted" else "runner.cli.app"
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=WATCHDOG,
        preexec_fn=before,
        check=False,
    )


def assert_one_message(done: subprocess.CompletedProcess[str], code: int, said: Iterable[str]) -> None:
    message = done.stderr
    assert done.returncode == code, message
    assert "Traceback" not in done.stdout + message
    assert message.count("deltarunner:") == 1, message
    for part in said:
        assert part in message
    assert len(message.splitlines()) <= 12, message


BAD_INPUT: dict[str, tuple[list[str], int, list[str]]] = {
    "unknown environment": (["calculater"], 3, ["no environment 'calculater'", "Did you mean 'calculator'?"]),
    "unknown file": (["nothing.py:Greeting"], 3, ["no file 'nothing.py'", "path.py:Class"]),
    "unknown class": (["mine.py:Greetings"], 3, ["Greetings is not there", "Greeting"]),
    "no reward": (["mine.py:Rewardless"], 3, ["Rewardless has no reward", "@reward"]),
    "a task without id": (["mine.py:Nameless"], 4, ["a task has no id", "'who am I?'", "unique"]),
    "duplicate ids": (["mine.py:Twice"], 4, ["task 3 has the id 'same'", "task 2", "an id of its own"]),
    "tasks that raise": (["mine.py:Exploding"], 4, ["the dataset is gone", "mine.py:"]),
    "a lifespan that raises": (["mine.py:Disconnected"], 3, ["lifespan() raised", "the database is gone", "mine.py:"]),
    "only over-long prompts": (["mine.py:Long"], 10, ["endless#0: 6019 ids do not fit the context of 2000"]),
    "an impossible limit": (["mine.py:Greeting", "--limit", "turns=0"], 2, ["turns=0", "1"]),
    "a limit that is no number": (["mine.py:Greeting", "--limit", "seconds=soon"], 2, ["seconds='soon'", "number"]),
    "an unknown limit": (["mine.py:Greeting", "--limit", "turn=3"], 2, ["no such limit", "Did you mean 'turns'?"]),
    "an unknown setting": (["mine.py:Greeting", "--set", "cuont=3"], 2, ["cuont", "Did you mean 'count'?"]),
    "an unknown template": (["mine.py:Greeting", "--template", "hermess"], 6, ["hermess", "hermes"]),
    "no task file": (["mine.py:Greeting", "--tasks", "none.jsonl"], 4, ["no task file 'none.jsonl'", "JSONL"]),
    "a folder that cannot be made": (["mine.py:Greeting", "--file", "mine.py/run.db"], 8, ["mine.py", "Name another"]),
    "a file that is no run file": (["mine.py:Greeting", "--file", "mine.py"], 7, ["mine.py", "not a SQLite database"]),
}


@pytest.mark.parametrize(("arguments", "code", "said"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_gets_one_clear_message_naming_the_thing_and_the_fix(
    folder: Path, arguments: list[str], code: int, said: list[str]
) -> None:
    done = deltarunner(folder, "run", *arguments)
    assert_one_message(done, code, said)
    assert (folder / "mine.py").read_text() == AUTHOR


def test_an_unknown_model_gets_one_clear_message(folder: Path) -> None:
    done = deltarunner(folder, "run", "mine.py:Greeting", "--model", "./no-such-folder", engine="real")
    assert_one_message(done, 5, ["no-such-folder", "smollm2-135m"])


def outcomes(file: Path) -> dict[Outcome, int]:
    with RunFile(file) as run_file:
        return run_file.outcomes()


def test_an_over_long_prompt_is_that_episode_alone_and_its_message_names_the_task(folder: Path) -> None:
    done = deltarunner(folder, "run", "mine.py:OneLong", "--file", "run.db")
    assert done.returncode == 0, done.stderr
    assert outcomes(folder / "run.db") == {Outcome.COMPLETED: 8, Outcome.CONTEXT_LIMIT: 1}
    with RunFile(folder / "run.db") as run_file:
        (long,) = run_file.rows(outcome=Outcome.CONTEXT_LIMIT)
        bad = run_file.trajectory(long)
    assert bad.reward is None
    assert bad.error == "endless#0: 6019 ids do not fit the context of 2000"


@pytest.mark.parametrize("what", ["another configuration", "a newer version"])
def test_a_run_file_that_does_not_fit_is_refused_and_left_as_it_is(folder: Path, what: str) -> None:
    file = folder / "run.db"
    assert deltarunner(folder, "run", "mine.py:Greeting", "--file", "run.db").returncode == 0
    seed, said = "1", ["seed: 0 -> 1", "--file"]
    if what == "a newer version":
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("PRAGMA user_version = 999")
        seed, said = "0", ["format is 999", "Upgrade it"]
    before = file.read_bytes()
    done = deltarunner(folder, "run", "mine.py:Greeting", "--file", "run.db", "--seed", seed)
    assert_one_message(done, 7, ["run.db", *said])
    assert file.read_bytes() == before


def test_a_disk_that_is_full_loses_nothing_and_the_same_command_goes_on(folder: Path) -> None:
    command = ["run", "mine.py:Greeting", "--set", "count=400", "--file", "run.db"]

    def use_up_the_quota() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    done = deltarunner(folder, *command, before=use_up_the_quota)
    assert_one_message(done, 8, ["run.db", "what was announced is in the file"])
    with RunFile(folder / "run.db") as run_file:
        kept = {row.id for row in run_file if not row.outcome.cut_short}
        assert 0 < len(kept) < 400
    again = deltarunner(folder, *command)
    assert again.returncode == 0, again.stderr
    assert outcomes(folder / "run.db") == {Outcome.COMPLETED: 400}


def test_a_read_only_folder_is_named_with_the_fix(folder: Path) -> None:
    done = deltarunner(folder, "run", "mine.py:Greeting", "--file", "/proc/deltarunner/run.db")
    assert_one_message(done, 8, ["/proc/deltarunner", "Name another"])


# --- ending


def test_the_process_ends_soon_after_its_last_episode_also_with_a_thread_that_hangs_for_an_hour(folder: Path) -> None:
    done = deltarunner(folder, "run", "mine.py:Hanging", "--file", "run.db")
    assert done.returncode == 0, done.stderr
    assert outcomes(folder / "run.db") == {Outcome.COMPLETED: 7, Outcome.ENV_ERROR: 1}
    written_last = (folder / "run.db").stat().st_mtime
    assert time.time() - written_last < ENDS_WITHIN
