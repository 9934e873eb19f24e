"""Run files of other formats: every command refuses them with their number, and leaves them unchanged."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import anyio
import pytest
from typer.testing import CliRunner

from runner.cli.app import app
from runner.errors import NewerRunFile, RunFileError
from runner.store.reader import RunFile
from runner.store.run_folder import next_run_file
from runner.store.schema import FORMAT_VERSION
from runner.testing import ScriptedEngine
from tests.store.building import header, played
from tests.store.claiming import claims
from tests.store.test_reader import write

OLDER = [*range(1, FORMAT_VERSION)]
COMMANDS = [["show"], ["show", "a"], ["verify"], ["export"], ["run", "calculator", "--file"]]
OPENERS: list[Callable[[Path], object]] = [
    RunFile,
    lambda path: anyio.run(claims, path),
    lambda path: anyio.run(speak, path),
]


async def speak(path: Path) -> None:
    async with ScriptedEngine(path):
        pass


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "sums-001.db"
    write(path, [played("a")])
    return path


def renumber(path: Path, version: int) -> bytes:
    """Set another format number in the file, and return its bytes."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    return path.read_bytes()


@pytest.mark.parametrize("version", OLDER)
@pytest.mark.parametrize("opened", OPENERS, ids=["read", "written", "spoken"])
def test_older_format_is_refused_with_its_number_and_the_fix(
    path: Path, version: int, opened: Callable[[Path], object]
) -> None:
    before = renumber(path, version)
    with pytest.raises(RunFileError) as refused:
        opened(path)
    message = str(refused.value)
    assert message.startswith(
        f"run file {path}: its format is {version}, and this deltarunner reads only format {FORMAT_VERSION}"
    )
    assert "play the run again" in message
    assert not isinstance(refused.value, NewerRunFile)
    assert path.read_bytes() == before


@pytest.mark.parametrize("opened", OPENERS[:2], ids=["read", "written"])
def test_newer_format_is_refused_with_its_number_and_the_fix(path: Path, opened: Callable[[Path], object]) -> None:
    before = renumber(path, FORMAT_VERSION + 1)
    with pytest.raises(
        NewerRunFile, match=rf"format is {FORMAT_VERSION + 1}.*format {FORMAT_VERSION}\..*pip install -U deltarunner"
    ):
        opened(path)
    assert path.read_bytes() == before


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("version", [*OLDER, FORMAT_VERSION + 1])
def test_every_command_refuses_other_formats_with_exit_code_7(path: Path, command: list[str], version: int) -> None:
    before = renumber(path, version)
    name, *rest = command
    arguments = [name, *rest, str(path)] if name == "run" else [name, str(path), *rest]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 7, result.output
    assert f"its format is {version}" in result.stderr
    assert path.read_bytes() == before


@pytest.mark.parametrize("version", OLDER)
def test_search_for_a_file_skips_older_formats(path: Path, version: int) -> None:
    assert next_run_file(path.parent, "sums", header()) == path
    renumber(path, version)
    assert next_run_file(path.parent, "sums", header()).name == "sums-002.db"
