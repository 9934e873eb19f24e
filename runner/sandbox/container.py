"""A sandbox that is a container: commands, files and restarts by the client of podman or docker."""

from __future__ import annotations

import errno
import io
import os
import posixpath
import secrets
import socket
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO, Any, Final

import anyio

from runner.concurrency.clocks import loop_time
from runner.errors import BadOption, SandboxFailed, SandboxGone
from runner.sandbox.client import ContainerClient, Output, file_error, variable_flags
from runner.sandbox.loopback import listen_inside
from runner.sandbox.programs import restore_programs
from runner.sandbox.sandbox import EXEC_SECONDS, FILE_BYTES, OUTPUT_BYTES, Executed, SandboxEnd, decoded

__all__ = ["ContainerSandbox"]

MAX_OUTPUT_BYTES: Final = 64 * 1024 * 1024
"""Maximum bytes of stdout and stderr together; a command that writes more is ended."""

KILL_SECONDS: Final = 10.0
"""Time to end the processes of a command from inside. After that, the container is restarted."""

MAX_STOPS: Final = 6
"""Maximum number of attempts to stop a container. podman waits five seconds in each."""

START_SECONDS: Final = 60.0
"""Longest time until a command has begun. The time limit of the command counts from its beginning."""

NOT_STARTED_CODE: Final = 126
"""Exit code of a command that cannot be started; a shell returns the same code."""

UNSURE_CODES: Final = (125, 126, 127, 137, 255)
"""Exit codes of the client that may also mean that the container is gone."""

PROCESS_VARIABLE: Final = "DELTARUNNER_EXEC"
"""Variable that identifies the processes of a command, even processes that left its session."""

FIRST_LINE_BYTES: Final = 16
"""Longest first line of the error output, which is the process id of the command."""

_COMMAND: Final = 'echo $$ >&2; exec "$@"'
"""A shell that becomes the command. The shell leads a session, so its process id is the session's."""

_OTHER_CAUSES: Final = (
    *("not found", "no such", "unable to find user", "permission denied", "a directory", "levels of symbolic links"),
)
"""Parts of the client's message if a command cannot be started for a reason other than too many processes."""

_STATE: Final = "{{.State.Status}} {{.State.OOMKilled}}"

# This script uses only builtins of sh, and `tr`. It runs in rounds, since an undetected process may have started
# another one.
_KILL: Final = """
session=$1 mark=$2 rounds=0
while [ $rounds -lt 40 ]; do
  left=0
  for folder in /proc/[0-9]*; do
    id=${folder#/proc/}
    [ "$id" = 1 ] || [ "$id" = $$ ] && continue
    read -r line 2>/dev/null <"$folder/stat" || continue
    set -- ${line##*) }
    [ "$1" = Z ] && continue
    if [ "$4" != "$session" ]; then
      case $(tr '\\0' '\\n' 2>/dev/null <"$folder/environ") in *"$mark"*) ;; *) continue ;; esac
    fi
    kill -9 "$id" 2>/dev/null && left=1
  done
  [ $left = 0 ] && exit 0
  rounds=$((rounds + 1))
done
exit 1
"""


class ContainerSandbox:
    """A sandbox that is a container of podman or docker. `Sandbox` documents the methods of the protocol.

    Args:
        client: the client of podman or docker.
        name: the name of the container.
    """

    def __init__(self, client: ContainerClient, name: str) -> None:
        self._client = client
        self.name = name
        self._workdir: str | None = None
        self._owner: tuple[int, int] | None = None
        self._damage = ""
        """The reason why no command can run after a restart; "" if commands can run."""

    # --- commands

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
        """Run a command, as in `Sandbox.exec`."""
        if isinstance(argv, str | bytes) or not argv or not all(isinstance(each, str) for each in argv):
            raise BadOption(f"exec({argv!r:.80}): give a list of strings, such as ['sh', '-c', 'ls'].")
        if bool(self._damage):  # without `bool`, mypy would assume that the value cannot change below
            return Executed(NOT_STARTED_CODE, "", f"{self._damage}\n", 0.0)
        command = _Command(self._client, self.name, argv, dict(env or {}), user, cwd, output_bytes)
        given = input.encode() if isinstance(input, str) else input
        try:
            ended_by = await command.run(seconds, given, self._end_inside)
        except ValueError as error:  # raised for a zero byte in the command, which a model may write
            return Executed(NOT_STARTED_CODE, "", f"the command cannot be started: {error}\n", 0.0)
        except OSError as error:
            if error.errno != errno.E2BIG:
                raise
            return Executed(NOT_STARTED_CODE, "", "the command cannot be started: it is too long\n", 0.0)
        executed = command.executed(ended_by)
        if ended_by == "exit" and (executed.code in UNSURE_CODES or not command.has_begun):
            await self._check_running()
            if command.is_out_of_processes:
                await self.restart()
                if self._damage:
                    return executed
                ended_by = await command.run(seconds, given, self._end_inside)
                return command.executed(ended_by)
        return executed

    async def _end_inside(self, session: str, mark: str) -> None:
        """End the processes of a command. If that is not possible from inside, restart the container."""
        arguments = ["exec", "--user", "0", self.name, "sh", "-c", _KILL, "sh", session or "none", mark]
        result = await self._client.call(*arguments, seconds=KILL_SECONDS)
        if not result.ok:
            with suppress(SandboxGone):
                await self.restart()

    async def restart(self) -> None:
        """End all processes, as in `Sandbox.restart`."""
        result = await self._client.call("restart", "-t", "0", self.name)
        if not result.ok or (await self._status())[0] != "running":
            # The first process of the container is the shell of the image, which may have been replaced inside.
            await self.restore()

    async def restore(self) -> None:
        """End all processes and put back the programs of the image, as in `Sandbox.restore`."""
        # The container is stopped first, so that no process can change the programs while they are restored. The
        # container then starts with the image's shell.
        await self._stop()
        damage = ""
        try:
            await restore_programs(self._client, self.name)
        except OSError as error:
            damage = str(error)
        finally:
            started = await self._client.call("start", self.name)
        if not started.ok or (await self._status())[0] != "running":
            damage = f"sandbox {self.name} does not start again: {started.error}"
        self._damage = damage

    async def _stop(self) -> None:
        """Stop the container.

        On a busy machine its processes may die later than the engine waits for them, so the stop is tried again.

        Raises:
            SandboxGone: the container does not exist.
            SandboxFailed: the container does not stop.
        """
        for _ in range(MAX_STOPS):
            stopped = await self._client.call("stop", "-t", "0", self.name)
            if stopped.ok:
                return
            await self._status()
        raise SandboxFailed(f"sandbox {self.name} does not stop: {stopped.error}. Check that the engine runs.")

    async def _status(self) -> tuple[str, bool]:
        """Return the state of the container, and whether it ran out of memory.

        Raises:
            SandboxGone: the container does not exist.
        """
        state = await self._client.call("container", "inspect", "--format", _STATE, self.name)
        if not state.ok:
            raise SandboxGone(f"sandbox {self.name} was removed from outside")
        status, _, is_out_of_memory = state.text.partition(" ")
        if status == "removing":
            raise SandboxGone(f"sandbox {self.name} was removed from outside")
        return status, is_out_of_memory == "true"

    async def _check_running(self) -> None:
        """Start the container again if it ran out of memory.

        Raises:
            SandboxGone: the container does not exist, or was stopped from outside.
        """
        status, is_out_of_memory = await self._status()
        if status == "running" or self._damage:
            return
        if not is_out_of_memory:
            raise SandboxGone(f"sandbox {self.name} was stopped from outside (it is {status})")
        await self._client.call("start", self.name)

    # --- files

    async def read(self, path: str, *, most_bytes: int = FILE_BYTES) -> bytes:
        """Return the content of a file, as in `Sandbox.read`."""
        where = await self._absolute(path)
        follow = ["-L"] if self._client.is_docker else []
        # `call` keeps only half of its limit from the beginning of the output. So the limit is twice the size of the
        # largest allowed file with its header.
        result = await self._client.call("cp", *follow, f"{self.name}:{where}", "-", most_bytes=2 * (most_bytes + 4096))
        if not result.ok:
            await self._check_running()
            raise file_error(result, path, "cannot be read in the sandbox")
        with tarfile.open(fileobj=io.BytesIO(result.stdout)) as archive:
            member = archive.next()
            if member is None or not member.isreg():
                raise OSError(f"{path!r} is not a regular file in the sandbox: give the path of one")
            if member.size > most_bytes:
                raise OSError(f"{path!r} has {member.size} bytes, more than most_bytes={most_bytes}: raise this limit")
            content = archive.extractfile(member)
            assert content is not None
            return content.read()

    async def write(self, path: str, content: bytes | str, *, mode: int = 0o644) -> None:
        """Write a file, as in `Sandbox.write`."""
        where = await self._absolute(path)
        data = content.encode() if isinstance(content, str) else content
        member = tarfile.TarInfo(where.lstrip("/"))
        member.size, member.mode = len(data), mode
        member.uid, member.gid = await self._user()
        with tempfile.TemporaryFile() as file:
            with tarfile.open(fileobj=file, mode="w") as archive:
                archive.addfile(member, io.BytesIO(data))
            await self._extract(file, path)

    async def upload(self, source: str | os.PathLike[str], path: str) -> None:
        """Copy a file or folder, as in `Sandbox.upload`."""
        where = await self._absolute(path)
        if not await anyio.Path(source).exists():
            raise FileNotFoundError(f"upload({os.fspath(source)!r}): this is not an existing file or folder: give one.")
        owner = await self._user()
        with tempfile.TemporaryFile() as file:
            await anyio.to_thread.run_sync(_pack, Path(source), where.lstrip("/"), owner, file)
            await self._extract(file, path)

    async def _extract(self, file: IO[bytes], path: str) -> None:
        file.seek(0)
        result = await self._client.call("cp", "-", f"{self.name}:/", stdin=file)
        if not result.ok:
            await self._check_running()
            raise file_error(result, path, "cannot be written in the sandbox")

    async def _absolute(self, path: str) -> str:
        if not isinstance(path, str) or not path:
            raise BadOption(f"path={path!r:.80}: give the path of a file in the sandbox.")
        if "\0" in path:
            raise OSError(f"{path!r:.80} contains a zero byte, which no path may contain: leave it out")
        if not path.startswith("/"):
            if self._workdir is None:
                self._workdir = (await self._inspect("{{.Config.WorkingDir}}")) or "/"
            path = posixpath.join(self._workdir, path)
        return posixpath.normpath(path)

    async def _user(self) -> tuple[int, int]:
        """Return the ids of the user and the group of the sandbox."""
        if self._owner is None:
            name = await self._inspect("{{.Config.User}}")
            self._owner = (0, 0)
            if name not in ("", "0", "root"):
                ids = await self.exec(["sh", "-c", "id -u; id -g"])
                user, _, group = ids.stdout.strip().partition("\n")
                self._owner = (int(user), int(group)) if ids.ok else (0, 0)
        return self._owner

    async def _inspect(self, form: str) -> str:
        result = await self._client.call("container", "inspect", "--format", form, self.name)
        if not result.ok:
            raise SandboxGone(f"sandbox {self.name} was removed from outside")
        return result.text

    # --- the way to the endpoint

    async def listen(self, port: int) -> socket.socket:
        """Listen inside the container, as in `Sandbox.listen`."""
        pid = int(await self._inspect("{{.State.Pid}}"))
        return await anyio.to_thread.run_sync(listen_inside, pid, port)


class _Command:
    """A command in a container, during its run and after it."""

    def __init__(
        self,
        client: ContainerClient,
        name: str,
        argv: Sequence[str],
        env: dict[str, str],
        user: str | None,
        cwd: str | None,
        output_bytes: int,
    ) -> None:
        self._client, self._output_bytes = client, output_bytes
        self._mark = secrets.token_hex(16)
        flags, self._passed = variable_flags({**env, PROCESS_VARIABLE: self._mark})
        flags += ["--user", user] if user else []
        flags += ["--workdir", cwd] if cwd else []
        self._before, self._after = ["exec", *flags], [name, "sh", "-c", _COMMAND, "sh", *argv]
        self._written_bytes = 0
        self._too_much = anyio.Event()
        self._begin()

    def _begin(self) -> None:
        self._stdout = Output(self._output_bytes, self._count)
        self._stderr = Output(self._output_bytes + 2 * FIRST_LINE_BYTES, self._count_errors)
        self._started = anyio.Event()
        self._code, self._seconds = 137, 0.0

    def _count_errors(self, size: int) -> None:
        self._started.set()  # the first output of the command is its process id
        self._count(size)

    def _count(self, size: int) -> None:
        self._written_bytes += size
        if self._written_bytes > MAX_OUTPUT_BYTES:
            self._too_much.set()

    async def run(self, seconds: float | None, input: bytes | None, end_inside: Any) -> SandboxEnd:
        """Run the command to its end or to a limit.

        At a limit, or if this call is cancelled, `end_inside(session, mark)` ends the processes of the command.
        """
        self._begin()
        began = loop_time()
        with tempfile.TemporaryFile() if input is not None else nullcontext() as file:
            if file is not None and input is not None:
                file.write(input)
                file.seek(0)
            before = self._before if file is None else [*self._before, "-i"]
            process = self._client.start([*before, *self._after], stdin=file, env=self._passed)
        is_over = False
        try:
            async with anyio.create_task_group() as group:
                with anyio.CancelScope() as limit:
                    group.start_soon(self._limit_seconds, limit, seconds)
                    group.start_soon(self._cancel_if_too_much, group.cancel_scope)
                    self._code = await self._client.finish(process, self._stdout, self._stderr)
                    is_over = True
                group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                if not is_over:
                    await end_inside(self._session, self._mark)
                    with anyio.move_on_after(1.0):  # read the output so far
                        await self._client.finish(process, self._stdout, self._stderr)
                await self._client.end(process)
            self._seconds = loop_time() - began
        if is_over:
            return "exit"
        return "output" if self._too_much.is_set() else "time"

    async def _limit_seconds(self, scope: anyio.CancelScope, seconds: float | None) -> None:
        # On a busy machine the start may take seconds, which do not count towards the command's time limit.
        with anyio.move_on_after(START_SECONDS):
            await self._started.wait()
        if seconds is not None:
            scope.deadline = anyio.current_time() + seconds

    async def _cancel_if_too_much(self, scope: anyio.CancelScope) -> None:
        await self._too_much.wait()
        scope.cancel()

    @property
    def _session(self) -> str:
        """The process id of the command; "" if it was not started."""
        line, _, _ = self._stderr.head[:FIRST_LINE_BYTES].partition(b"\n")
        return line.decode() if line.isdigit() else ""

    @property
    def has_begun(self) -> bool:
        """True if the command was started in the container."""
        return bool(self._session)

    @property
    def is_out_of_processes(self) -> bool:
        """True if the limit of processes prevented the start: the client's messages have none of the other causes."""
        if self._session:
            return False
        # docker writes its messages to stdout
        words = decoded(self._stderr.content() + self._stdout.content()).lower()
        return not any(cause in words for cause in _OTHER_CAUSES)

    def executed(self, ended_by: SandboxEnd) -> Executed:
        errors = self._stderr.content()
        if self._session:
            errors = errors.partition(b"\n")[2]
        return Executed(
            code=self._code,
            stdout=decoded(self._stdout.content()),
            stderr=decoded(errors),
            seconds=self._seconds,
            ended_by=ended_by,
            dropped_bytes=self._stdout.dropped_bytes + self._stderr.dropped_bytes,
        )


def _pack(source: Path, where: str, owner: tuple[int, int], file: IO[bytes]) -> None:
    """Write a file or folder into an archive, owned by the user of the sandbox."""

    def owned(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid, member.gid = owner
        member.uname = member.gname = ""
        return member

    with tarfile.open(fileobj=file, mode="w") as archive:
        if source.is_dir():
            for each in sorted(source.iterdir()):
                archive.add(each, f"{where}/{each.name}" if where else each.name, filter=owned)
        else:
            archive.add(source.resolve(), where, filter=owned)
