"""Calls of the command line of podman or docker, with bounded output."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import IO, Final

import anyio
from anyio.lowlevel import RunVar

from runner.concurrency.child_processes import child_ended

__all__ = ["CallResult", "ContainerClient", "Output", "client_environ", "file_error", "output_tail", "variable_flags"]

CALL_SECONDS: Final = 120.0
"""Time limit of a call that manages containers."""

CALLS_AT_ONCE_COUNT: Final = 8
"""Maximum number of concurrent calls that manage containers. More calls at once take longer than the same calls one
after another.
"""

CLIENT_END_SECONDS: Final = 3.0
"""Time for a client to end after SIGTERM before it is killed."""

DRAIN_SECONDS: Final = 2.0
"""Time to read the rest of the output after the client has ended."""

ERROR_CHARS: Final = 2000
"""Maximum number of characters of a client's output in an error message."""

NO_FILES_FOLDER: Final = "/proc"
"""Folder in which the client runs. If a container runs out of memory, podman's monitor process tries to write a file
`oom` into this folder, and /proc refuses it.
"""

CHUNK_BYTES: Final = 64 * 1024
"""Maximum number of bytes of one read, and of the error output that is kept."""

_KEPT: Final = (
    *("PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "TZ", "DBUS_SESSION_BUS_ADDRESS", "REGISTRY_AUTH_FILE"),
    *(
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
    ),
)
_KEPT_BEGINNINGS: Final = ("XDG_", "DOCKER_", "CONTAINER", "BUILDAH_", "STORAGE_", "PODMAN_", "_CONTAINERS_")

_CLIENT_BEGINNINGS: Final = (*_KEPT_BEGINNINGS, "LD_", "GO", "SSL_")
"""Beginnings of the names of variables that change the behaviour of the client or its runtime."""

_limiter: RunVar[anyio.CapacityLimiter] = RunVar("sandbox_calls")


def client_environ() -> dict[str, str]:
    """Return the variables of this process that the client needs, without secrets."""
    return {k: v for k, v in os.environ.items() if k in _KEPT or k.startswith(_KEPT_BEGINNINGS)}


def variable_flags(variables: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the options that set variables of a container, and the variables that the client passes on by name.

    Every process of the machine can read the command line, so it has only names. The exceptions are variables that the
    client itself reads, such as PATH and LD_PRELOAD: their values are in the options, so that the client keeps its own.
    """
    passed = {k: v for k, v in variables.items() if k not in _KEPT and not k.startswith(_CLIENT_BEGINNINGS)}
    return [f"--env={key}" if key in passed else f"--env={key}={value}" for key, value in variables.items()], passed


def output_tail(output: bytes | str) -> str:
    """Return the end of a client's output for an error message."""
    text = output.decode("utf-8", "replace") if isinstance(output, bytes) else output
    return text.strip()[-ERROR_CHARS:] or "it printed nothing"


def file_error(result: CallResult, path: str, what: str) -> OSError:
    """Return the error for a failed copy of a file. Its class depends on the cause.

    Args:
        result: the call.
        path: the file or folder.
        what: the failure, such as "cannot be read in the sandbox".
    """
    words = result.error.lower()
    if "permission denied" in words:
        return PermissionError(f"{path!r} {what} ({result.error})")
    if "no such file" in words or "could not find" in words:
        return FileNotFoundError(f"{path!r} {what}: it does not exist ({result.error})")
    return OSError(f"{path!r} {what} ({result.error})")


class Output:
    """An output whose beginning and end are kept, each up to half of the limit.

    Args:
        most_bytes: maximum number of bytes that are kept.
        on_bytes: called with the number of bytes of each chunk.
    """

    def __init__(self, most_bytes: int, on_bytes: Callable[[int], object] = lambda _: None) -> None:
        self._head, self._tail = bytearray(), deque[bytes]()
        self._tail_size = 0
        self._head_bytes = most_bytes // 2
        self._tail_bytes = most_bytes - self._head_bytes
        self._on_bytes = on_bytes
        self._all_bytes = 0

    async def read(self, stream: IO[bytes]) -> None:
        """Read a pipe to its end."""
        while True:
            await anyio.wait_readable(stream)
            chunk = os.read(stream.fileno(), CHUNK_BYTES)
            if not chunk:
                return
            self.add(chunk)

    def add(self, chunk: bytes) -> None:
        """Add the next bytes."""
        self._all_bytes += len(chunk)
        self._on_bytes(len(chunk))
        room = self._head_bytes - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        if chunk:
            self._tail.append(chunk)
            self._tail_size += len(chunk)
            while self._tail_size - len(self._tail[0]) >= self._tail_bytes:
                self._tail_size -= len(self._tail.popleft())

    @property
    def dropped_bytes(self) -> int:
        """The number of bytes that are not kept."""
        return max(0, self._all_bytes - len(self._head) - min(self._tail_size, self._tail_bytes))

    @property
    def head(self) -> bytes:
        """The kept bytes of the beginning."""
        return bytes(self._head)

    def content(self) -> bytes:
        """Return the kept bytes. A note replaces the dropped bytes."""
        tail = b"".join(self._tail)[-self._tail_bytes :] if self._tail_bytes else b""
        dropped = self.dropped_bytes
        note = b"\n[%d bytes left out]\n" % dropped if dropped else b""
        return bytes(self._head) + note + tail


class _FileOutput(Output):
    """An output that is written to a file, up to a maximum size.

    Raises (from `add`):
        OSError: the output is larger, or there is no space.
    """

    def __init__(self, file: IO[bytes], most_bytes: int) -> None:
        super().__init__(0)
        self._file, self._most_bytes = file, most_bytes

    def add(self, chunk: bytes) -> None:
        self._most_bytes -= len(chunk)
        if self._most_bytes < 0:
            raise OSError("the output of the container engine is larger than expected")
        self._file.write(chunk)


@dataclass(frozen=True, slots=True)
class CallResult:
    """A call of the client that has ended."""

    code: int
    """Exit code; -1 if it was ended at its time limit."""
    stdout: bytes
    stderr: bytes

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def text(self) -> str:
        """The output without white space around it."""
        return self.stdout.decode("utf-8", "replace").strip()

    @property
    def error(self) -> str:
        """The end of stderr, or of stdout if stderr is empty; a note if the command reached its time limit."""
        if self.code == -1:
            return "the command did not end in time"
        return output_tail(self.stderr.strip() or self.stdout)


class ContainerClient:
    """The command line of podman or docker, with the options that come before each command.

    Args:
        argv: the command, such as `["podman", "--root", "/data"]`.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        # A path becomes absolute, since the client does not run in the current folder.
        self.argv = tuple(
            os.path.abspath(each) if not place and "/" in each else each for place, each in enumerate(argv)
        )
        self.is_docker = os.path.basename(self.argv[0]).startswith("docker")
        """True for docker, which names some options differently than podman."""

    async def call(
        self,
        *arguments: str,
        stdin: IO[bytes] | None = None,
        into: IO[bytes] | None = None,
        seconds: float = CALL_SECONDS,
        most_bytes: int = 1024 * 1024,
        env: Mapping[str, str] | None = None,
        while_runs: Callable[[int], AbstractContextManager[object]] = nullcontext,
    ) -> CallResult:
        """Run a command of the client, with limited output. A cancellation ends the client.

        Args:
            arguments: the command and its arguments.
            stdin: its input.
            into: the file that receives the output; `stdout` of the result is then empty.
            seconds: time limit.
            most_bytes: maximum size of stdout in bytes. A larger output is shortened; with `into`, it is an error.
            env: further variables of the client.
            while_runs: called with the client's process id; its context is left when the client has ended.

        Raises:
            OSError: `into` has no space, or the output for it is larger than `most_bytes`.
        """
        limiter = _limiter.get(None)
        if limiter is None:
            limiter = anyio.CapacityLimiter(CALLS_AT_ONCE_COUNT)
            _limiter.set(limiter)
        owner = object()
        await limiter.acquire_on_behalf_of(owner)
        try:
            stdout = Output(most_bytes) if into is None else _FileOutput(into, most_bytes)
            stderr = Output(CHUNK_BYTES)
            process = self.start(arguments, stdin=stdin, env=env)
            code = -1
            try:
                with while_runs(process.pid), anyio.move_on_after(seconds):
                    code = await self.finish(process, stdout, stderr)
            finally:
                await self.end(process)
            return CallResult(code, stdout.content(), stderr.content())
        finally:
            limiter.release_on_behalf_of(owner)

    def start(
        self, arguments: Sequence[str], *, stdin: IO[bytes] | None, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command in its own session, so that Ctrl-C in a terminal does not reach the command."""
        # The process is started without the event loop. uvloop would leave pipes open in processes that the client
        # starts and that outlive the client.
        return subprocess.Popen(
            [*self.argv, *arguments],
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**client_environ(), **(env or {})},
            cwd=NO_FILES_FOLDER,
            start_new_session=True,
        )

    async def finish(self, process: subprocess.Popen[bytes], stdout: Output, stderr: Output) -> int:
        """Read both outputs until the process ends, and return its code."""
        async with anyio.create_task_group() as readers:
            for stream, output in ((process.stdout, stdout), (process.stderr, stderr)):
                assert stream is not None
                readers.start_soon(output.read, stream)
            await child_ended(process.pid)
            # A process that the client left running may keep the outputs open forever.
            readers.cancel_scope.deadline = anyio.current_time() + DRAIN_SECONDS
        return process.wait()

    async def end(self, process: subprocess.Popen[bytes]) -> None:
        """End the client if it runs, and close its streams."""
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                # `process.terminate` is not used: it may reap the process, which frees its id.
                os.kill(process.pid, signal.SIGTERM)
                with anyio.move_on_after(CLIENT_END_SECONDS):
                    await child_ended(process.pid)
                os.kill(process.pid, signal.SIGKILL)
                await child_ended(process.pid)
                process.wait()
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()
