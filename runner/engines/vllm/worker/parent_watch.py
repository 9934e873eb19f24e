"""Runs inside every process of an engine: ends it when its parent is gone, and notes why it failed.

vLLM loads `watch_parent` by entry point into each of its processes, a user's own `vllm serve` too. So it does nothing
unless the variables are there that our engine sets while it starts its processes. It is called twice: as a platform
plugin, which vLLM loads first of all, and as a general one, when logging is set up.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

from runner.engines.vllm.cleanup_process import FOLDER, is_alive, process_name
from runner.engines.vllm.worker.start_phases import note_phases

__all__ = [
    "ENTRY_POINT",
    "FAILURES",
    "PARENT",
    "note_failure",
    "own_process_name",
    "rank_named",
    "read_failure",
    "started_by_engine",
    "watch_parent",
]

ENTRY_POINT = "deltarunner_parent_watch"
"""The name under which vLLM knows `watch_parent`."""

PARENT = "DELTARUNNER_ENGINE_PARENT"
"""The variable that names the parent: its process id and when it started, since ids are used again."""

FAILURES = "DELTARUNNER_ENGINE_FAILURES"
"""The variable that names the file where a process of the engine notes what it died of."""

_RANK = "DELTARUNNER_ENGINE_RANK"  # set by an engine core for its workers, whose names are the same in all ranks
_SECONDS = 1.0  # from one look whether the parent is there to the next
_THREAD = "deltarunner-orphan-watch"
_FATAL = ("WorkerProc", "EngineCore")  # how vLLM's words begin when a process of its fails


def own_process_name() -> str:
    """This process for the variable `PARENT`."""
    return process_name(os.getpid())


def started_by_engine() -> bool:
    """Whether an engine of ours started this process."""
    return os.environ.get(PARENT) not in (None, own_process_name())


def watch_parent() -> None:
    """Start to watch, in a process that an engine of ours started; nothing anywhere else.

    Returns None, by which a platform plugin says that its platform is not there.
    """
    parent = os.environ.get(PARENT)
    if parent is None or not started_by_engine():
        return
    rank = rank_named(multiprocessing.current_process().name)
    if rank is not None:
        os.environ[_RANK] = str(rank)
    if _THREAD not in (thread.name for thread in threading.enumerate()):
        threading.Thread(target=_exit_without, args=(parent,), name=_THREAD, daemon=True).start()
    folder = os.environ.get(FOLDER)
    _meet_in(folder)
    if folder is not None:
        note_phases(Path(folder) / "phase")
    logger = logging.getLogger("vllm")
    path = os.environ.get(FAILURES)
    if path and not any(isinstance(handler, _FailureLogHandler) for handler in logger.handlers):
        logger.addHandler(_FailureLogHandler(path))


def _meet_in(folder: str | None) -> None:
    """Let the file by which the workers of a core find one another lie in the engine's folder too."""
    network = sys.modules.get("vllm.utils.network_utils")  # it is there by the second call, and used later
    if folder is not None and hasattr(network, "tempfile"):
        vars(network)["tempfile"] = SimpleNamespace(gettempdir=lambda: folder)


def _exit_without(parent: str) -> None:
    while is_alive(parent):
        time.sleep(_SECONDS)
    os._exit(1)


class _FailureLogHandler(logging.Handler):
    """Appends the exception a process dies of to a file, a line each; the first is the root cause."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or not record.getMessage().startswith(_FATAL):
            return
        rank = os.environ.get(_RANK)
        where = "" if rank is None else f"in data-parallel rank {rank}: "
        note_failure(Path(self._path), f"{where}{type(error).__name__}: {error}")


def rank_named(process: str) -> int | None:
    """The data-parallel rank whose core a process is, by its name; None where there is one rank only."""
    found = re.fullmatch(r"EngineCore_DP(\d+)", process)
    return int(found[1]) if found else None


def note_failure(path: Path, text: str) -> None:
    """Append what a process of the engine dies of, a line each; nothing once the engine's folder is gone."""
    with suppress(FileNotFoundError), path.open("a", encoding="utf-8") as file:
        file.write(" ".join(text.split()) + "\n")


def read_failure(path: Path) -> str | None:
    """What a process of the engine died of first, in one line, or None."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return lines[0] if lines else None
