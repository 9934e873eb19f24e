"""The run files of a folder, `runs/calculator-001.db` and so on, and which of them a command goes on with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from runner.errors import RunFileError
from runner.store.database import FileLock
from runner.store.header import Header
from runner.store.reader import RunFile

__all__ = ["next_run_file", "run_files"]


def next_run_file(folder: Path, environment_name: str, header: Header, *, also_complete: bool = False) -> Path:
    """The newest file of the same configuration whose run is not complete, or else a new file with the next number.

    A file that another process is writing, or that cannot be read, is passed over. With `also_complete` the newest file
    of the configuration is taken, whether its run is complete or not.
    """
    numbered = list(run_files(folder, environment_name))
    for _, path in reversed(numbered):
        if _can_be_resumed(path, header, also_complete):
            return path
    last = numbered[-1][0] if numbered else 0
    return folder / f"{_stem(environment_name)}-{last + 1:03d}.db"


def run_files(folder: Path, environment_name: str) -> Iterator[tuple[int, Path]]:
    """The numbered run files of an environment in a folder, oldest first."""
    name = re.compile(re.escape(_stem(environment_name)) + r"-(\d{3,})\.db")
    found = [(int(match[1]), path) for path in folder.glob("*.db") if (match := name.fullmatch(path.name))]
    yield from sorted(found)


def _stem(environment_name: str) -> str:
    """`my_games.py:Chess` becomes `Chess`: a file name that says what was played."""
    return re.sub(r"[^\w.-]+", "-", environment_name.rpartition(":")[2]).strip("-.") or "run"


def _can_be_resumed(path: Path, header: Header, also_complete: bool) -> bool:
    try:
        with RunFile(path) as run_file:
            left = also_complete or not run_file.complete
            return left and not run_file.header.refused(header) and not FileLock(path).held()
    except RunFileError:
        return False
