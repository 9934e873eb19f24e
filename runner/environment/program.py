"""An agent program as an environment: a command, a working folder, and a check. It needs no Python code."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import ClassVar

from runner.endpoint.endpoint import Endpoint
from runner.endpoint.programs import FinishedProgram, program_environ, run_program, write_files
from runner.environment.environment import Environment
from runner.episode.conversation import Conversation
from runner.episode.serving import serving_options
from runner.errors import BadEnvironment
from runner.options import Limits
from runner.scoring import reward

__all__ = ["PROMPT", "Program", "fill_names", "split_command"]

PROMPT = "{prompt}"
"""Placeholder of the task's prompt in a command."""


class Program(Environment):
    """An existing agent program. It gets the task's prompt and a folder, and a check command decides the reward.

    The folder is a copy of the folder `copy`, or empty. The reward is 1 if the check exits with 0. Without a check, the
    program's exit code counts instead. A program that fails (see `code`) has no reward.
    """

    limits = Limits(turns=200, seconds=3600)

    runs_here: ClassVar[bool] = True
    """True if the program runs on this machine, so that its command must exist here. A wrapped program may run
    elsewhere.
    """

    def __init__(
        self,
        agent: str,
        check: str = "",
        copy: str = "",
        wrap: str = "",
        programs: int = 0,
        code: bool = True,
        train: bool | None = None,
        system_as_user: bool = False,
        overflow: str = "tell",
        sent_history: str = "append",
    ) -> None:
        """Create the environment.

        Args:
            agent: the command; `{prompt}` is replaced by the task's prompt, `{model}` by the model's name, `{base_url}`
                by the endpoint's URL. The command is split as in a shell, but does not run in a shell.
            check: a command that exits with 0 in the folder if the program solved the task; "" for no check.
            copy: the folder to copy for each episode; "" to begin with an empty folder.
            wrap: a command that runs the program and the check, such as `bwrap ...`; `{folder}` is replaced by the
                working folder, `{home}` by HOME.
            programs: maximum number of concurrent programs; 0 for four per core.
            code: True if a program that does not exit with 0 fails; False if only the check decides.
            train: True to train on all threads, False on none, None on threads with tools.
            system_as_user: True to turn later system messages into user messages.
            overflow: if a history does not fit: "tell" returns an error to the program, "end" ends the episode.
            sent_history: "append" continues the sampled history, "client" the history that the program sends.

        Raises:
            BadEnvironment: a command is invalid or its program is missing, or `copy` is not an existing folder.
            BadOption: another value is invalid.
        """
        self._serving = serving_options(train, system_as_user, overflow, sent_history)
        self.argv = split_command("agent", agent)
        if not any(PROMPT in each for each in self.argv):
            raise BadEnvironment(
                f"agent={agent!r:.80}: the command must contain {PROMPT}, such as 'claude -p {PROMPT}'."
            )
        self.checking = split_command("check", check) if check else []
        self.copy = Path(copy) if copy else None
        if self.copy is not None and not self.copy.is_dir():
            raise BadEnvironment(f"copy={copy!r} is not an existing folder: give the folder to copy for each episode.")
        self.wrap = split_command("wrap", wrap) if wrap else []
        if self.wrap:
            _refuse_missing("wrap", wrap, self.wrap)
        elif self.runs_here:
            _refuse_missing("agent", agent, self.argv)
            _refuse_missing("check", check, self.checking)
        self.programs = programs or 4 * (os.cpu_count() or 1)
        self.code = code
        self.folder = Path()
        self.finished: FinishedProgram | None = None

    def setup(self) -> None:
        temporary = tempfile.TemporaryDirectory(prefix="deltarunner-", ignore_cleanup_errors=True)
        folder = self.episode.exit_stack.enter_context(temporary)
        write_files(Path(folder))
        self.folder = Path(folder) / "work"
        if self.copy is None:
            self.folder.mkdir()
        else:
            shutil.copytree(self.copy, self.folder, symlinks=True)

    async def rollout(self, conversation: Conversation) -> None:
        prompt = self.task.prompt if isinstance(self.task.prompt, str) else ""
        if not prompt:
            raise BadEnvironment(f"task {self.task.id!r}: an agent program needs a prompt that is a non-empty string.")
        limiter = self.episode.limiter("programs", self.programs)
        async with limiter, self.episode.serve(**self._serving) as endpoint:
            known = {PROMPT: prompt, "{model}": endpoint.model, "{base_url}": endpoint.base_url}
            argv = [fill_names(each, known) for each in self.argv]
            self.finished = await self._run(endpoint, argv)

    @reward
    async def passes(self) -> float:
        """1 if the check passes, else 0. Without a check, 1 if the program exits with 0, else 0."""
        if not self.checking:
            return float(self.finished is not None and self.finished.ok)
        return float(await self._is_solved())

    async def _run(self, endpoint: Endpoint, argv: list[str]) -> FinishedProgram:
        wrap = self._wrapping(await endpoint.home())
        return await endpoint.run(argv, cwd=self.folder, wrap=wrap, check=self.code)

    async def _is_solved(self) -> bool:
        home = self.folder.parent
        argv = [*self._wrapping(home), *self.checking]
        async with run_program(argv, cwd=self.folder, env=program_environ(home)) as checking:
            return (await checking.wait()).ok

    def _wrapping(self, home: Path) -> list[str]:
        known = {"{folder}": str(self.folder), "{home}": str(home)}
        return [fill_names(each, known) for each in self.wrap]


def split_command(name: str, command: str) -> list[str]:
    """Split a command as a shell does.

    Raises:
        BadEnvironment: the command is empty, or its quotes are invalid. The message calls the command `name`.
    """
    try:
        argv = shlex.split(command)
    except ValueError as error:
        raise BadEnvironment(f"{name}={command!r:.80}: invalid shell syntax ({error}): correct its quotes.") from None
    if not argv:
        raise BadEnvironment(f"{name}={command!r:.80}: give a command.")
    return argv


def _refuse_missing(name: str, command: str, argv: list[str]) -> None:
    """Raise BadEnvironment if the program of a command is not on PATH.

    A program given with a folder is not checked, since the copied folder may contain it.
    """
    if argv and not os.path.dirname(argv[0]) and shutil.which(argv[0]) is None:
        raise BadEnvironment(f"{name}={command!r:.80}: the program {argv[0]!r} is not on PATH: install it.")


def fill_names(text: str, known: dict[str, str]) -> str:
    """Return the text with each placeholder replaced. Placeholders inside a replacement stay."""
    parts = re.split("(" + "|".join(map(re.escape, known)) + ")", text)
    return "".join(known.get(part, part) for part in parts)
