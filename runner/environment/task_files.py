"""Tasks in JSONL files: one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from runner.errors import BadTask
from runner.tasks import Task, TaskBuilder

__all__ = ["read_numbered_tasks", "read_tasks"]

_BOM: Final = b"\xef\xbb\xbf"
"""The byte order mark that some editors put at the beginning of a file."""

_OTHER_FORMATS: Final = (
    (b"\xff\xfe", "it is UTF-16: save it as UTF-8"),
    (b"\xfe\xff", "it is UTF-16: save it as UTF-8"),
    (b"\x1f\x8b", "it is compressed: unpack it with gunzip"),
    (b"\x28\xb5\x2f\xfd", "it is compressed: unpack it with zstd -d"),
    (b"PAR1", "it is Parquet: write its rows as JSONL"),
    (b"SQLite format 3", "it is a SQLite database: give the tasks as JSONL"),
)
"""First bytes of files in other formats, each with the name of the format and the fix."""


def read_tasks(path: Path, task_class: type[Task] = Task) -> Iterator[Task]:
    """Return the tasks of a JSONL file, which are read as they are needed.

    Raises:
        BadTask: the path is not an existing file, or a line is not an object, lacks a field or has unknown keys. The
            message names the file, and the line.
    """
    return (task for _, task in read_numbered_tasks(path, task_class))


def read_numbered_tasks(path: Path, task_class: type[Task] = Task) -> Iterator[tuple[int, Task]]:
    """Return the tasks of a JSONL file with their line numbers, from 1.

    Raises:
        BadTask: the path is not an existing file, or, during the iteration, a line is invalid.
    """
    if path.is_dir():
        raise BadTask(f"{str(path)!r} is a folder; give the path of a JSONL file with one task per line.")
    if not path.is_file():
        raise BadTask(f"{str(path)!r} is not an existing file; give a JSONL file with one task per line.")
    return _read_lines(path, task_class)


def _read_lines(path: Path, task_class: type[Task]) -> Iterator[tuple[int, Task]]:
    build = TaskBuilder(task_class)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1:
                    line = _without_bom(line, path)
                if line.strip():
                    yield number, _task_of(line, build, f"{path}:{number}")
    except OSError as error:
        raise BadTask(
            f"the task file {str(path)!r} cannot be read ({error.strerror or error}): give a readable file."
        ) from error


def _without_bom(line: bytes, path: Path) -> bytes:
    for beginning, fix in _OTHER_FORMATS:
        if line.startswith(beginning):
            raise BadTask(f"{path}:1: this is not a JSONL file in UTF-8; {fix}.")
    return line.removeprefix(_BOM)


def _task_of(line: bytes, build: TaskBuilder, where: str) -> Task:
    try:
        # orjson is not used, since it rounds integers of more than 64 bits.
        fields = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise BadTask(f"{where}: not UTF-8 (byte {error.start + 1} of the line): save the file as UTF-8.") from error
    except (ValueError, RecursionError) as error:
        begun = line.strip() in (b"[", b"{") or line.strip().startswith(b"[")
        fix = " Write each task on its own line, without a list around them." if begun else " Correct this line."
        raise BadTask(f"{where}: not JSON ({error}).{fix}") from error
    if not isinstance(fields, dict):
        fix = "; write each task on its own line, without a list around them" if isinstance(fields, list) else ""
        raise BadTask(f"{where}: a task is a JSON object, got {type(fields).__name__}{fix}.")
    unknown = sorted(set(fields) - build.known)
    if unknown:
        name = build.task_class.__name__
        raise BadTask(
            f"{where}: unknown field {', '.join(map(repr, unknown))}: put it under 'info', or give {name} a field of "
            f"that name (class Case(Task) with Environment[Case]). {name} has {', '.join(sorted(build.known))}."
        )
    missing = [name for name in build.needed if name not in fields]
    if missing:
        named = ", ".join(map(repr, missing))
        example = f"{{{', '.join(f'{json.dumps(name)}: ...' for name in build.needed)}}}"
        raise BadTask(f"{where}: {named} is missing: each line needs at least {example}.")
    try:
        return build(fields)
    except (TypeError, ValueError) as error:
        raise BadTask(f"{where}: {error}.") from error
