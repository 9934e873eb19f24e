"""Bad input and faults on the command line: one clear message with the fix, no traceback, its own exit code."""

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
from tests.faults.command import AUTHOR
from tests.repository import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.sample_functions(2)]

WATCHDOG_SECONDS = 600.0
MAX_END_SECONDS = 20.0  # ten times the promised time


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
        timeout=WATCHDOG_SECONDS,
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


EXIT_CODES: dict[str, tuple[str, list[str], int, list[str]]] = {
    "bad input": (
        "scripted",
        ["run", "calculater"],
        3,
        ["nknown environment 'calculater'", "Did you mean 'calculator'?"],
    ),
    "failures": (
        "scripted",
        ["run", "mine.py:Long"],
        10,
        ["endless#0: 6019 ids leave no room for a turn in the context of 2000"],
    ),
    "no model": ("real", ["run", "mine.py:Greeting", "--model", "./nowhere"], 5, ["nowhere", "smollm2-135m"]),
}


@pytest.mark.parametrize(("engine", "arguments", "code", "said"), EXIT_CODES.values(), ids=EXIT_CODES)
def test_the_process_ends_with_one_clear_message_and_its_code(
    folder: Path, engine: str, arguments: list[str], code: int, said: list[str]
) -> None:
    done = deltarunner(folder, *arguments, engine=engine)
    assert_one_message(done, code, said)


def outcomes(file: Path) -> dict[Outcome, int]:
    with RunFile(file) as run_file:
        return run_file.outcomes()


def test_overlong_prompt_fails_alone_and_names_the_task(folder: Path) -> None:
    done = deltarunner(folder, "run", "mine.py:OneLong", "--file", "run.db")
    assert done.returncode == 0, done.stderr
    assert outcomes(folder / "run.db") == {Outcome.COMPLETED: 8, Outcome.CONTEXT_LIMIT: 1}
    with RunFile(folder / "run.db") as run_file:
        (long,) = run_file.rows(outcome=Outcome.CONTEXT_LIMIT)
        bad = run_file.trajectory(long)
    assert bad.reward is None
    assert bad.error == "endless#0: 6019 ids leave no room for a turn in the context of 2000"


@pytest.mark.parametrize("what", ["another configuration", pytest.param("a newer version", marks=pytest.mark.whole)])
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


def test_full_disk_loses_nothing_and_the_same_command_continues(folder: Path) -> None:
    command = ["run", "mine.py:Greeting", "--set", "count=400", "--file", "run.db"]

    def use_up_the_quota() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    done = deltarunner(folder, *command, before=use_up_the_quota)
    assert_one_message(done, 8, ["run.db", "episodes reported as finished are in the file"])
    with RunFile(folder / "run.db") as run_file:
        kept = {row.id for row in run_file if not row.outcome.cut_short}
        assert 0 < len(kept) < 400
    again = deltarunner(folder, *command)
    assert again.returncode == 0, again.stderr
    assert outcomes(folder / "run.db") == {Outcome.COMPLETED: 400}


# --- ending


def test_process_ends_soon_despite_a_thread_that_hangs(folder: Path) -> None:
    done = deltarunner(folder, "run", "mine.py:Hanging", "--file", "run.db")
    assert done.returncode == 0, done.stderr
    assert outcomes(folder / "run.db") == {Outcome.COMPLETED: 7, Outcome.ENV_ERROR: 1}
    written_last = (folder / "run.db").stat().st_mtime
    assert time.time() - written_last < MAX_END_SECONDS
