"""The provider of sandboxes by podman or docker, which finds the engine, and creates and removes containers."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Final

import anyio
from anyio.lowlevel import RunVar

from runner.concurrency.clocks import Waiting
from runner.errors import BadOption, SandboxFailed, SandboxUnavailable
from runner.sandbox.client import ContainerClient, variable_flags
from runner.sandbox.container import ContainerSandbox
from runner.sandbox.images import find_image
from runner.sandbox.leftovers import Watcher, own_label, remove_container, remove_leftovers
from runner.sandbox.sandbox import Sandbox, SandboxOptions

__all__ = ["ENGINE_VARIABLE", "Containers", "default_provider"]

ENGINE_VARIABLE: Final = "DELTARUNNER_CONTAINERS"
"""Variable with the command of the container engine."""

MIN_FREE_BYTES: Final = 1024**3
"""Minimum free space on the disk of the containers. Below it, no container is created."""

IGNORED_LIMITS: Final = "resource limits are not supported"
"""Part of podman's warning that it ignores limits."""

# The first process of a container. It starts no other process, and ignores all signals that can be ignored. If `env`
# supports it, SIGCHLD is ignored too, so that the kernel removes ended processes without a parent.
_FIRST_PROCESS: Final = """
trap "" HUP INT TERM USR1 USR2
if env --ignore-signal=CHLD true 2>/dev/null; then exec env --ignore-signal=CHLD sleep 2147483647; fi
exec sleep 2147483647
"""

_lock: RunVar[anyio.Lock] = RunVar("sandbox_engine")


class Containers:
    """The provider for podman and docker.

    Args:
        engine: the command with its options, such as `"podman --root /data/containers"`. The default is
            the value of the variable DELTARUNNER_CONTAINERS, or else the first of podman and docker that works.
    """

    def __init__(self, engine: str = "") -> None:
        given = engine or os.environ.get(ENGINE_VARIABLE, "")
        try:
            self._commands = [shlex.split(given)] if given.strip() else [["podman"], ["docker"]]
        except ValueError as error:
            where = "Containers(engine=)" if engine else ENGINE_VARIABLE
            raise BadOption(f"{where}: {given!r:.80} is not a shell command ({error}): correct its quotes.") from None
        self._client: ContainerClient | None = None
        self._watcher: Watcher
        self._root = ""

    async def prepare(self, options: SandboxOptions) -> None:
        """Find or build the image, as in `SandboxProvider.prepare`. One sandbox is opened, and removed."""
        async with self.open(options):
            return

    async def _image(self, client: ContainerClient, options: SandboxOptions) -> str:
        # A build, and the wait for another one, do not count as time of the episode.
        with Waiting():
            image, seconds = str(options.image), options.build_seconds
            return await find_image(client, image, options.folder, seconds=seconds, while_runs=self._watcher.ending)

    @asynccontextmanager
    async def open(self, options: SandboxOptions) -> AsyncIterator[Sandbox]:
        """Open a container, as in `SandboxProvider.open`."""
        client = await self._found_client()
        image = await self._image(client, options)
        self._check_disk()
        name = f"deltarunner-{secrets.token_hex(6)}"
        container = ContainerSandbox(client, name)
        with self._watcher.watching():
            try:
                # The creation is not cancelled, since a killed client may leave a container that appears later.
                with anyio.CancelScope(shield=True):
                    await _create(client, name, image, options)
                yield container
            finally:
                await remove_container(client, name)

    async def check(self) -> None:
        """Find the engine. The first call also removes the containers of processes that have ended.

        Raises:
            SandboxUnavailable: no engine works.
        """
        await self._found_client()

    async def _found_client(self) -> ContainerClient:
        lock = _lock.get(None)
        if lock is None:
            lock = anyio.Lock()
            _lock.set(lock)
        async with lock:
            if self._client is None:
                client, self._root = await _working(self._commands)
                self._watcher = Watcher(client)
                await remove_leftovers(client)
                self._client = client
        return self._client

    def _check_disk(self) -> None:
        try:
            free = shutil.disk_usage(self._root).free
        except OSError:  # the folder does not exist here, since the engine is on another machine
            return
        if free < MIN_FREE_BYTES:
            raise SandboxFailed(
                f"the disk of the containers ({self._root}) has {free // 2**20} MiB left; free at least 1 GiB."
            )


@cache
def default_provider() -> Containers:
    """Return the provider of this process for sandboxes without another provider."""
    return Containers()


async def _working(commands: Sequence[Sequence[str]]) -> tuple[ContainerClient, str]:
    """Return the client of the first engine that works, and the folder of the engine's containers.

    Raises:
        SandboxUnavailable: no engine works.
    """
    reasons = []
    for argv in commands:
        client = ContainerClient(argv)
        if not argv or shutil.which(argv[0]) is None:
            reasons.append(f"{' '.join(argv)}: not on PATH")
            continue
        form = "{{.DockerRootDir}}" if client.is_docker else "{{.Store.GraphRoot}}"
        result = await client.call("info", "--format", form)
        if result.ok:
            return client, result.text
        reasons.append(f"{' '.join(argv)}: {result.error}")
    raise SandboxUnavailable(
        f"sandboxes need podman or docker, and none works here ({'; '.join(reasons)}). Install podman, or name an "
        f"engine with its options: {ENGINE_VARIABLE}='podman --root /data/containers'."
    )


async def _create(client: ContainerClient, name: str, image: str, options: SandboxOptions) -> None:
    limits = {
        "--memory": options.memory_mb and f"{options.memory_mb}m",
        "--memory-swap": options.memory_mb and f"{options.memory_mb}m",
        "--cpus": options.cpus,
        "--pids-limit": options.processes if options.processes is not None else -1,
        "--user": options.user,
        "--workdir": options.workdir,
    }
    flags = [f"{flag}={value}" for flag, value in limits.items() if value is not None]
    # The network is given by name, since the default in the engine's settings may be the network of this machine, with
    # its loopback.
    internet = "bridge" if client.is_docker else "private"
    flags.append(f"--network={'none' if options.network == 'none' else internet}")
    flags += [f"--storage-opt=size={options.disk_mb}m"] if options.disk_mb is not None else []
    # Without this option, podman copies proxy variables, with their passwords, into containers.
    flags += [] if client.is_docker else ["--http-proxy=false"]
    flags += [f"--tmpfs={path}:rw,exec,size={size},mode=1777" for path, size in options.tmpfs.items()]
    variables, passed = variable_flags(options.env)
    flags += ["--security-opt=no-new-privileges", "--cap-drop=NET_RAW", "--cap-drop=MKNOD", "--no-healthcheck"]
    command = ["--entrypoint=sh", image, "-c", _FIRST_PROCESS]
    result = await client.call(
        "run", "-d", f"--name={name}", "--pull=never", own_label(), *flags, *variables, *command, env=passed
    )
    if not result.ok:
        raise SandboxFailed(f"image {image!r}: {client.argv[0]} cannot start a sandbox of it: {result.error}")
    limits_given = {options.memory_mb, options.cpus, options.processes} != {None}
    if limits_given and IGNORED_LIMITS in result.stderr.decode("utf-8", "replace").lower():
        raise SandboxFailed(
            f"{client.argv[0]} ignores limits of memory, cores and processes here, without root and on cgroups of "
            "version 1. Use version 2 or root, or open the sandbox without limits: memory_mb=None, cpus=None, "
            "processes=None."
        )
