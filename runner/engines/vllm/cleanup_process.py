"""Process that removes what the processes of an engine leave in the system when they are killed.

This file is run as a script and needs only Python. The process has its own session and is not a child of the engine's
process, since Ray kills all processes that a worker started, and stopping a job kills its process group.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Final

__all__ = ["FOLDER", "CleanupProcess", "is_alive", "process_name", "release", "shared_memory_of"]

FOLDER: Final = "DELTARUNNER_ENGINE_FOLDER"
"""Environment variable with the engine's private folder. Its value identifies the engine's processes."""

_FOLDER: Final = "/dev/shm/"
_SHARED_MEMORY: Final = (f"{_FOLDER}psm_", f"{_FOLDER}vllm_")  # name prefixes of Python, and of vLLM's CPU workers
_STATE, _STARTED = 0, 19  # indices of fields in /proc/<pid>/stat, counted after the name
_RUNS, _ENDED = b"r", b"e"  # messages to the cleanup process
_SCANNED = b"s"  # message from the cleanup process
_SECONDS: Final = 1.0  # seconds between two scans
_SCAN_SECONDS: Final = 10.0  # maximum wait for a scan; it takes milliseconds unless the machine is very busy
_ORPHAN_SECONDS: Final = 60.0  # maximum wait for orphans; they end within a second unless the machine is very busy


class CleanupProcess:
    """Process that removes the leftovers of an engine after the process that created this object has ended.

    The constructor starts the process. Blocks the thread.

    Args:
        folder: the engine's private folder.

    Raises:
        OSError: the process cannot be started.
        CalledProcessError: the process failed at its start.
    """

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-P", "-S", __file__, process_name(os.getpid()), str(folder)]
        read_end, write_end = os.pipe()
        self._pipe = os.fdopen(write_end, "wb", buffering=0)
        read_end_of_answers, write_end_of_answers = os.pipe()
        self._answers = os.fdopen(read_end_of_answers, "rb", buffering=0)
        with open(read_end, "rb") as stdin, open(write_end_of_answers, "wb") as stdout:
            # The started process forks and ends at once; its child is the cleanup process.
            subprocess.run(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
                check=True,
            )

    def engine_started(self) -> None:
        """Report that all processes of the engine run, and wait until the cleanup process has found them.

        Before this call, the cleanup process scans for new processes once a second. Blocks the thread for at most ten
        seconds.
        """
        self._send(_RUNS)
        answers = select.poll()  # `select.select` refuses the file descriptors of a process with many connections
        with suppress(ValueError):  # the cleanup process was dismissed
            answers.register(self._answers, select.POLLIN)
            answers.poll(1000 * _SCAN_SECONDS)  # also ends if the cleanup process was killed

    def dismiss(self) -> None:
        """End the cleanup process, since the engine has ended and left nothing; idempotent."""
        self._send(_ENDED)
        self._pipe.close()
        self._answers.close()

    def _send(self, word: bytes) -> None:
        with suppress(BrokenPipeError, ValueError):  # the cleanup process was killed or dismissed
            self._pipe.write(word)


def process_name(pid: int) -> str:
    """Return a name for a process, from its id and its start time, since ids are reused.

    Raises:
        OSError: the process does not exist.
    """
    return f"{pid}:{_stat(pid)[_STARTED]}"


def is_alive(name: str) -> bool:
    """Return whether the process of this name exists; a zombie does not count."""
    pid, _, started = name.partition(":")
    try:
        fields = _stat(int(pid))
    except OSError:
        return False
    return fields[_STARTED] == started and fields[_STATE] not in "ZX"


def _stat(pid: int) -> list[str]:
    # The process name may contain spaces and parentheses.
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _read(path: str) -> str:
    return os.fsdecode(Path(path).read_bytes())  # names may contain any bytes


def shared_memory_of(pid: int) -> set[str]:
    """Return the names of the shared memory of a process and its descendants; empty if the process is gone."""
    return {name for process in (pid, *_below(pid)) for name in _mapped(process)}


def _mapped(pid: int) -> Iterator[str]:
    with suppress(OSError):
        for line in _read(f"/proc/{pid}/maps").splitlines():
            # The line of unlinked memory ends with "(deleted)", so such memory is skipped.
            last = line.rpartition(" ")[2]
            if last.startswith(_SHARED_MEMORY):
                yield last.removeprefix(_FOLDER)


def _below(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                yield child
                yield from _below(child)


def release(names: Iterable[str]) -> None:
    """Free the shared memory of these names, which a killed process left.

    Otherwise Python's resource tracker frees it later, with a warning.
    """
    for name in names:
        with suppress(FileNotFoundError):
            memory = SharedMemory(name)
            memory.close()
            memory.unlink()


# --- in the cleanup process


def _run(owner: str, folder: str) -> None:
    processes, memory = set[str](), set[str]()
    starts = is_open = True
    while is_alive(owner):
        if starts:
            _scan(owner, folder, processes, memory)
        if not is_open:  # the owner closed the pipe, but may still run
            time.sleep(_SECONDS)
        elif select.select([0], [], [], _SECONDS)[0]:
            word = os.read(0, 1)
            if word == _ENDED:
                return
            if word == _RUNS:
                _scan(owner, folder, processes, memory)
                starts = False
                with suppress(BrokenPipeError):  # the owner just ended
                    os.write(1, _SCANNED)
            is_open = bool(word)
    give_up = time.monotonic() + _ORPHAN_SECONDS
    while any(map(is_alive, processes)) and time.monotonic() < give_up:
        time.sleep(_SECONDS)
    # Python's resource tracker warns if its entries are missing, so this process first lets the tracker free them.
    time.sleep(_SECONDS)
    # Other processes that the owner started during the engine's start have `FOLDER` too, so memory in use is kept.
    used = {name for process in Path("/proc").glob("[0-9]*") for name in _mapped(int(process.name))}
    for name in memory - used:
        Path(_FOLDER, name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _scan(owner: str, folder: str, processes: set[str], memory: set[str]) -> None:
    """Add the engine's processes to `processes`, and the shared memory that they use to `memory`."""
    mark = os.fsencode(f"{FOLDER}={folder}")
    for pid in _below(int(owner.partition(":")[0])):
        with suppress(OSError):  # the process just ended
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                processes.add(process_name(pid))
                memory.update(_mapped(pid))


if __name__ == "__main__":
    if os.fork() == 0:
        _run(*sys.argv[1:])
