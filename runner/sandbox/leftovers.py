"""Removal of the containers of ended processes: by a watcher for this process, and by a sweep for earlier ones."""

from __future__ import annotations

import os
import platform
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import anyio

from runner.logs import logger_for
from runner.sandbox.client import ContainerClient, client_environ

__all__ = [
    "OWNER_LABEL",
    "Watcher",
    "own_label",
    "owner_of",
    "remove_container",
    "remove_flags",
    "remove_leftovers",
]

REMOVALS_COUNT: Final = 2
"""Maximum number of attempts to remove a container."""

OWNER_LABEL: Final = "deltarunner.owner"
"""Name of the label that identifies the process of a container."""

# A line with + or - adds or removes the process id of a client that builds or pulls an image; each client leads a
# session. Removal is tried ten times, since a client may still complete a container that it was creating when the
# runner was killed.
_WATCH: Final = """
clients=
while read -r line; do
  case $line in
    done) exit 0 ;;
    +*) clients="$clients ${line#+}" ;;
    -*) left=
      for id in $clients; do [ "$id" = "${line#-}" ] || left="$left $id"; done
      clients=$left ;;
  esac
done
for id in $clients; do kill -15 "-$id" 2>/dev/null; done
label=$1; volumes=$2; shift 2; rounds=0
while [ $rounds -lt 10 ]; do
  ids=$("$@" ps -aq --filter "label=$label" 2>/dev/null)
  [ -z "$ids" ] || "$@" rm -f $volumes $ids >/dev/null 2>&1
  rounds=$((rounds + 1)); sleep 1
done
for id in $clients; do kill -9 "-$id" 2>/dev/null; done
"""

_log = logger_for("sandbox")


def owner_of(pid: int) -> str:
    """Return a text that identifies a process: its machine, boot, process-id namespace, id and start time."""
    return f"{_machine()}:{_boot()}:{_namespace()}:{pid}:{_start_time(pid)}"


def own_label() -> str:
    """Return the option that labels a container as one of this process."""
    return f"--label={OWNER_LABEL}={owner_of(os.getpid())}"


def _machine() -> str:
    """Return an id of this machine that does not change at a restart."""
    try:
        return Path("/etc/machine-id").read_text().strip() or platform.node()
    except OSError:
        return platform.node()


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid").strip("pid:[]")


def _start_time(pid: int) -> str:
    """Return the start time of a process in ticks since boot; "" if the process does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _is_dead(owner: str) -> bool:
    """Return True if the process of a label has ended.

    A process on another machine that shares the container engine, or in another process-id namespace, counts as living.
    """
    parts = owner.split(":")
    if len(parts) != 5 or not parts[3].isdigit():
        return False
    machine, boot, namespace, pid, began = parts
    if machine != _machine():
        return False
    if boot != _boot():
        return True
    return namespace == _namespace() and _start_time(int(pid)) != began


async def remove_leftovers(client: ContainerClient) -> list[str]:
    """Remove the containers of processes that have ended, and return the containers' ids. A failure is only logged."""
    label = f'{{{{.Label "{OWNER_LABEL}"}}}}' if client.is_docker else f'{{{{index .Labels "{OWNER_LABEL}"}}}}'
    listed = await client.call("ps", "-a", "--filter", f"label={OWNER_LABEL}", "--format", f"{{{{.ID}}}} {label}")
    rows = [line.split() for line in listed.text.splitlines()]
    left = [row[0] for row in rows if len(row) == 2 and _is_dead(row[1])]
    if left:
        removed = await client.call("rm", *remove_flags(client), *left)
        if not removed.ok:
            _log.warning("sandboxes of earlier runs cannot be removed (%s): %s", " ".join(left), removed.error)
    return left


async def remove_container(client: ContainerClient, name: str) -> None:
    """Remove a container of this process. A failure is retried once; a second failure is only logged."""
    with anyio.CancelScope(shield=True):
        for _ in range(REMOVALS_COUNT):
            removed = await client.call("rm", *remove_flags(client), name)
            if removed.ok or "no such container" in removed.error.lower() or "no container with" in removed.error:
                return
    command = " ".join([*client.argv, "rm", "-f", name])
    _log.warning("sandbox %s is left: it cannot be removed (%s). Remove it: %s", name, removed.error, command)


def remove_flags(client: ContainerClient) -> list[str]:
    """Return the options of `rm` that end a container at once and remove its volumes."""
    return ["-f", "-v"] if client.is_docker else ["-f", "-v", "-t", "0"]


class Watcher:
    """A separate process, which removes the containers of this process if this process is killed.

    It runs while a container may exist.

    Args:
        client: the client of podman or docker.
    """

    def __init__(self, client: ContainerClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._used_count = 0
        self._process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the watcher running while the block runs."""
        with self._lock:
            self._used_count += 1
            if self._process is None or self._process.poll() is not None:
                self._process = self._started()
        try:
            yield
        finally:
            with self._lock:
                self._used_count -= 1
                if not self._used_count:
                    self._end()

    @contextmanager
    def ending(self, pid: int) -> Iterator[None]:
        """Keep the watcher running while the block runs, for a client with the process id `pid`.

        If this process is killed, the watcher also ends the client and all processes of the client's session.
        """
        with self.watching():
            self._send(f"+{pid}")
            try:
                yield
            finally:
                self._send(f"-{pid}")

    def _send(self, line: str) -> None:
        with self._lock, suppress(OSError):  # the watcher has been killed
            assert self._process is not None
            assert self._process.stdin is not None
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def _started(self) -> subprocess.Popen[bytes]:
        flags = " ".join(remove_flags(self._client)[1:])
        label = f"{OWNER_LABEL}={owner_of(os.getpid())}"
        return subprocess.Popen(
            ["sh", "-c", _WATCH, "sh", label, flags, *self._client.argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=client_environ(),
            start_new_session=True,
        )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with suppress(OSError):  # the watcher was killed
            process.stdin.write(b"done\n")
            process.stdin.close()
        process.wait()
