"""Restarts of a sandbox, which end all its processes, and the programs of the image that it has afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from runner import Containers, SandboxOptions
from runner.sandbox.client import CallResult, ContainerClient
from tests.sandbox.engines import IMAGE_FOLDER, sh

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_processes_that_die_slowly_do_not_end_the_sandbox(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = ContainerClient.call
    slow = iter(["restart", "stop", "stop"])
    next_slow = [next(slow)]

    async def dies_slowly(client: ContainerClient, *arguments: str, **options: Any) -> CallResult:
        if arguments[0] != next_slow[0]:
            return await call(client, *arguments, **options)
        next_slow[0] = next(slow, "")
        await call(client, "kill", arguments[-1])
        return CallResult(125, b"", b"Error: given PIDs did not die within timeout")

    async with Containers(engine).open(SandboxOptions(image=IMAGE_FOLDER, memory_mb=64)) as sandbox:
        monkeypatch.setattr(ContainerClient, "call", dies_slowly)
        await sandbox.restart()
        assert not next_slow[0]
        assert (await sandbox.exec(["echo", "next"])).stdout == "next\n"


@pytest.mark.whole
@pytest.mark.parametrize("left", ["rm /bin/sh", "rm /bin/sh /bin/cat; ln -s /bin/true /bin/sh", "rm -r /bin"])
async def test_a_restart_needs_no_program_that_is_left(engine: str, left: str) -> None:
    async with Containers(engine).open(SandboxOptions(image=IMAGE_FOLDER, memory_mb=64)) as sandbox:
        await sandbox.exec(sh(f"echo kept >/scratch/file; {left}"))
        await sandbox.restart()
        assert (await sandbox.exec(sh("cat /scratch/file"))).stdout == "kept\n"


@pytest.mark.whole
async def test_failed_restart_of_a_sandbox_is_reported_by_each_command(engine: str) -> None:
    async with Containers(engine).open(SandboxOptions(image=IMAGE_FOLDER, memory_mb=64)) as sandbox:
        await sandbox.exec(sh("cd /; rm -r /scratch; ln -s /scratch /scratch"))
        for again in (sandbox.restart, sandbox.restore, sandbox.restore):
            await again()
            done = await sandbox.exec(["true"])
            assert (done.code, done.ok) == (126, False)
            assert "does not start again" in done.stderr
        with pytest.raises(OSError, match="'/none' cannot be read"):
            await sandbox.read("/none")


@pytest.mark.whole
async def test_restored_programs_are_those_of_the_image(engine: str) -> None:
    async with Containers(engine).open(SandboxOptions(image=IMAGE_FOLDER, memory_mb=64)) as sandbox:
        before = (await sandbox.exec(sh("ls -l /bin | cut -c1-10,57-"))).stdout
        change = (
            "rm /bin/cat; ln -sf /tmp/x /bin/ls; echo x >/bin/new; echo /x.so >/etc/ld.so.preload; echo 1 >/scratch/a"
        )
        await sandbox.exec(sh(f"{change}; sleep 906 & mkdir -p /usr/local/bin; ln -s /bin/true /usr/local/bin/wc"))
        await sandbox.restore()
        after = (await sandbox.exec(sh("rm /bin/new; ls -l /bin | cut -c1-10,57-"))).stdout
        assert after == before
        seen = await sandbox.exec(sh("cat /etc/ld.so.preload /scratch/a; echo 12 | wc -c; ps | grep -c 'sleep 90[6]'"))
        assert seen.stdout == "1\n3\n0\n"


@pytest.mark.whole
async def test_libraries_after_a_restart_are_not_those_of_the_image(engine: str) -> None:
    async with Containers(engine).open(SandboxOptions(image=IMAGE_FOLDER, memory_mb=64)) as sandbox:
        library = (await sandbox.exec(sh("ls /lib/*/libtinfo.so.6"))).stdout.strip()
        refused = await sandbox.exec(sh(f"echo x >>{library}"), user="model")
        assert "ermission denied" in refused.stderr
        await sandbox.exec(sh(f"echo x >>{library}; echo y >/lib/added.so; mkdir /etc/new"))
        await sandbox.restore()
        left = await sandbox.exec(sh(f"tail -c 2 {library}; cat /lib/added.so; ls -d /etc/new"))
        assert left.stdout == "x\ny\n/etc/new\n"


@pytest.mark.whole
async def test_a_folder_in_place_of_a_program_fails_later_commands(engine: str) -> None:
    async with Containers(engine).open(SandboxOptions(image=IMAGE_FOLDER, memory_mb=64)) as sandbox:
        await sandbox.exec(sh("rm /bin/cat; mkdir /bin/cat"))
        await sandbox.restore()
        done = await sandbox.exec(["true"])
        assert done.code == 126
        assert "the programs of the image cannot be put back" in done.stderr
