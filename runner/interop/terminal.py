"""A terminal as an environment: a sandbox, one tool that runs commands in it, and a command that checks the result."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from runner.environment.environment import Environment
from runner.errors import BadEnvironment
from runner.options import Limits
from runner.sandbox.containers import default_provider
from runner.sandbox.sandbox import Sandbox, SandboxOptions
from runner.scoring import reward
from runner.tools.tool import tool

__all__ = ["TOOL_OUTPUT_BYTES", "Terminal", "shell_command"]

TOOL_OUTPUT_BYTES: Final = 16 * 1024
"""Maximum number of bytes of a command's output that the model reads."""

GRACE_SECONDS: Final = 60.0
"""Time to start a command and to end its processes, in addition to the time limit of the command."""

_BASH_OR_SH: Final = 'if command -v bash >/dev/null 2>&1; then exec bash -c "$1"; else exec sh -c "$1"; fi'


def shell_command(command: str) -> list[str]:
    """Return the arguments that run a command in bash, or in sh if the sandbox has no bash."""
    return ["sh", "-c", _BASH_OR_SH, "sh", command]


class Terminal(Environment):
    """A sandbox with one tool, `bash`. A command in the sandbox decides the reward.

    This command is `info["check"]` of the task, or the argument `check` if the task has none. The reward is 1 if the
    command exits with 0, else 0.
    """

    def __init__(
        self,
        image: str,
        check: str = "",
        seconds: float = 60,
        memory_mb: int = 1024,
        cpus: float = 1,
        processes: int = 256,
        disk_mb: int | None = None,
        network: str = "none",
        upload: str = "",
        at_once: int = 0,
        user: str = "",
        as_left: bool = False,
    ) -> None:
        """Choose the sandbox.

        Args:
            image: the name of an image, or a folder with a Dockerfile.
            check: the command that exits with 0 if the task is solved, for tasks without `info["check"]`.
            seconds: the time limit of each command.
            memory_mb: memory in MiB.
            cpus: processor cores.
            processes: maximum number of processes.
            disk_mb: space for files in MiB, None for no limit; an error if the container engine cannot limit it.
            network: "none" or "internet".
            upload: a folder whose contents are copied to the working folder of each sandbox.
            at_once: maximum number of episodes that have sandboxes at the same time; 0 for 4 per core.
            user: the user of the model's commands and of the uploaded files; the check is then run by root. By default
                everything is run by the user of the image.
            as_left: check the sandbox as the model left it. By default, all processes of the sandbox are ended and the
                programs of the image are restored before the check.

        Raises:
            BadOption: an option of the sandbox is invalid.
            BadEnvironment: `upload` is not an existing folder.
        """
        self._check, self._seconds, self._folder, self._at_once = check, seconds, upload, at_once
        self._image = image
        self._options: dict[str, Any] = {
            "memory_mb": memory_mb,
            "cpus": cpus,
            "processes": processes,
            "disk_mb": disk_mb,
            "network": network,
            "user": user or None,
        }
        self._check_user, self._as_left = "0" if user else None, as_left
        SandboxOptions(image=image, **self._options)  # raises BadOption for invalid options
        if upload and not Path(upload).is_dir():
            raise BadEnvironment(f"upload={upload!r:.80}: this is not an existing folder: give an existing folder.")
        late = seconds + GRACE_SECONDS
        self.limits = Limits(turns=50, seconds=3600, tool_seconds=late, reward_seconds=late + 3 * GRACE_SECONDS)
        self.sandbox: Sandbox
        """The sandbox; set from `setup()` on."""

    async def lifespan(self) -> AsyncIterator[None]:
        """Find or build the image, and open one sandbox of it as a test, before the first episode."""
        await default_provider().prepare(SandboxOptions(image=self._image, **self._options))
        yield

    async def setup(self) -> None:
        if not self._check_command():
            raise BadEnvironment(
                f"task {self.task.id!r} has no check: give check=, or the command as 'check' in the task's info."
            )
        self.sandbox = await self.episode.sandbox(self._image, at_once=self._at_once or None, **self._options)
        if self._folder:
            await self.sandbox.upload(self._folder, ".")

    @tool
    async def bash(self, command: str) -> str:
        """Run a shell command in the sandbox.

        Args:
            command: The command. Each call starts in the same folder, in a new shell.
        """
        argv = shell_command(f"exec 2>&1\n{command}")
        return str(await self.sandbox.exec(argv, seconds=self._seconds, output_bytes=TOOL_OUTPUT_BYTES))

    @reward
    async def solved(self) -> bool:
        """True if the check command exits with 0."""
        argv = shell_command(self._check_command())
        if not self._as_left:
            await self.sandbox.restore()
        return (await self.sandbox.exec(argv, seconds=self._seconds, user=self._check_user)).ok

    def _check_command(self) -> str:
        return str(self.task.info.get("check") or self._check)
