"""Harbor tasks as an environment: an instruction, a sandbox, and a verifier that writes the reward."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

import anyio

from runner.checked import is_number
from runner.concurrency.clocks import loop_time
from runner.environment.environment import Environment
from runner.environment.program import PROMPT, fill_names, split_command
from runner.episode.conversation import Conversation
from runner.episode.serving import serving_options
from runner.errors import BadEnvironment, BadTask, SandboxFailed, VerifierFailed
from runner.interop.harbor_tasks import (
    SOLUTION_SCRIPT,
    TEST_SCRIPT,
    HarborTask,
    find_task_folders,
    interpreter_of,
    read_task,
    unsupported,
)
from runner.interop.terminal import GRACE_SECONDS, TOOL_OUTPUT_BYTES, shell_command
from runner.options import Limits
from runner.sandbox.client import output_tail
from runner.sandbox.containers import default_provider
from runner.sandbox.sandbox import Sandbox, SandboxProvider
from runner.scoring import metric, reward
from runner.tasks import Task
from runner.tools.tool import tool

__all__ = ["Harbor", "HarborCheck", "check_tasks"]

LOG_FOLDER: Final = "/logs/verifier"
"""Folder in which the verifier writes the reward."""

SETUP_SECONDS: Final = 1200.0
"""Time limit for making a sandbox, including its health check."""

CHECKS_AT_ONCE_COUNT: Final = 4
"""Maximum number of tasks that `check_tasks` checks at the same time."""

MAX_NAMED_COUNT: Final = 10
"""Maximum number of tasks that an error names."""

_CLEAN: Final = (
    "rm -rf /tests /logs/verifier && mkdir -p /logs/verifier && chmod 1777 /logs && chmod 755 /logs/verifier"
    ' && chown "$0" /logs/verifier'
)
"""A command that empties the folders of the verifier. After it, only root and the user `$0` can write a reward."""

REWARD_FILES: Final = ("reward.json", "reward.txt")
NOT_STARTED_CODES: Final = (126, 127)
"""Exit codes of a shell for a program that cannot be started."""


class Harbor(Environment):
    """A folder of Harbor tasks. The model has one tool, `bash`, or an agent program plays in the sandbox.

    The verifier runs after the play, and writes the reward. If the verifier writes no reward, it runs again in an
    untouched sandbox. If it writes a reward there, the play has broken the verifier, and the reward is 0.
    Otherwise the task is wrong, and the episode fails with `VerifierFailed`.
    """

    limits = Limits(turns=100, setup_seconds=SETUP_SECONDS)
    named_setting: ClassVar[str] = "folder"
    """Name of the setting whose value follows the colon in `harbor:FOLDER`."""

    def __init__(
        self,
        folder: str,
        agent: str = "",
        seconds: float = 120,
        at_once: int = 0,
        skip_unsupported: bool = False,
        as_left: bool = False,
        storage: bool = False,
        train: bool | None = None,
        system_as_user: bool = False,
        overflow: str = "tell",
        sent_history: str = "append",
    ) -> None:
        """Choose the tasks and the player.

        Args:
            folder: a task folder of Harbor, or a folder that contains such folders.
            agent: the command of an agent program in the image; `{prompt}` is replaced by the instruction. By
                default, the model plays with the tool `bash`.
            seconds: the time limit of each call of `bash`.
            at_once: maximum number of episodes that have sandboxes at the same time; 0 for 4 per core.
            skip_unsupported: leave out tasks with requirements that are not supported. By default they are an error.
            as_left: accept the reward of the sandbox as the play left it. By default, a reward above 0 is measured
                again, after all processes have ended and the programs of the image are restored. If the second
                reward is lower, it counts, unless the second reward of the task's own solution is lower too, as for a
                task about a running server.
            storage: limit the disk of each sandbox to the task's `storage_mb`; an error if the container engine cannot
                limit it.
            train: for an agent program: True trains all threads, False none, and None the threads with tools.
            system_as_user: for an agent program: change system messages after the beginning to user messages.
            overflow: for an agent program: if a history does not fit, "tell" the program, or "end" the episode.
            sent_history: for an agent program: "append" continues from the sampled ids; "client" renders the history
                that the program sends.

        Raises:
            BadEnvironment: the command of `agent` is invalid.
            BadOption: another option is invalid.
        """
        self._serving = serving_options(train, system_as_user, overflow, sent_history)
        self._argv = split_command("agent", agent) if agent else []
        if self._argv and not any(PROMPT in each for each in self._argv):
            raise BadEnvironment(f"agent={agent!r:.80}: the command must contain {PROMPT}.")
        self.folder = Path(folder)
        """The folder of the tasks."""
        self.skip_unsupported = skip_unsupported
        """True to leave out tasks that cannot be played."""
        self._seconds, self._at_once, self._as_left, self._storage = seconds, at_once, as_left, storage
        self._harbor: HarborTask
        self.sandbox: Sandbox
        """The sandbox; set from `setup()` on."""
        self._scores: Mapping[str, float] = {}

    def tasks(self) -> Iterable[Task]:
        """The tasks of the folder.

        Raises:
            BadOption: there is no task folder.
            BadTask: a task cannot be played.
        """
        return [
            Task(id=name, prompt=task.prompt, info={"folder": str(task.folder), **task.metadata})
            for name, task in supported_tasks(self.folder, skip=self.skip_unsupported).items()
        ]

    async def lifespan(self) -> AsyncIterator[dict[str, bool]]:
        """Check that a container engine works. The yielded dict keeps properties of tasks during the run."""
        await default_provider().check()
        yield {}

    async def setup(self) -> None:
        self._harbor = task = read_task(Path(self.task.info["folder"]), storage=self._storage)
        self.limits = replace(
            self.limits,
            seconds=task.agent_seconds,
            tool_seconds=self._seconds + GRACE_SECONDS,
            # `verified()` runs the verifier twice in this sandbox, and twice in a second one after the task's solution.
            # The solution has the time limit `agent_seconds`.
            reward_seconds=4 * (task.verifier_seconds + GRACE_SECONDS) + task.agent_seconds,
        )
        options = {name: getattr(task.options, name) for name in task.options.__slots__}
        self.sandbox = await self.episode.sandbox(at_once=self._at_once or None, **options)
        await _wait_until_healthy(task, self.sandbox)
        if self._argv:
            self.tools = []

    async def rollout(self, conversation: Conversation) -> None:
        """Play with the tool, or run the agent program."""
        if not self._argv:
            await super().rollout(conversation)
            return
        async with self.episode.serve(**self._serving) as endpoint:
            known = {PROMPT: self._harbor.prompt, "{model}": endpoint.model, "{base_url}": endpoint.base_url}
            argv = [fill_names(each, known) for each in self._argv]
            await endpoint.run(argv, sandbox=self.sandbox, user=self._harbor.agent_user, check=False)

    @tool
    async def bash(self, command: str) -> str:
        """Run a shell command in the sandbox.

        Args:
            command: The command. Each call starts in the same folder, in a new shell.
        """
        argv, user = shell_command(f"exec 2>&1\n{command}"), self._harbor.agent_user
        return str(await self.sandbox.exec(argv, seconds=self._seconds, user=user, output_bytes=TOOL_OUTPUT_BYTES))

    @reward
    async def verified(self) -> float:
        """The verifier's reward, or the second reward if that one counts; 0 if the play broke the verifier."""
        try:
            self._scores = await verify(self._harbor, self.sandbox)
        except VerifierFailed:
            if not await self._known("works", self._verifier_works):
                raise
            self._scores = {"reward": 0.0, "broken": 1.0}
        first = self._scores["reward"]
        if first > 0 and not self._as_left:
            again = await _verified_again(self._harbor, self.sandbox)
            if again < first and await self._known("holds", self._solution_holds):
                self._scores = {**self._scores, "reward": again, "first": first}
        return self._scores["reward"]

    @metric
    def verifier(self) -> dict[str, float]:
        """The numbers that the verifier wrote in addition to the reward.

        `broken` is 1 if the play broke the verifier. `first` is the first reward, if a lower second reward counts.
        """
        return {name: value for name, value in self._scores.items() if name != "reward"}

    async def _known(self, what: str, find: Callable[[], Awaitable[bool]]) -> bool:
        """Return the property `what` of the task. `find` computes the property, which is then kept during the run."""
        known, name = self.shared, f"{what} {self._harbor.folder}"
        if name not in known:
            known[name] = await find()
        return bool(known[name])

    async def _verifier_works(self) -> bool:
        """True if the verifier writes a reward in an untouched sandbox of the task."""
        try:
            async with default_provider().open(self._harbor.options) as untouched:
                await _wait_until_healthy(self._harbor, untouched)
                await verify(self._harbor, untouched)
        except VerifierFailed:
            return False
        return True

    async def _solution_holds(self) -> bool:
        """True unless the second reward of the task's own solution is lower than the first.

        The result is also True if there is no solution, or if the solution gets no first reward.
        """
        if not self._harbor.has_solution:
            return True
        try:
            async with default_provider().open(self._harbor.options) as other:
                await _wait_until_healthy(self._harbor, other)
                await _solve(self._harbor, other)
                first = (await verify(self._harbor, other))["reward"]
                return await _verified_again(self._harbor, other) >= first
        except VerifierFailed:
            return True


def supported_tasks(folder: Path, *, skip: bool = False) -> dict[str, HarborTask]:
    """Return the tasks of a folder by id.

    Args:
        folder: a task folder, or a folder that contains such folders.
        skip: True to leave out tasks with requirements that are not supported.

    Raises:
        BadOption: there is no task folder.
        BadTask: a task is invalid, or, without `skip`, tasks have requirements that are not supported. The message
            names the first `MAX_NAMED_COUNT` of these tasks.
    """
    folders = find_task_folders(folder)
    refused = {name: needed for name, path in folders.items() if (needed := unsupported(path))}
    if refused and not skip:
        named = [f"{name} needs {', '.join(needed)}" for name, needed in list(refused.items())[:MAX_NAMED_COUNT]]
        more = f"; and {len(refused) - len(named)} more" if len(refused) > len(named) else ""
        raise BadTask(
            f"harbor:{folder}: {len(refused)} of {len(folders)} tasks need unsupported features: {'; '.join(named)}"
            f"{more}. Leave them out with --set skip_unsupported=true."
        )
    return {name: read_task(path) for name, path in folders.items() if name not in refused}


async def verify(task: HarborTask, sandbox: Sandbox) -> dict[str, float]:
    """Run the verifier of a task, and return its numbers; one of them is `reward`.

    Raises:
        VerifierFailed: the verifier cannot run or is ended at a limit, or it wrote no reward or values other than
            finite numbers.
    """
    cleaned = await sandbox.exec(["sh", "-c", _CLEAN, task.verifier_user], user="0", cwd="/")
    if not cleaned.ok or any([await _exists(sandbox, f"{LOG_FOLDER}/{name}") for name in REWARD_FILES]):
        raise VerifierFailed(f"{LOG_FOLDER} cannot be emptied for the verifier: {output_tail(str(cleaned))}")
    try:
        await sandbox.upload(task.folder / "tests", "/tests")
    except OSError as error:
        raise VerifierFailed(f"the tests cannot be copied into /tests of the sandbox: {error}") from error
    argv = [*interpreter_of(task.folder / TEST_SCRIPT), "/tests/test.sh"]
    done = await sandbox.exec(
        argv, seconds=task.verifier_seconds, env=task.verifier_env, user=task.verifier_user, output_bytes=64 * 1024
    )
    if done.ended_by != "exit":
        raise VerifierFailed(f"the verifier was ended at its limit ({done.ended_by}): {output_tail(str(done))}")
    if done.code in NOT_STARTED_CODES:
        raise VerifierFailed(f"the verifier cannot be started: {output_tail(str(done))}")
    for name, read in zip(REWARD_FILES, (read_json, _read_text), strict=True):
        try:
            content = (await sandbox.read(f"{LOG_FOLDER}/{name}")).decode("utf-8", "replace").strip()
        except OSError:
            continue
        try:
            return read(content)
        except ValueError as error:
            raise VerifierFailed(
                f"{LOG_FOLDER}/{name} holds no valid reward ({error}): correct the verifier. It wrote: "
                f"{output_tail(str(done))}"
            ) from None
    raise VerifierFailed(f"the verifier wrote no reward into {LOG_FOLDER}: {output_tail(str(done))}")


async def _verified_again(task: HarborTask, sandbox: Sandbox) -> float:
    """End all processes, restore the programs of the image, and verify again.

    The result is the reward, or 0 if the verifier fails.
    """
    await sandbox.restore()
    try:
        return (await verify(task, sandbox))["reward"]
    except VerifierFailed:
        return 0.0


async def _exists(sandbox: Sandbox, path: str) -> bool:
    """Return True if a file or folder exists, even an unreadable one. No command runs inside the sandbox."""
    try:
        await sandbox.read(path, most_bytes=0)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def _read_text(content: str) -> dict[str, float]:
    try:
        return {"reward": _finite("it", float(content))}
    except ValueError:
        raise ValueError(f"its content is {content!r:.80}, and not one finite number") from None


def read_json(content: str) -> dict[str, float]:
    """Return the numbers of a `reward.json`; one of them is `reward`.

    If there is only one number, it is the reward, even under another key.

    Raises:
        ValueError: the content is neither a finite number nor a non-empty object of finite numbers, or it is an
            object of several numbers without the key `reward`.
    """
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError(f"its content is {content!r:.80}, which is not JSON") from None
    if is_number(found):
        found = {"reward": found}
    if not isinstance(found, dict) or not found:
        raise ValueError(f"its content is {content!r:.80}, and not an object of numbers")
    numbers = {str(name): _finite(str(name), value) for name, value in found.items()}
    if "reward" in numbers:
        return numbers
    if len(numbers) > 1:
        raise ValueError(f"none of its keys is 'reward': {', '.join(numbers)}")
    return {"reward": next(iter(numbers.values()))}


def _finite(name: str, value: Any) -> float:
    try:
        number = float(value) if is_number(value) else math.nan
    except OverflowError:  # for example for an integer of 400 digits
        number = math.inf
    if isinstance(value, bool) or not math.isfinite(number):
        raise ValueError(f"{name} is {value!r:.60}, and not a finite number")
    return number


async def _wait_until_healthy(task: HarborTask, sandbox: Sandbox) -> None:
    check = task.healthcheck
    if check is None:
        return
    failures, start_ends = 0, loop_time() + check.start_seconds
    while True:
        is_start = loop_time() < start_ends
        done = await sandbox.exec(["sh", "-c", check.command], seconds=check.timeout_seconds)
        if done.ok:
            return
        failures += not is_start
        if failures >= check.retries:
            raise SandboxFailed(f"the health check {check.command!r:.80} fails: {output_tail(str(done))}")
        await anyio.sleep(check.start_interval_seconds if is_start else check.interval_seconds)


# --- a check of the tasks themselves


@dataclass(frozen=True, slots=True)
class HarborCheck:
    """The rewards of a task without a model: after its own solution, and after no action."""

    solution: float | None
    """Reward of the task's solution; None without a solution, or if the solution, verifier or sandbox failed."""
    nothing: float | None
    """Reward without any action; None if the verifier or the sandbox failed."""
    errors: tuple[str, ...] = ()
    """Errors of the solution, of the verifier and of the sandboxes; also a missing solution."""

    @property
    def ok(self) -> bool:
        """True if the reward is 1 after the solution and 0 without any action, and there were no errors."""
        return self.solution == 1 and self.nothing == 0 and not self.errors


async def check_task(task: HarborTask, provider: SandboxProvider) -> HarborCheck:
    """Return the rewards of a task after its own solution and after no action, each in a new sandbox."""
    errors: list[str] = []

    async def scored(*, solves: bool) -> float | None:
        try:
            async with provider.open(task.options) as sandbox:
                await _wait_until_healthy(task, sandbox)
                if solves:
                    await _solve(task, sandbox)
                return (await verify(task, sandbox))["reward"]
        except (SandboxFailed, VerifierFailed) as error:
            errors.append(f"{'solution' if solves else 'no action'}: {error}")
            return None

    if not task.has_solution:
        errors.append(f"the task has no {SOLUTION_SCRIPT}")
    solution = await scored(solves=True) if task.has_solution else None
    return HarborCheck(solution, await scored(solves=False), tuple(errors))


async def check_tasks(
    folder: Path, report: Callable[[str, HarborCheck], object], *, skip: bool = False
) -> list[HarborCheck]:
    """Check each task of a folder, and call `report(id, check)` after each. Return the checks in order of completion.

    Raises:
        BadOption: there is no task folder.
        BadTask: a task cannot be played.
        SandboxUnavailable: no container engine works.
    """
    provider = default_provider()
    tasks = supported_tasks(folder, skip=skip)
    await provider.check()
    limiter, found = anyio.CapacityLimiter(CHECKS_AT_ONCE_COUNT), list[HarborCheck]()

    async def check(name: str, task: HarborTask) -> None:
        async with limiter:
            checked = await check_task(task, provider)
        found.append(checked)
        report(name, checked)

    async with anyio.create_task_group() as group:
        for name, task in tasks.items():
            group.start_soon(check, name, task)
    return found


async def _solve(task: HarborTask, sandbox: Sandbox) -> None:
    """Run the solution of a task in a sandbox; raise VerifierFailed if the solution fails."""
    await sandbox.upload(task.folder / "solution", "/solution")
    argv = [*interpreter_of(task.folder / SOLUTION_SCRIPT), "/solution/solve.sh"]
    done = await sandbox.exec(argv, seconds=task.agent_seconds, env=task.solution_env, user=task.agent_user)
    if not done.ok:
        raise VerifierFailed(f"{shlex.join(argv)} failed: {output_tail(str(done))}")
