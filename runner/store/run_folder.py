"""The run files of a folder, such as `runs/calculator-001.db`, and the choice of the file to resume."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from runner.errors import RunFileError, StorageFailed
from runner.store.database import FileLock, storage_faults, tables_in
from runner.store.header import Header
from runner.store.reader import RunFile

__all__ = ["header_to_resume", "holds_run", "next_run_file", "run_files", "stored_header"]


def next_run_file(folder: Path, environment_name: str, header: Header, *, also_complete: bool = False) -> Path:
    """The newest incomplete file of the same configuration, or else a new file with the next number.

    Files that another process writes, or that cannot be read, are skipped. With `also_complete` complete files are
    chosen too.
    """
    numbered = list(run_files(folder, environment_name))
    for _, path in reversed(numbered):
        if _can_be_resumed(path, header, also_complete):
            return path
    last = numbered[-1][0] if numbered else 0
    return folder / f"{_stem(environment_name)}-{last + 1:03d}.db"


def header_to_resume(
    folder: Path, environment_name: str, header: Header, *, model: str, also_complete: bool = False
) -> Header | None:
    """The header of the file that `next_run_file` will choose, as far as is known before the engine runs.

    The result is None if a new file will be chosen.

    Args:
        folder: the folder of the run files.
        environment_name: the environment's name, such as `my_games.py:Chess`.
        header: the run's header; engines and template are taken from each file.
        model: the name of the engine's model.
        also_complete: True to choose complete files too.
    """
    for _, path in reversed(list(run_files(folder, environment_name))):
        stored = stored_header(path)
        if stored is None or stored.engine.get("model") != model:
            continue
        like_it = replace(header, engine=stored.engine, engines=stored.engines, template=stored.template)
        if _can_be_resumed(path, like_it, also_complete):
            return stored
    return None


def holds_run(path: Path) -> bool:
    """Return True if the file holds a run; False if it does not exist or is empty, as from `mktemp`.

    A folder counts as a file with a run, so that opening it raises the error.

    Raises:
        RunFileError: the file is not a database.
        StorageFailed: the file cannot be read.
    """
    if not path.is_file():
        return path.exists()
    with (
        storage_faults(path),
        closing(sqlite3.connect(f"file:{quote(os.path.abspath(path))}?mode=ro", uri=True)) as file,
    ):
        return tables_in(file)


def stored_header(path: Path) -> Header | None:
    """Return the header of a run file; None if it holds no run or cannot be read.

    A file that cannot be read raises no error here, but when a run opens it for writing.
    """
    try:
        if not holds_run(path):
            return None
        with RunFile(path) as run_file:
            return run_file.header
    except (RunFileError, StorageFailed):
        return None


def run_files(folder: Path, environment_name: str) -> Iterator[tuple[int, Path]]:
    """The numbered run files of an environment in a folder, in the order of their numbers."""
    name = re.compile(re.escape(_stem(environment_name)) + r"-(\d{3,})\.db")
    found = [(int(match[1]), path) for path in folder.glob("*.db") if (match := name.fullmatch(path.name))]
    yield from sorted(found)


def _stem(environment_name: str) -> str:
    """The short name of an environment for file names: `Chess` for `my_games.py:Chess`."""
    return re.sub(r"[^\w.-]+", "-", environment_name.rpartition(":")[2]).strip("-.") or "run"


def _can_be_resumed(path: Path, header: Header, also_complete: bool) -> bool:
    try:
        with RunFile(path) as run_file:
            left = also_complete or not run_file.complete
            return left and not run_file.header.refused(header) and not FileLock(path).is_held()
    except RunFileError:
        return False
