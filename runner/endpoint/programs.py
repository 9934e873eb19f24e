"""Agent programs in process groups of their own, and the end of all processes that a program started."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Final

import anyio

from runner.concurrency.child_processes import child_ended
from runner.errors import BadOption, ProgramFailed

__all__ = [
    "MAX_OUTPUT_BYTES",
    "PROGRAM_ID_VARIABLE",
    "FinishedProgram",
    "program_environ",
    "program_variables",
    "run_program",
    "write_files",
]

PROGRAM_ID_VARIABLE: Final = "DELTARUNNER_PROGRAM"
"""Variable that identifies the processes of a program, even those that left its process group."""

MAX_OUTPUT_BYTES: Final = 64 * 1024
"""Number of bytes that are kept from the end of a program's standard output, and of its standard error."""

TERMINATE_GRACE_SECONDS: Final = 2.0
"""Time between SIGTERM and SIGKILL for a program."""

OUTPUT_DRAIN_SECONDS: Final = 1.0
"""Time to read the rest of the output after a program has ended."""

_KEPT: Final = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_OPTIONS")
"""The only variables of this process that a program receives."""

TEMPORARY_FOLDER: Final = "tmp"
"""The folder of temporary files in a program's home."""

_TEMPORARY: Final = ("TMPDIR", "TMP", "TEMP")
"""Variables for the folder of temporary files. Programs differ in which one they read first."""


@dataclass(frozen=True, slots=True)
class FinishedProgram:
    """A program that has ended."""

    argv: Sequence[str]
    """The command."""
    returncode: int
    """Exit code; -N if signal N ended the program."""
    stdout: str
    """Last 64 KiB of the program's standard output."""
    stderr: str
    """Last 64 KiB of the program's standard error."""

    @property
    def ok(self) -> bool:
        """True if the exit code is 0."""
        return self.returncode == 0

    def failure(self) -> ProgramFailed:
        """Return an error with the exit code and the last lines of output."""
        ended = f"code {self.returncode}" if self.returncode >= 0 else signal.Signals(-self.returncode).name
        last = (self.stderr.strip() or self.stdout.strip() or "it printed nothing").splitlines()[-8:]
        return ProgramFailed(f"{self.argv[0]} ended with {ended}: " + "\n".join(last))


def write_files(home: Path, files: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write a program's files, by their paths relative to `home`, and create a folder for temporary files."""
    _temporary(home).mkdir()
    for path, text in files.items():
        file = home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def program_environ(home: Path, further: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Return the whole environment of a program: some variables of this process, its home, and further variables.

    Temporary files are in the home and are removed with it, unless a further variable sets another folder.
    """
    own = {name: os.environ[name] for name in _KEPT if name in os.environ}
    home_variables = program_variables(str(home))
    if any(name in further for name in _TEMPORARY):
        home_variables = {name: value for name, value in home_variables.items() if name not in _TEMPORARY}
    return {**own, **home_variables, **further}


def program_variables(home: str) -> dict[str, str]:
    """Return the variables that are set for every program: home, type of terminal, and folder of temporary files."""
    # Programs compiled by Bun leave megabytes in the folder of temporary files at each start.
    return {"HOME": home, "TERM": "dumb", **dict.fromkeys(_TEMPORARY, f"{home}/{TEMPORARY_FOLDER}")}


def _temporary(home: Path) -> Path:
    return home / TEMPORARY_FOLDER


class RunningProgram:
    """A program that was started, and the last part of its outputs."""

    def __init__(self, argv: Sequence[str], process: subprocess.Popen[bytes], mark: str) -> None:
        self._argv = argv
        self._process = process
        self._mark = mark
        self._stdout, self._stderr = _OutputTail(), _OutputTail()

    async def wait(self) -> FinishedProgram:
        """Wait until the program has ended, then end the processes that it left."""
        async with anyio.create_task_group() as readers:
            for stream, tail in ((self._process.stdout, self._stdout), (self._process.stderr, self._stderr)):
                assert stream is not None
                readers.start_soon(tail.read, stream)
            await child_ended(self._process.pid)
            # Processes that the program started may keep its outputs open forever.
            readers.cancel_scope.deadline = anyio.current_time() + OUTPUT_DRAIN_SECONDS
            await self._end_rest()
        return FinishedProgram(self._argv, self._process.returncode, self._stdout.text(), self._stderr.text())

    async def end(self) -> None:
        """End the program and all processes that it started: SIGTERM first, then SIGKILL."""
        if self._process.returncode is None:
            if _signal_group(self._process.pid, signal.SIGTERM):
                with anyio.move_on_after(TERMINATE_GRACE_SECONDS):
                    await child_ended(self._process.pid)
            await self._end_rest()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    async def _end_rest(self) -> None:
        _signal_group(self._process.pid, signal.SIGKILL)
        with anyio.move_on_after(TERMINATE_GRACE_SECONDS):
            # This repeats until no process is left, since an undetected process may have started another one.
            while await anyio.to_thread.run_sync(_kill_marked, self._mark):
                pass
        await child_ended(self._process.pid)
        # This is the last step: after it, another process may have the program's process id, and so its group id.
        self._process.wait()


@asynccontextmanager
async def run_program(
    argv: Sequence[str | os.PathLike[str]], *, cwd: str | os.PathLike[str] | None, env: Mapping[str, str]
) -> AsyncIterator[RunningProgram]:
    """Start a program, and end the program and all processes that it started when the block is left.

    Args:
        argv: the command. A name is looked up on PATH. A relative path is looked up in `cwd`, and then in the working
            folder of this process.
        cwd: the working folder of the program; None for the working folder of this process.
        env: the whole environment of the program.

    Raises:
        BadOption: the program or the folder does not exist, or the system rejects the command.
    """
    for each in argv:
        if not isinstance(each, str | os.PathLike):
            raise BadOption(f"run({argv!r:.80}): give a list of strings, not of {type(each).__name__}.")
    given = [os.fspath(each) for each in argv]
    if cwd is not None and not await anyio.Path(cwd).is_dir():
        raise BadOption(
            f"run({given[:1]!r:.80}): cwd={os.fspath(cwd)!r} is not an existing folder: create it, or give another."
        )
    found = _found(given[0], cwd, env) if given else None
    if found is None:
        raise BadOption(
            f"run({given!r:.80}): {given[0] if given else ''!r} is neither a program on PATH nor the path of a "
            "program: install it, or give its path."
        )
    mark = secrets.token_hex(16)
    try:
        process = _started([found, *given[1:]], cwd, {**env, PROGRAM_ID_VARIABLE: mark})
    # Possible causes are an argument of 128 KiB or more or with a zero byte, a variable that is not text, and a script
    # without an interpreter.
    except (OSError, TypeError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise BadOption(
            f"run({given!r:.80}): the system cannot start it ({why}). Correct the command or the variables."
        ) from None
    program = RunningProgram(given, process, mark)
    try:
        yield program
    finally:
        with anyio.CancelScope(shield=True):
            await program.end()


def _started(
    argv: Sequence[str], cwd: str | os.PathLike[str] | None, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    # The event loop does not start the program: it would reap a child that ends, and so free its process id early.
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        cwd=cwd,
        env=env,
        start_new_session=True,
    )


def _found(program: str, cwd: str | os.PathLike[str] | None, env: Mapping[str, str]) -> str | None:
    """Return the path of a program: from PATH, or relative to `cwd` or to the working folder of this process.

    The result is None if the program is not found.
    """
    paths = [program]
    if os.path.dirname(program) and not os.path.isabs(program):
        paths = [os.path.abspath(os.path.join(folder, program)) for folder in (cwd or "", "")]
    return next((found for path in paths if (found := shutil.which(path, path=env.get("PATH")))), None)


class _OutputTail:
    """The end of a program's output."""

    def __init__(self) -> None:
        self._parts = deque[bytes]()
        self._size = 0

    async def read(self, stream: IO[bytes]) -> None:
        while True:
            await anyio.wait_readable(stream)
            part = os.read(stream.fileno(), MAX_OUTPUT_BYTES)
            if not part:
                return
            self._parts.append(part)
            self._size += len(part)
            while self._size - len(self._parts[0]) >= MAX_OUTPUT_BYTES:
                self._size -= len(self._parts.popleft())

    def text(self) -> str:
        return b"".join(self._parts)[-MAX_OUTPUT_BYTES:].decode("utf-8", "replace")


def _signal_group(pid: int, number: int) -> bool:
    """Send a signal to a process group. Return True if the group exists."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _kill_marked(mark: str) -> bool:
    """Kill the processes whose environment in /proc has this mark. Return True if there was one."""
    wanted, found = f"{PROGRAM_ID_VARIABLE}={mark}".encode(), False
    for folder in Path("/proc").glob("[0-9]*"):
        # The process may have ended, or may belong to another user.
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found = True
                os.kill(int(folder.name), signal.SIGKILL)
    return found
