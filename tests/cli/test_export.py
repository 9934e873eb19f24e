"""`deltarunner export`: it replaces no run file, and no file that the command does not name."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from typer.testing import CliRunner, Result

from runner import RunFile, ScriptedEngine
from runner.cli.app import app
from runner.cli.run import run_command
from runner.cli.settings import RunSettings

pytestmark = pytest.mark.slow

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
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two episodes, in the current folder."""
    (tmp_path / "mine.py").write_text(AUTHOR)
    monkeypatch.chdir(tmp_path)
    run_command(RunSettings(environment="mine.py:Greeting", file=Path("w.db")), lambda settings: ScriptedEngine("hi"))
    return Path("w.db")


def deltarunner(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize("target", ["w.db", "w.db-wal", "w.db-shm", ".w.db.lock", "link.db", "other.db"])
@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_an_export_never_replaces_a_run_file(run_file: Path, target: str, format: str) -> None:
    os.link(run_file, "link.db")
    Path("other.db").write_bytes(run_file.read_bytes())
    before = {path: path.read_bytes() for path in Path().glob("*.db")}
    refused = deltarunner("export", str(run_file), "--format", format, "-o", target)
    assert (refused.exit_code, "would be overwritten" in refused.output) == (2, True), refused.output
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


def test_an_export_to_stdout_is_the_export_and_nothing_else(run_file: Path) -> None:
    command = [sys.executable, "-m", "runner.cli.app", "export", str(run_file), "-o", "-"]
    lines = subprocess.run(command, capture_output=True, check=True)
    assert lines.stderr == b""
    assert {json.loads(line)["id"] for line in lines.stdout.splitlines()} == {"t-0#0", "t-1#0"}
    table = subprocess.run([*command, "--format", "parquet"], capture_output=True, check=True)
    assert parquet.read_table(io.BytesIO(table.stdout)).column("id").to_pylist() == [
        json.loads(line)["id"] for line in lines.stdout.splitlines()
    ]
    assert not Path("-").exists()


def test_traces_of_openenv_are_exported_with_their_rewards(run_file: Path) -> None:
    done = deltarunner("export", str(run_file), "--format", "openenv")
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in Path("w.openenv.jsonl").read_text().splitlines()]
    # The order in which the episodes ended.
    assert sorted((line["id"], line["reward"], len(line["trace"]["turns"])) for line in lines) == [
        ("t-0#0", 1.0, 1),
        ("t-1#0", 1.0, 1),
    ]
    streamed = deltarunner("export", str(run_file), "--format", "openenv", "-o", "-")
    assert streamed.stdout == Path("w.openenv.jsonl").read_text()
