"""Images of sandboxes: built from a folder once for each content, or found or pulled by name."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Final, TypeAlias

import anyio

from runner.errors import ImageBuildFailed, SandboxFailed
from runner.sandbox.client import ContainerClient

__all__ = ["find_image"]

LOCK_SECONDS: Final = 0.1
"""Time between two attempts to get the lock of an image."""

BUILD_OUTPUT_BYTES: Final = 64 * 1024
"""Maximum number of bytes of a build's output that are kept."""


WhileRuns: TypeAlias = Callable[[int], AbstractContextManager[object]]


async def find_image(
    client: ContainerClient, image: str, folder: Path | None, *, seconds: float, while_runs: WhileRuns
) -> str:
    """Return the name of an image that exists on this machine.

    A missing image is built or pulled, by one caller at a time, even among several processes.

    Args:
        client: the client of podman or docker.
        image: the name of the image.
        folder: the folder with the Dockerfile, which replaces the name; None to use the name.
        seconds: time limit of the build or the pull.
        while_runs: see `ContainerClient.call`.

    Raises:
        ImageBuildFailed: the build fails.
        SandboxFailed: the folder has no Dockerfile, or the image is not on this machine and cannot be pulled.
    """
    if folder is None:
        async with _locked(image):
            if not await _exists(client, image):
                await _pull(client, image, seconds, while_runs)
        return image
    if not (folder / "Dockerfile").is_file():
        raise SandboxFailed(f"image folder {str(folder)!r}: it has no Dockerfile; give a folder with one.")
    # Both engines find a local image by this name, and do not search a registry for it.
    tag = f"localhost/deltarunner:{await anyio.to_thread.run_sync(_hash_of, folder)}"
    async with _locked(tag):
        if not await _exists(client, tag):
            await _build(client, folder, tag, seconds, while_runs)
    return tag


async def _exists(client: ContainerClient, image: str) -> bool:
    return (await client.call("image", "inspect", "--format", "{{.Id}}", image)).ok


async def _pull(client: ContainerClient, image: str, seconds: float, while_runs: WhileRuns) -> None:
    result = await client.call("pull", "-q", image, seconds=seconds, while_runs=while_runs)
    if not result.ok:
        raise SandboxFailed(
            f"image {image!r}: it is not on this machine and cannot be pulled; give the name of a local image, or a "
            f"folder with a Dockerfile: {result.error}"
        )


async def _build(client: ContainerClient, folder: Path, tag: str, seconds: float, while_runs: WhileRuns) -> None:
    # docs/sandboxes.md uses this label in the command that removes all images.
    arguments = ["build", "-t", tag, "--label", "deltarunner.image=1", "--force-rm", str(folder)]
    result = await client.call(*arguments, seconds=seconds, most_bytes=BUILD_OUTPUT_BYTES, while_runs=while_runs)
    if not result.ok:
        late = result.code == -1
        ended = f"{client.argv[0]} build ended with code {result.code}"
        why = f"the build took longer than build_seconds={seconds:g}" if late else ended
        output = b"\n".join(part for part in (result.stdout, result.stderr) if part).decode("utf-8", "replace")
        raise ImageBuildFailed(f"image folder {str(folder)!r}: {why}:\n{output.strip()[-2000:]}")


@asynccontextmanager
async def _locked(image: str) -> AsyncIterator[None]:
    """Lock an image while the block runs. The lock excludes all other tasks and processes of this user."""
    name = hashlib.sha256(image.encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"deltarunner-image-{os.getuid()}-{name}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await anyio.sleep(LOCK_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _hash_of(folder: Path) -> str:
    """Return the first 24 hex digits of the SHA-256 of all paths, modes, links and contents of a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        name = str(path.relative_to(folder))
        digest.update(f"{name}\0{stat.S_IFMT(status.st_mode)}\0{status.st_mode & 0o777}\0".encode())
        if path.is_symlink():
            digest.update(os.readlink(path).encode())
        elif path.is_file():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:24]
