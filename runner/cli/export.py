"""`deltarunner export`: the trajectories of a run file in other formats."""

from __future__ import annotations

import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from rich.markup import escape

from runner.cli.report import make_console
from runner.errors import BadOption
from runner.store.export import Exporter, export_jsonl, export_parquet
from runner.store.reader import RunFile
from runner.store.trajectory_filter import TrajectoryFilter

__all__ = ["export_command"]

_FORMATS: dict[str, Exporter] = {"jsonl": export_jsonl, "parquet": export_parquet}
_STDOUT = Path("-")
_DATABASE = b"SQLite format 3"


def export_command(file: Path, *, format: str, output: Path | None, chosen: TrajectoryFilter) -> int:
    """Write what is chosen beside the run file, or to `output` (`-` is stdout), and return the exit code."""
    write = _FORMATS.get(format)
    if write is None:
        raise BadOption(f"--format {format}: there are {' and '.join(_FORMATS)}.")
    with RunFile(file) as run_file:
        if not len(run_file) and not run_file.header.has_ids("main"):
            raise BadOption(
                f"{file} holds what servers of messages said, without token ids: there is nothing to train on. "
                "`deltarunner show` and RunFile.rows(trained=None) have it."
            )
        if output == _STDOUT:
            _to_stdout(run_file, write, chosen)
            return 0
        target = output or file.with_suffix(f".{format}")
        _check_target(file, target, named=output is not None)
        count = write(run_file, target, chosen=chosen)
    make_console().print(f"{escape(str(target))}: {count} trajectories", soft_wrap=True)
    return 0


def _to_stdout(run_file: RunFile, write: Exporter, chosen: TrajectoryFilter) -> None:
    if write is export_jsonl:
        export_jsonl(run_file, sys.stdout.buffer, chosen=chosen)
        return
    with tempfile.TemporaryDirectory(prefix="deltarunner-") as folder:  # Parquet is written to a file, and whole
        whole = Path(folder, "export")
        write(run_file, whole, chosen=chosen)
        with whole.open("rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)


def _check_target(file: Path, target: Path, *, named: bool) -> None:
    """Refuse to replace a run file, or what belongs to it, or anything that nobody named."""
    own = file.resolve()
    beside = (f"{own.name}-wal", f"{own.name}-shm", f".{own.name}.lock")
    if target.resolve() in (own, *map(own.with_name, beside)) or _is_database(target):
        raise BadOption(f"-o {target} is a run file, or belongs to one, and would be lost. Give another path (-o).")
    if target.exists() and not named:
        raise BadOption(f"{target} is there already and may be something else. To replace it give -o {target}.")


def _is_database(path: Path) -> bool:
    with suppress(OSError):  # whether it can be replaced is found out in writing
        if path.is_file():
            with path.open("rb") as opened:
                return opened.read(len(_DATABASE)) == _DATABASE
    return False
