"""Runs an agent program in a process group of its own; whatever it started ends with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
from anyio.abc import ByteReceiveStream, Process

from runner.errors import BadOption, ProgramFailed

__all__ = ["MARK", "FinishedProgram", "clean_environ", "running"]

MARK: Final = "DELTARUNNER_PROGRAM"
"""The variable by which the processes of a program are known that left its group."""

OUTPUT: Final = 64 * 1024
"""So many bytes of each output are kept, the last ones."""

GRACE: Final = 2.0
"""Seconds between asking a program to end and ending it."""

_KEPT: Final = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_OPTIONS")
"""The only variables of ours that a program gets."""


@dataclass(frozen=True, slots=True)
class FinishedProgram:
    """A program that has ended."""

    argv: Sequence[str]
    """What was run."""
    returncode: int
    """The code that it ended with; below 0 the signal that ended it."""
    stdout: str
    """The last 64 KiB that it printed."""
    stderr: str
    """The last 64 KiB of its errors."""

    @property
    def ok(self) -> bool:
        """Whether it ended with 0."""
        return self.returncode == 0

    def failure(self) -> ProgramFailed:
        """An error that says how it ended, with the last lines that it printed."""
        ended = f"code {self.returncode}" if self.returncode >= 0 else signal.Signals(-self.returncode).name
        last = (self.stderr.strip() or self.stdout.strip() or "it printed nothing").splitlines()[-8:]
        return ProgramFailed(f"{self.argv[0]} ended with {ended}: " + "\n".join(last))


def clean_environ() -> dict[str, str]:
    """What of our own environment a program may see."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ}


class Running:
    """A program that runs."""

    def __init__(self, argv: Sequence[str], process: Process, mark: str) -> None:
        self._argv = argv
        self._process = process
        self._mark = mark
        self._stdout, self._stderr = _Tail(), _Tail()

    async def wait(self) -> FinishedProgram:
        """Wait until it has ended; what it leaves behind is not waited for."""
        async with anyio.create_task_group() as readers:
            for stream, tail in ((self._process.stdout, self._stdout), (self._process.stderr, self._stderr)):
                assert stream is not None
                readers.start_soon(tail.read, stream)
            code = await self._process.wait()
            # What it started may hold its outputs open for ever.
            readers.cancel_scope.deadline = anyio.current_time() + 0.2
        return FinishedProgram(self._argv, code, self._stdout.text(), self._stderr.text())

    async def end(self) -> None:
        """End it and all that it started, politely first."""
        if self._process.returncode is None and _signal_group(self._process.pid, signal.SIGTERM):
            with anyio.move_on_after(GRACE):
                await self._process.wait()
        _signal_group(self._process.pid, signal.SIGKILL)
        for pid in await anyio.to_thread.run_sync(lambda: list(_marked(self._mark))):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        await self._process.wait()
        await self._process.aclose()


@asynccontextmanager
async def running(
    argv: Sequence[str], *, cwd: str | os.PathLike[str] | None, env: Mapping[str, str], mark: str
) -> AsyncIterator[Running]:
    """A program while the block runs and no longer.

    Args:
        argv: what to run.
        cwd: where.
        env: its whole environment.
        mark: tells its processes from others.

    Raises:
        BadOption: there is no such program, or no such folder.
    """
    found = shutil.which(argv[0], path=env.get("PATH")) if argv else None
    if found is None:
        raise BadOption(
            f"run({list(argv)!r:.80}): there is no program {argv[0] if argv else ''!r} on PATH: install it."
        )
    if cwd is not None and not await anyio.Path(cwd).is_dir():
        raise BadOption(f"run({argv[0]!r}, cwd={os.fspath(cwd)!r}): there is no such folder.")
    process = await anyio.open_process(
        [found, *argv[1:]],
        stdin=subprocess.DEVNULL,
        cwd=cwd,
        env={**env, MARK: mark},
        start_new_session=True,
    )
    program = Running(argv, process, mark)
    try:
        yield program
    finally:
        with anyio.CancelScope(shield=True):
            await program.end()


class _Tail:
    """The end of what a program prints."""

    def __init__(self) -> None:
        self._parts = deque[bytes]()
        self._size = 0

    async def read(self, stream: ByteReceiveStream) -> None:
        async for part in stream:
            self._parts.append(part)
            self._size += len(part)
            while self._size - len(self._parts[0]) >= OUTPUT:
                self._size -= len(self._parts.popleft())

    def text(self) -> str:
        return b"".join(self._parts)[-OUTPUT:].decode("utf-8", "replace")


def _signal_group(pid: int, number: int) -> bool:
    """Send a signal to a process group; whether there is one."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _marked(mark: str) -> Iterator[int]:
    """The processes that have a mark in their environment, where the system tells."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)
        except OSError:  # it has ended, or is somebody else's
            continue
