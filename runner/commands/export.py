"""`deltarunner export`: the trajectories of a run file in other formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.markup import escape

from runner.commands.report import make_console
from runner.errors import BadOption
from runner.store.export import export_jsonl, export_parquet
from runner.store.reader import RunFile

__all__ = ["export_command"]

_FORMATS: dict[str, Callable[[RunFile, Path], int]] = {"jsonl": export_jsonl, "parquet": export_parquet}


def export_command(file: Path, *, format: str, output: Path | None) -> int:
    write = _FORMATS.get(format)
    if write is None:
        raise BadOption(f"--format {format}: there are {' and '.join(_FORMATS)}.")
    target = output or file.with_suffix(f".{format}")
    with RunFile(file) as run_file:
        count = write(run_file, target)
    make_console().print(f"{escape(str(target))}: {count} trajectories", soft_wrap=True)
    return 0
