"""`deltarunner export`: write the trajectories of a run file in other formats."""

from __future__ import annotations

import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from rich.markup import escape

from runner.cli.report import make_console
from runner.errors import BadOption
from runner.quantities import counted
from runner.store.export import Exporter, export_jsonl, export_parquet
from runner.store.reader import RunFile
from runner.store.trajectory_filter import TrajectoryFilter
from runner.trainers.openenv import export_openenv

__all__ = ["check_target", "export_command"]

_FORMATS: dict[str, Exporter] = {"jsonl": export_jsonl, "parquet": export_parquet, "openenv": export_openenv}
_ENDINGS = {"openenv": ".openenv.jsonl"}
_STDOUT = Path("-")
_DATABASE = b"SQLite format 3"


def export_command(file: Path, *, format: str, output: Path | None, chosen: TrajectoryFilter) -> int:
    """Write the chosen trajectories next to the run file or to `output` (`-` is stdout); return the exit code.

    Raises:
        BadOption: the format is unknown, the file has no token ids, a chosen agent or task is not in the file, or the
            target must not be replaced.
        BadBatch: OpenEnv's format needs ids and log-probabilities that a turn does not have.
        StorageFailed: the target cannot be written.
    """
    write = _FORMATS.get(format)
    if write is None:
        raise BadOption(f"--format {format}: give {' or '.join(_FORMATS)}.")
    with RunFile(file) as run_file:
        if not len(run_file) and not run_file.header.has_ids("main"):
            raise BadOption(
                f"{file} has only trajectories from chat APIs, without token ids: there is nothing to train on. "
                "Use `deltarunner show` or RunFile.rows(trained=None)."
            )
        if output == _STDOUT:
            _to_stdout(run_file, write, chosen)
            return 0
        target = output or file.with_suffix(_ENDINGS.get(format, f".{format}"))
        check_target(file, target, named=output is not None)
        count = write(run_file, target, chosen=chosen)
    make_console().print(f"{escape(str(target))}: {counted(count, 'trajectory')}", soft_wrap=True)
    return 0


def _to_stdout(run_file: RunFile, write: Exporter, chosen: TrajectoryFilter) -> None:
    if write is not export_parquet:
        write(run_file, sys.stdout.buffer, chosen=chosen)
        return
    with tempfile.TemporaryDirectory(prefix="deltarunner-") as folder:  # Parquet needs a seekable file
        whole = Path(folder, "export")
        write(run_file, whole, chosen=chosen)
        with whole.open("rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)


def check_target(file: Path, target: Path, *, named: bool) -> None:
    """Raise BadOption if `target` is a run file or a part of one, or exists and was not `named` by the user."""
    own = file.resolve()
    beside = (f"{own.name}-wal", f"{own.name}-shm", f".{own.name}.lock")
    if target.resolve() in (own, *map(own.with_name, beside)) or _is_database(target):
        raise BadOption(f"{target} is a run file or part of one, and would be overwritten. Give another path (-o).")
    if target.exists() and not named:
        raise BadOption(f"{target} exists. To replace it, give -o {target}.")


def _is_database(path: Path) -> bool:
    with suppress(OSError):  # a target that cannot be opened raises its error later, when it is written
        if path.is_file():
            with path.open("rb") as opened:
                return opened.read(len(_DATABASE)) == _DATABASE
    return False
