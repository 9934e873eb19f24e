"""An environment for an agent program in a sandbox. By default, the program reaches only its episode's endpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from runner.endpoint.endpoint import Endpoint
from runner.endpoint.programs import FinishedProgram
from runner.environment.program import Program
from runner.errors import BadOption
from runner.sandbox.containers import default_provider
from runner.sandbox.sandbox import Sandbox, SandboxOptions

__all__ = ["SandboxedProgram"]

CHECK_SECONDS = 220.0
"""Time limit of the check. It is shorter than the default of `Limits(reward_seconds=)`, which also includes the restart
of the sandbox before the check.
"""


class SandboxedProgram(Program):
    """An agent program in a sandbox. It gets the task's prompt, and a check command in the sandbox decides the reward.

    The program is in the image. The contents of `copy` are copied to the working folder.
    """

    runs_here = False
    """False, since the program is in the image and not on this machine."""

    def __init__(
        self,
        agent: str,
        sandbox: str,
        check: str = "",
        copy: str = "",
        memory_mb: int = 2048,
        cpus: float = 1,
        processes: int = 512,
        disk_mb: int | None = None,
        network: str = "none",
        user: str = "",
        as_left: bool = False,
        **program: Any,
    ) -> None:
        """Create the environment.

        Args:
            agent: as in `Program`.
            sandbox: the name of an image, or a folder with a Dockerfile.
            check: a command that runs in the working folder of the sandbox, and exits with 0 if the task is solved.
            copy: the folder whose contents are copied to the working folder.
            memory_mb: memory in MiB.
            cpus: processor cores.
            processes: maximum number of processes.
            disk_mb: space for files in MiB, None for no limit; an error if the container engine cannot limit it.
            network: "none", so that the program reaches only its endpoint, or "internet".
            user: the user of the program and of the copied files; the check is then run by root. By default
                everything is run by the user of the image.
            as_left: check the sandbox as the program left it. By default, all processes of the sandbox are ended and
                the programs of the image are restored before the check.
            program: further arguments of `Program`.

        Raises:
            BadOption: an option is invalid.
            BadEnvironment: `agent`, `check` or `copy` cannot be used.
        """
        if program.get("wrap"):
            raise BadOption(f"wrap={program['wrap']!r:.80} and sandbox={sandbox!r:.80}: give one of them.")
        super().__init__(agent, check, copy, **program)
        self._as_left = as_left
        self._check_user = "0" if user else None
        self._options = SandboxOptions(
            image=sandbox,
            memory_mb=memory_mb,
            cpus=cpus,
            processes=processes,
            disk_mb=disk_mb,
            network=network,
            user=user or None,
        )
        self.sandbox: Sandbox
        """The sandbox; set from `setup()` on."""

    async def lifespan(self) -> AsyncIterator[None]:
        """Find or build the image, and open one sandbox of it as a test, before the first episode."""
        await default_provider().prepare(self._options)
        yield

    async def setup(self) -> None:  # type: ignore[override]  # a hook may be synchronous or not
        """Open the sandbox, and copy the contents of `copy` into it."""
        options = {name: getattr(self._options, name) for name in self._options.__slots__}
        self.sandbox = await self.episode.sandbox(at_once=self.programs, **options)
        if self.copy is not None:
            await self.sandbox.upload(self.copy, ".")

    async def _run(self, endpoint: Endpoint, argv: list[str]) -> FinishedProgram:
        return await endpoint.run(argv, sandbox=self.sandbox, check=self.code)

    async def _is_solved(self) -> bool:
        if not self._as_left:
            await self.sandbox.restore()
        return (await self.sandbox.exec(self.checking, seconds=CHECK_SECONDS, user=self._check_user)).ok
