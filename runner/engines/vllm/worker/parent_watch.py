"""Watch in every process of an engine: it ends the process after the parent has ended, and records fatal errors.

vLLM loads `watch_parent` by entry point into each of its processes, also into the processes of a user's `vllm serve`.
So `watch_parent` does nothing without the environment variables that our engine sets for its processes. vLLM calls it
twice: as a platform plugin, which vLLM loads first, and as a general plugin, after logging is set up.
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
from runner.engines.vllm.worker.start_phases import patch_start_phases

__all__ = [
    "ENTRY_POINT",
    "FAILURES",
    "PARENT",
    "note_failure",
    "own_process_name",
    "patch_file_store",
    "rank_named",
    "read_failure",
    "started_by_engine",
    "watch_parent",
]

ENTRY_POINT = "deltarunner_parent_watch"

PARENT = "DELTARUNNER_ENGINE_PARENT"
"""Environment variable with the parent's process id and start time, since ids are reused."""

FAILURES = "DELTARUNNER_ENGINE_FAILURES"
"""Environment variable with the file in which processes of the engine write their fatal errors."""

_RANK = "DELTARUNNER_ENGINE_RANK"  # set by an engine core for its workers, whose names do not differ between ranks
_SECONDS = 1.0  # seconds between checks for the parent
_THREAD = "deltarunner-orphan-watch"
_FATAL = ("WorkerProc", "EngineCore")  # beginnings of vLLM's log messages for a failed process


def own_process_name() -> str:
    """Return the value of `PARENT` for this process."""
    return process_name(os.getpid())


def started_by_engine() -> bool:
    """Return whether our engine started this process."""
    return os.environ.get(PARENT) not in (None, own_process_name())


def watch_parent() -> None:
    """Start the watch in a process that our engine started; do nothing in any other process.

    The result is None, by which a platform plugin reports that its platform is absent.
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
    if folder is not None:
        patch_file_store(folder)
        patch_start_phases(Path(folder) / "phase")
    logger = logging.getLogger("vllm")
    path = os.environ.get(FAILURES)
    if path and not any(isinstance(handler, _FailureLogHandler) for handler in logger.handlers):
        logger.addHandler(_FailureLogHandler(path))


def patch_file_store(folder: str) -> None:
    """Patch this process, so that the file through which the workers of a core connect is in the engine's folder."""
    # At the first call of `watch_parent`, vLLM may not have imported this module yet. vLLM first uses it after the
    # second call.
    network = sys.modules.get("vllm.utils.network_utils")
    if hasattr(network, "tempfile"):
        vars(network)["tempfile"] = SimpleNamespace(gettempdir=lambda: folder)


def _exit_without(parent: str) -> None:
    while is_alive(parent):
        time.sleep(_SECONDS)
    os._exit(1)


class _FailureLogHandler(logging.Handler):
    """Log handler that appends each fatal exception of this process to a file, as one line.

    All processes of the engine share the file; its first line has the root cause.
    """

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
    """Return the data-parallel rank in the name of an engine core's process; None if the name has no rank."""
    found = re.fullmatch(r"EngineCore_DP(\d+)", process)
    return int(found[1]) if found else None


def note_failure(path: Path, text: str) -> None:
    """Append a fatal error as one line; do nothing after the engine's folder was removed."""
    with suppress(FileNotFoundError), path.open("a", encoding="utf-8") as file:
        file.write(" ".join(text.split()) + "\n")


def read_failure(path: Path) -> str | None:
    """Return the first fatal error of the engine's processes, in one line; None if they wrote no error."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return lines[0] if lines else None
