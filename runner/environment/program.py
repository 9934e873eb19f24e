"""An agent program as an environment, without a line of Python: a command, a folder to work in, and a check."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
from pathlib import Path

from runner.endpoint.programs import FinishedProgram, furnish, own_environ, running
from runner.environment.environment import Environment
from runner.episode.conversation import Conversation
from runner.episode.serving import check_serving
from runner.errors import BadEnvironment
from runner.options import Limits
from runner.scoring import reward

__all__ = ["Program"]

PROMPT = "{prompt}"


class Program(Environment):
    """An agent program that somebody else wrote: it is given a task's prompt and a folder, and a check decides.

    The folder is a copy of `copy`. The reward is 1 where the check ends with 0, or where there is none, where the
    program does; a program that fails has no reward.
    """

    limits = Limits(turns=200, seconds=3600)

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
        """Say what is run.

        Args:
            agent: the command; `{prompt}` in it is the task's prompt, `{model}` the model's name, `{base_url}` the
                endpoint's. It is split as a shell does, and no shell runs it.
            check: a command that ends with 0 in the folder where the program did what it was asked.
            copy: the folder that each episode has a copy of.
            wrap: what both commands are put behind, such as `bwrap ...`; `{folder}` in it is where they work, `{home}`
                their HOME.
            programs: how many may run at once; 0 for four a core.
            code: a program that ends with another code than 0 fails; else the check decides alone.
            train: whether all of its threads are trained; None trains those that are offered tools.
            system_as_user: system messages after the beginning are put before the model as a user's.
            overflow: "tell" the program that its history does not fit, or "end" the episode.
            sent_history: "append" goes on from what the model said, "client" from what the program sends.
        """
        check_serving(overflow=overflow, history=sent_history, names=("overflow", "sent_history"))
        self.argv = _split("agent", agent)
        if not any(PROMPT in each for each in self.argv):
            raise BadEnvironment(
                f"agent={agent!r:.80}: say where the task's prompt goes, such as 'claude -p {PROMPT}'."
            )
        self.checking = _split("check", check) if check else []
        self.copy = Path(copy) if copy else None
        if self.copy is not None and not self.copy.is_dir():
            raise BadEnvironment(f"copy={copy!r}: there is no such folder.")
        self.wrap = _split("wrap", wrap) if wrap else []
        if self.wrap:  # what runs behind it may be there alone
            _refuse_missing("wrap", wrap, self.wrap)
        else:
            _refuse_missing("agent", agent, self.argv)
            _refuse_missing("check", check, self.checking)
        self.programs = programs or 4 * (os.cpu_count() or 1)
        self.code = code
        self.train = train
        self.system_as_user = system_as_user
        self.overflow = overflow
        self.sent_history = sent_history
        self.folder = Path()
        self.finished: FinishedProgram | None = None

    def setup(self) -> None:
        """Copy the folder."""
        temporary = tempfile.TemporaryDirectory(prefix="deltarunner-", ignore_cleanup_errors=True)
        folder = self.episode.exit_stack.enter_context(temporary)
        furnish(Path(folder))
        self.folder = Path(folder) / "work"
        if self.copy is None:
            self.folder.mkdir()
        else:
            shutil.copytree(self.copy, self.folder, symlinks=True)

    async def rollout(self, conversation: Conversation) -> None:
        """Run the program."""
        prompt = self.task.prompt if isinstance(self.task.prompt, str) else ""
        if not prompt:
            raise BadEnvironment(f"task {self.task.id!r}: an agent program is given a prompt that is a string.")
        limiter = self.episode.limiter("programs", self.programs)
        serving = self.episode.serve(
            train=self.train,
            system_as_user=self.system_as_user,
            overflow=self.overflow,
            history=self.sent_history,
        )
        async with limiter, serving as endpoint:
            known = {PROMPT: prompt, "{model}": endpoint.model, "{base_url}": endpoint.base_url}
            argv = [_replace_names(each, known) for each in self.argv]
            wrap = self._wrapping(await endpoint.home())
            self.finished = await endpoint.run(argv, cwd=self.folder, wrap=wrap, check=self.code)

    @reward
    async def passes(self) -> float:
        """Whether the check passes."""
        if not self.checking:
            return float(self.finished is not None and self.finished.ok)
        home = self.folder.parent
        argv = [*self._wrapping(home), *self.checking]
        async with running(argv, cwd=self.folder, env=own_environ(home)) as checking:
            finished = await checking.wait()
        return float(finished.ok)

    def _wrapping(self, home: Path) -> list[str]:
        known = {"{folder}": str(self.folder), "{home}": str(home)}
        return [_replace_names(each, known) for each in self.wrap]


def _split(name: str, command: str) -> list[str]:
    try:
        argv = shlex.split(command)
    except ValueError as error:
        raise BadEnvironment(f"{name}={command!r:.80}: a shell could not split it ({error}).") from None
    if not argv:
        raise BadEnvironment(f"{name}={command!r:.80}: give a command.")
    return argv


def _refuse_missing(name: str, command: str, argv: list[str]) -> None:
    """Refuse a program that is looked for on PATH and not there; one with a path may come with the folder."""
    if argv and not os.path.dirname(argv[0]) and shutil.which(argv[0]) is None:
        raise BadEnvironment(f"{name}={command!r:.80}: there is no program {argv[0]!r} on PATH: install it.")


def _replace_names(text: str, known: dict[str, str]) -> str:
    """The text with names replaced, each once: what a prompt holds is not looked at."""
    parts = re.split("(" + "|".join(map(re.escape, known)) + ")", text)
    return "".join(known.get(part, part) for part in parts)
