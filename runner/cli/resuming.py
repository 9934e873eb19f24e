"""Whether a named run file can be gone on with, as far as that is known before an engine is started."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from runner.environment.environment import Environment
from runner.runs.describe import describe_configuration
from runner.runs.options import RunOptions
from runner.store.database import storage_faults, tables_in
from runner.store.reader import RunFile

__all__ = ["check_resumable", "is_begun"]


def is_begun(path: Path) -> bool:
    """The file holds a run; one that is not there, or that is empty as `mktemp` makes it, can be begun.

    Raises:
        RunFileError: it is no run file.
        StorageFailed: it cannot be read.
    """
    if not path.is_file():
        return path.exists()
    with (
        storage_faults(path),
        closing(sqlite3.connect(f"file:{quote(os.path.abspath(path))}?mode=ro", uri=True)) as file,
    ):
        return tables_in(file)


def check_resumable(path: Path, environment: Environment[Any], options: RunOptions, *, model: str) -> None:
    """Compare a file with the run that is to go on with it, in all but what only a running engine can say.

    Args:
        path: the file; one that is not begun can be.
        environment: what is to be played.
        options: the run's options.
        model: what is to speak.

    Raises:
        ConfigurationChanged: the file holds a run of another configuration; the message lists what differs.
        RunFileError: it is no run file.
    """
    if not is_begun(path):
        return
    with RunFile(path) as run_file:
        stored = run_file.header
    given = describe_configuration(environment, options, now=datetime.now().astimezone())
    # A scripted engine has no model.
    engine = {**stored.engine, "model": model} if stored.engine.get("kind") == "vllm" else stored.engine
    stored.check_same(replace(given, engine=engine, engines=stored.engines, template=stored.template), path)
