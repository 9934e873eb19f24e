"""A provider of the tests, through the public protocol alone: its sandboxes are folders of this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from runner import (
    Environment,
    Executed,
    Outcome,
    Sandbox,
    SandboxFailed,
    SandboxOptions,
    SandboxProvider,
    ScriptedEngine,
    Task,
    reward,
    tool,
)
from runner.testing import call, play_many_async

pytestmark = [pytest.mark.anyio]


class Folder:
    """A sandbox whose commands run in a folder of this machine, each in its own session."""

    def __init__(self, root: Path, options: SandboxOptions) -> None:
        self.root, self._env = root, dict(options.env)
        self._sessions: list[int] = []

    async def exec(
        self,
        argv: Sequence[str],
        *,
        seconds: float | None = 60.0,
        input: bytes | str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        cwd: str | None = None,
        output_bytes: int = 1024 * 1024,
    ) -> Executed:
        given = (input.encode() if isinstance(input, str) else input) or b""
        variables = {"PATH": os.environ["PATH"], **self._env, **(env or {})}
        began = time.monotonic()

        def run() -> Executed:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self.root / (cwd or "."),
                env=variables,
                start_new_session=True,
            )
            self._sessions.append(process.pid)
            try:
                stdout, stderr = process.communicate(given, timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                stdout, stderr = process.communicate()
                taken = time.monotonic() - began
                return Executed(137, stdout.decode(), stderr.decode(), taken, ended_by="time")
            return Executed(process.returncode, stdout.decode(), stderr.decode(), time.monotonic() - began)

        return await anyio.to_thread.run_sync(run)

    async def read(self, path: str, *, most_bytes: int = 1024 * 1024) -> bytes:
        return await anyio.Path(self.root / path).read_bytes()

    async def write(self, path: str, content: bytes | str, *, mode: int = 0o644) -> None:
        await anyio.Path(self.root / path).write_bytes(content.encode() if isinstance(content, str) else content)

    async def upload(self, source: str | os.PathLike[str], path: str) -> None:
        await anyio.to_thread.run_sync(lambda: shutil.copytree(source, self.root / path, dirs_exist_ok=True))

    async def restart(self) -> None:
        for session in self._sessions:
            try:
                os.killpg(session, signal.SIGKILL)
            except ProcessLookupError:
                continue

    async def restore(self) -> None:
        await self.restart()  # its programs belong to this machine, and commands must not change them

    async def listen(self, port: int) -> socket.socket:
        raise SandboxFailed("a folder has no network of its own")


class Folders:
    """The provider of these sandboxes."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.opened = 0

    async def prepare(self, options: SandboxOptions) -> None:
        if options.image != "folder":
            raise SandboxFailed(f"image {options.image!r}: this provider has 'folder' only")

    @asynccontextmanager
    async def open(self, options: SandboxOptions) -> AsyncIterator[Sandbox]:
        await self.prepare(options)
        self.opened += 1
        root = self.home / str(self.opened)
        root.mkdir()
        sandbox = Folder(root, options)
        try:
            yield sandbox
        finally:
            await sandbox.restart()
            shutil.rmtree(root)


class Own(Environment):
    """An environment whose sandboxes come from another provider."""

    sandbox: Sandbox
    image = "folder"

    def __init__(self, provider: SandboxProvider, source: Path) -> None:
        self.provider, self.source = provider, source

    def tasks(self) -> list[Task]:
        return [Task(id=str(number), prompt="Write your number.") for number in range(3)]

    async def setup(self) -> None:
        self.sandbox = await self.episode.sandbox(self.image, provider=self.provider, env={"NUMBER": self.task.id})
        await self.sandbox.upload(self.source, "given")

    @tool
    async def bash(self, command: str) -> str:
        """Run a command."""
        return str(await self.sandbox.exec(["sh", "-c", command], seconds=1))

    @reward
    async def right(self) -> bool:
        await self.sandbox.restore()
        return (await self.sandbox.read("answer")).decode() == f"{self.task.id} given\n"


async def test_an_environment_plays_in_sandboxes_of_another_provider(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_text("given\n")
    provider = Folders(tmp_path / "home")
    provider.home.mkdir()
    replies: Any = [
        [call("bash", command='echo "$NUMBER $(cat given/file)" >answer')],
        [call("bash", command="echo begun; sleep 907")],
        "done",
    ]
    trajectories = await play_many_async(Own(provider, tmp_path / "source"), ScriptedEngine(replies), breaker=1)
    assert [(each.outcome, each.reward) for each in trajectories] == [(Outcome.COMPLETED, 1)] * 3
    for each in trajectories:
        results = [str(message["content"]) for message in each.messages if message["role"] == "tool"]
        assert results[1].startswith("begun\n[timed out after")
    assert provider.opened == 3
    assert list(provider.home.iterdir()) == []


async def test_a_provider_that_cannot_open_fails_its_episodes_alone(tmp_path: Path) -> None:
    class Other(Own):
        async def setup(self) -> None:
            self.image = "cloud" if self.task.id == "1" else "folder"
            await super().setup()

    (tmp_path / "source").mkdir()
    (tmp_path / "home").mkdir()
    replies: Any = [[call("bash", command='echo "$NUMBER given" >answer')], "done"]
    environment = Other(Folders(tmp_path / "home"), tmp_path / "source")
    played = {each.task.id: each for each in await play_many_async(environment, ScriptedEngine(replies))}
    assert "SandboxFailed: image 'cloud': this provider has 'folder' only" in played["1"].error
    assert [played[name].reward for name in ("0", "2")] == [1, 1]
