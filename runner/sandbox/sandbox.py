"""The interface of a sandbox and of its provider, and their options."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeAlias

from runner import checked
from runner.errors import BadOption

__all__ = ["EXEC_SECONDS", "Executed", "Sandbox", "SandboxEnd", "SandboxOptions", "SandboxProvider", "decoded"]

EXEC_SECONDS: Final = 60.0
"""Default time limit of a command."""

OUTPUT_BYTES: Final = 1024 * 1024

FILE_BYTES: Final = 64 * 1024 * 1024

SandboxEnd: TypeAlias = Literal["exit", "time", "output"]
"""The way in which a command ended: by itself ("exit"), at its time limit ("time"), or at the limit of its output."""

_NETWORKS: Final = ("none", "internet")


@dataclass(frozen=True, slots=True)
class Executed:
    """A command that has ended in a sandbox.

    `str()` returns its output, with a note if the command did not succeed.
    """

    code: int
    """Exit code; 137 if the command was killed, for its memory or at a limit; 127 if it does not exist; 126 if it
    cannot be started."""
    stdout: str
    """The standard output; the middle is left out if it is longer than `output_bytes`."""
    stderr: str
    """The error output, shortened in the same way."""
    seconds: float
    """Duration in seconds."""
    ended_by: SandboxEnd = "exit"
    """The reason why the command ended."""
    dropped_bytes: int = 0
    """Bytes of both outputs that were left out."""

    @property
    def ok(self) -> bool:
        """True if the command ended by itself with code 0."""
        return self.code == 0 and self.ended_by == "exit"

    def __str__(self) -> str:
        parts = [part for part in (self.stdout, self.stderr) if part]
        if self.ended_by == "time":
            parts.append(f"[timed out after {self.seconds:.0f} s]")
        elif self.ended_by == "output":
            parts.append("[ended: too much output]")
        elif self.code:
            parts.append(f"[code {self.code}]")
        return "".join(part if part.endswith("\n") or part is parts[-1] else f"{part}\n" for part in parts)


class Sandbox(Protocol):
    """A separate computer for one episode, which is removed at the end of the episode.

    Actions of the model are not errors: a command that fails, hangs, or floods its output returns an `Executed`.
    `SandboxGone` is raised if the sandbox was removed from outside.
    """

    async def exec(
        self,
        argv: Sequence[str],
        *,
        seconds: float | None = EXEC_SECONDS,
        input: bytes | str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        cwd: str | None = None,
        output_bytes: int = OUTPUT_BYTES,
    ) -> Executed:
        """Run a command and wait until it ends. Processes that it leaves in the background continue.

        A command that reaches a limit, or whose call is cancelled, is ended with all processes that it started.

        Args:
            argv: the command, which no shell reads; to use a shell, give `["sh", "-c", ...]`.
            seconds: the time limit; None for no limit.
            input: its standard input; None for an empty one.
            env: further variables.
            user: the user; by default the user of the sandbox.
            cwd: the working folder; by default the working folder of the sandbox.
            output_bytes: bytes of each output that are kept, half from the beginning and half from the end. A command
                that writes more than 64 MiB is ended.

        Raises:
            BadOption: `argv` is not a list of strings.
            SandboxGone: the sandbox does not exist any more.
            SandboxFailed: the processes of the command could not be ended.
        """
        ...

    async def read(self, path: str, *, most_bytes: int = FILE_BYTES) -> bytes:
        """Return the content of a regular file. No program runs in the sandbox for this call.

        Args:
            path: the path; a relative path begins at the working folder.
            most_bytes: the largest allowed size of the file in bytes.

        Raises:
            BadOption: the path is empty, or is not text.
            OSError: the file does not exist (`FileNotFoundError`), is not a regular file, or is too large.
            SandboxGone: the sandbox does not exist any more.
        """
        ...

    async def write(self, path: str, content: bytes | str, *, mode: int = 0o644) -> None:
        """Write a file with the permissions `mode`. Missing folders are created.

        Raises:
            BadOption: the path is empty, or is not text.
            OSError: the file cannot be written.
            SandboxGone: the sandbox does not exist any more.
        """
        ...

    async def upload(self, source: str | os.PathLike[str], path: str) -> None:
        """Copy a file or a folder from this machine to `path`.

        If both are folders, the contents of `source` are added to `path`.

        Raises:
            BadOption: the path is empty, or is not text.
            OSError: the source does not exist, or the files cannot be written.
            SandboxGone: the sandbox does not exist any more.
        """
        ...

    async def restart(self) -> None:
        """End all processes in the sandbox. Its files stay, except files on `tmpfs`.

        If changes inside the sandbox prevent a start, each later command returns an `Executed` with code 126 and the
        reason.

        Raises:
            SandboxGone: the sandbox does not exist any more.
            SandboxFailed: the sandbox does not stop, or its engine fails.
        """
        ...

    async def restore(self) -> None:
        """End all processes, and put back the programs of the image: the files in the folders of PATH.

        A check that runs after this call uses the programs of the image, even if they were replaced. Programs that were
        added stay, unless a program of the image has the same name. Libraries, packages of languages, and folders at or
        below the working folder are not restored. They can still change the result of a check, but only if the user of
        an earlier command could write them.

        If changes inside the sandbox prevent this, each later command returns an `Executed` with code 126 and the
        reason.

        Raises:
            SandboxGone: the sandbox does not exist any more.
            SandboxFailed: the sandbox does not stop, or its engine fails.
        """
        ...

    async def listen(self, port: int) -> socket.socket:
        """Return a socket that listens at 127.0.0.1 and this port inside the sandbox.

        Several sockets may listen at one port; the caller closes each.

        Raises:
            SandboxFailed: this sandbox does not support it.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxOptions:
    """The options of a sandbox."""

    image: str | os.PathLike[str]
    """Name of an image, or a folder with a Dockerfile."""
    memory_mb: int | None = 1024
    """Memory, without swap, in MiB; None for no limit."""
    cpus: float | None = 1
    """Number of processor cores; None for no limit."""
    processes: int | None = 256
    """Maximum number of processes and threads; None for no limit."""
    disk_mb: int | None = None
    """Space for files that the sandbox writes, in MiB; None for no limit. Some engines refuse a limit."""
    network: str = "none"
    """"none", or "internet" for the default network of the provider."""
    tmpfs: Mapping[str, str] = field(default_factory=dict)
    """Sizes of folders in memory, by path: `{"/work": "64m"}`. Writes to a full folder fail."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of all commands."""
    workdir: str | None = None
    """The working folder; by default the working folder of the image."""
    user: str | None = None
    """The user of all commands; by default the user of the image."""
    build_seconds: float = 600.0
    """Time limit for a build or a pull of the image. The clocks of the episode are paused during this time."""

    def __post_init__(self) -> None:
        image: Any = self.image
        if not isinstance(image, str | os.PathLike) or not os.fspath(image):
            raise BadOption(f"sandbox(image={image!r:.60}): give the name of an image, or a folder with a Dockerfile.")
        for name, least in (("memory_mb", 6), ("processes", 4), ("disk_mb", 1)):
            value = getattr(self, name)
            if value is not None:
                checked.whole(f"sandbox({name}={value!r:.60})", value, least=least)
        if self.cpus is not None:
            checked.number(f"sandbox(cpus={self.cpus!r:.60})", self.cpus, above=0, finite=True)
        if self.network not in _NETWORKS:
            raise BadOption(f"sandbox(network={self.network!r:.60}): give {' or '.join(map(repr, _NETWORKS))}.")
        for name in ("tmpfs", "env"):
            given: Any = getattr(self, name)
            if not isinstance(given, Mapping):
                raise BadOption(f"sandbox({name}={given!r:.60}): give a dict of strings.")
            for key, value in given.items():
                if not isinstance(key, str) or not isinstance(value, str):
                    # The value is not shown, since a variable may be a secret.
                    raise BadOption(
                        f"sandbox({name}=...): the value of {key!r:.60} is of type {type(value).__name__}: give a dict "
                        "of strings."
                    )

    @property
    def folder(self) -> Path | None:
        """The absolute path of the folder with the Dockerfile; None for the name of an image."""
        if not isinstance(self.image, str):
            return Path(self.image).absolute()
        is_path = self.image.startswith((".", "/", "~")) or self.image.endswith("/") or Path(self.image).is_dir()
        return Path(self.image).expanduser().absolute() if is_path else None


class SandboxProvider(Protocol):
    """A provider of sandboxes, such as `Containers` for podman and docker. `sandbox()` also accepts other providers."""

    async def prepare(self, options: SandboxOptions) -> None:
        """Find or build the image and try the options, so that a mistake is found before any episode.

        Raises:
            SandboxFailed: no sandbox with these options can be made.
        """
        ...

    def open(self, options: SandboxOptions) -> AbstractAsyncContextManager[Sandbox]:
        """Return a context with a new sandbox, which is removed when the context is left.

        Raises:
            SandboxFailed: the sandbox cannot be made.
        """
        ...


def decoded(content: bytes) -> str:
    """Return output as text; bytes that are not UTF-8 are replaced."""
    return content.decode("utf-8", "replace")
