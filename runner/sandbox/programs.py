"""Restoration of the programs of an image in a container, from outside, without running anything in the container."""

from __future__ import annotations

import copy
import io
import posixpath
import secrets
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import PurePosixPath
from typing import IO, Final

import anyio

from runner.errors import SandboxFailed
from runner.sandbox.client import ContainerClient, file_error
from runner.sandbox.leftovers import own_label, remove_container

__all__ = ["restore_programs"]

DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Folders of programs for an image that does not set PATH."""

PRELOADED: Final = "/etc/ld.so.preload"
"""The list of libraries that each program loads first."""

DIFF_BYTES: Final = 64 * 1024 * 1024
"""Maximum number of bytes of the list of changed paths that are read."""

FOLDER_BYTES: Final = 4 * 1024**3
"""Maximum number of bytes of a folder of programs."""

COPY_SECONDS: Final = 300.0
"""Time limit for a copy of a folder of programs."""

_CHECK: Final = "Check that the container engine runs."

_CONFIGURATION: Final = "{{.Image}} {{.Config.WorkingDir}}{{range .Config.Env}}\n{{.}}{{end}}"


async def restore_programs(client: ContainerClient, name: str) -> None:
    """Put back the image's files in the folders of PATH, where the container has replaced, removed or hidden them.

    A folder at or below the working folder is left as it is. A changed list of preloaded libraries is emptied. Nothing
    is copied if the container has changed neither a folder nor this list.

    Raises:
        OSError: the files cannot be put back: a folder has the name of a program, or there is no space.
        SandboxFailed: the engine fails.
    """
    image, folders = await _folders(client, name)
    listed = await client.call("diff", name, most_bytes=DIFF_BYTES)
    if not listed.ok:
        raise SandboxFailed(f"the changes of sandbox {name} cannot be listed: {listed.error}. {_CHECK}")
    lines = [(line[:1], line[2:]) for line in listed.text.splitlines() if line[:2] in ("A ", "C ", "D ")]
    # The parents of each changed path are listed too. A folder without listed paths below it was itself replaced.
    parents = {str(parent) for _, path in lines for parent in PurePosixPath(path).parents}
    changed = [(kind, path) for kind, path in lines if path not in parents]
    folders = _changed_folders(changed, folders)
    if not folders and not any(path == PRELOADED for _, path in changed):
        return
    with ExitStack() as stack:
        file = stack.enter_context(tempfile.TemporaryFile())
        found = {folder: stack.enter_context(tempfile.TemporaryFile()) for folder in folders}
        failures = list[str]()
        async with _original(client, image) as original, anyio.create_task_group() as group:
            for folder, archive in found.items():
                group.start_soon(_copy, client, original, folder, archive, failures)
        if failures:
            raise SandboxFailed(failures[0])
        await anyio.to_thread.run_sync(_pack, found, changed, file)
        file.seek(0)
        copied = await client.call("cp", "-", f"{name}:/", stdin=file, seconds=COPY_SECONDS)
    if not copied.ok:
        raise OSError(f"the programs of the image cannot be put back into sandbox {name}: {copied.error}")


async def _folders(client: ContainerClient, name: str) -> tuple[str, list[str]]:
    """Return the image, and the folders of programs that are not at or below the working folder.

    Raises:
        SandboxFailed: the engine fails.
    """
    result = await client.call("container", "inspect", "--format", _CONFIGURATION, name)
    if not result.ok:
        raise SandboxFailed(f"sandbox {name} cannot be inspected: {result.error}. {_CHECK}")
    first, *variables = result.text.splitlines()
    image, _, workdir = first.partition(" ")
    path = next((line[5:] for line in variables if line.startswith("PATH=")), "") or DEFAULT_PATH
    folders = [posixpath.normpath(each) for each in path.split(":") if each.startswith("/")]
    below = posixpath.normpath(workdir or "/")
    kept = [each for each in folders if below == "/" or not _is_at_or_below(each, below)]
    return image, list(dict.fromkeys(kept))


def _changed_folders(changed: Sequence[tuple[str, str]], folders: Sequence[str]) -> list[str]:
    """Return the folders whose programs may have changed, or may be hidden by added programs of the same name."""
    found = set[str]()
    for kind, path in changed:
        for place, folder in enumerate(folders):
            if kind == "A" and posixpath.dirname(path) == folder:
                found.update(folders[place:])
            elif _is_at_or_below(path, folder) or _is_at_or_below(folder, path):
                found.add(folder)
    return [folder for folder in folders if folder in found]


def _is_at_or_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


@asynccontextmanager
async def _original(client: ContainerClient, image: str) -> AsyncIterator[str]:
    """Create a container of the image, which is not started, and yield its name. The end of the block removes it.

    Raises:
        SandboxFailed: the engine fails.
    """
    name = f"deltarunner-{secrets.token_hex(6)}"
    try:
        with anyio.CancelScope(shield=True):
            arguments = [f"--name={name}", own_label(), "--network=none", image, "true"]
            made = await client.call("create", *arguments)
        if not made.ok:
            raise SandboxFailed(f"image {image!r:.40} cannot be opened: {made.error}. {_CHECK}")
        yield name
    finally:
        await remove_container(client, name)


async def _copy(client: ContainerClient, name: str, folder: str, file: IO[bytes], failures: list[str]) -> None:
    """Write the archive of a folder of a container into a file; write nothing if the folder does not exist."""
    done = await client.call("cp", f"{name}:{folder}/.", "-", into=file, most_bytes=FOLDER_BYTES, seconds=COPY_SECONDS)
    file.seek(0)
    if done.ok:
        return
    error = file_error(done, folder, "cannot be read in the image")
    if not isinstance(error, FileNotFoundError):
        failures.append(str(error))
    file.truncate()


def _pack(found: Mapping[str, IO[bytes]], changed: Sequence[tuple[str, str]], file: IO[bytes]) -> None:
    """Write the programs of all folders into one archive, whose names begin at the root folder."""
    places: dict[str, list[str]] = {}
    with tarfile.open(fileobj=file, mode="w") as archive:
        for folder, packed in found.items():
            for member, content in _programs(packed):
                places.setdefault(member.name, []).append(folder)
                moved = copy.copy(member)
                moved.name = f"{folder[1:]}/{member.name}"
                if member.islnk():
                    moved.linkname = f"{folder[1:]}/{member.linkname.removeprefix('./')}"
                archive.addfile(moved, content)
        for _, path in changed:
            # A program that was added to an earlier folder would be found instead of the program of the image.
            folder, name = posixpath.split(path)
            later = [each for each in places.get(name, ()) if folder in found and _is_before(folder, each, found)]
            if later and folder not in places[name]:
                link = tarfile.TarInfo(path[1:])
                link.type, link.linkname = tarfile.SYMTYPE, f"{later[0]}/{name}"
                archive.addfile(link)
        if any(path == PRELOADED for _, path in changed):
            archive.addfile(tarfile.TarInfo(PRELOADED[1:]), io.BytesIO())


def _is_before(folder: str, other: str, folders: Mapping[str, object]) -> bool:
    order = list(folders)
    return order.index(folder) < order.index(other)


def _programs(packed: IO[bytes]) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    """Yield the files and links that are directly in a packed folder; nothing for an empty archive."""
    if not packed.read(1):
        return
    packed.seek(0)
    with tarfile.open(fileobj=packed) as archive:
        for member in archive:
            member.name = posixpath.normpath(member.name)
            if "/" not in member.name and (member.isreg() or member.issym() or member.islnk()):
                yield member, archive.extractfile(member) if member.isreg() else None
