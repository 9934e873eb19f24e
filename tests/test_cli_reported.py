"""The command line: faults that were reported, each with the promise that was broken."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from runner import RunFile, ScriptedEngine
from runner.cli import app
from runner.commands.run import RunSettings, run_command

AUTHOR = """
from runner import Environment, Task, reward

class Greeting(Environment):
    def tasks(self):
        return [Task(id=f"t-{n}", prompt="hello") for n in range(2)]

    @reward
    def polite(self):
        return self.episode.text == "hi"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder one stands in, with an author's file of environments."""
    (tmp_path / "mine.py").write_text(AUTHOR)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("mine", None)


@pytest.fixture
def run_file(folder: Path) -> Path:
    play(environment="mine.py:Greeting", file=Path("w.db"))
    return Path("w.db")


def play(**options: Any) -> int:
    return run_command(RunSettings(**options), lambda settings: ScriptedEngine("hi"))


def deltarunner(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


# --- export


@pytest.mark.parametrize("target", ["w.db", "w.db-wal", "w.db-shm", ".w.db.lock", "link.db", "other.db"])
@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_an_export_never_replaces_a_run_file(run_file: Path, target: str, format: str) -> None:
    os.link(run_file, "link.db")
    Path("other.db").write_bytes(run_file.read_bytes())
    before = {path: path.read_bytes() for path in Path().glob("*.db")}
    refused = deltarunner("export", str(run_file), "--format", format, "-o", target)
    assert (refused.exit_code, "would be lost" in refused.output) == (2, True), refused.output
    assert {path: path.read_bytes() for path in Path().glob("*.db")} == before
    with RunFile(run_file) as stored:
        assert len(stored) == 2


def test_an_export_replaces_only_what_was_named(run_file: Path) -> None:
    tasks = Path("w.jsonl")
    tasks.write_text("these are the tasks\n")
    refused = deltarunner("export", str(run_file))
    assert (refused.exit_code, "-o w.jsonl" in refused.output) == (2, True)
    assert tasks.read_text() == "these are the tasks\n"
    assert deltarunner("export", str(run_file), "-o", "w.jsonl").exit_code == 0
    assert len(tasks.read_text().splitlines()) == 2
