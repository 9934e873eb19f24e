"""Player: single tasks and groups on a run that stays open, for trainers that choose the tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import anyio
from typing_extensions import Unpack

from runner import checked
from runner.concurrency.clocks import require_asyncio
from runner.engines.base import BaseEngine
from runner.environment.environment import Environment
from runner.environment.task_checks import TaskChecks
from runner.environment.task_requests import TaskRequest, TaskRequests
from runner.errors import BadOption, RunStopped
from runner.options import Sampling
from runner.runs.groups import by_agent
from runner.runs.options import RunKeywords
from runner.runs.preflight import require_sampling
from runner.runs.run import Run
from runner.scoring import ScorerKind
from runner.tasks import Task
from runner.trajectory import Group, Trajectory

__all__ = ["Player"]


class Player:
    """A player of a trainer's tasks, on one run that stays open between calls.

        async with Player(environment, engine, group_size=8) as player:
            groups = await player.play_group(task)

    The run has an asyncio task of its own, so `start` and `aclose` may be called from any asyncio task. Calls may be
    concurrent. A task may be played several times. Each time is another visit with other seeds. Cancelling a call
    cancels its episodes. A failed episode is in the result, without a reward. If an error ends the run, every later
    call raises this error.

    Args:
        environment: the environment, or its class.
        engine: the engine that the agents sample from; it is entered unless it runs.
        options: the fields of `RunOptions` by name, without `tasks` and `indices`; `breaker` is 1 by default.

    Raises:
        BadInput: an argument cannot be used; the message names it and the fix.
    """

    run: Run
    """The run, for its summary and its limits. Its results go to the callers."""

    def __init__(
        self, environment: Environment[Any] | type[Environment[Any]], engine: BaseEngine, **options: Unpack[RunKeywords]
    ) -> None:
        for name in ("tasks", "indices"):
            if name in options:
                raise BadOption(f"{name}=: a player gets tasks with play() and play_group(): leave the option out.")
        self._requests = TaskRequests()
        self.run = Run(environment, engine, tasks=self._requests, **{"breaker": 1, **options})  # type: ignore[arg-type]  # mypy does not check the dict
        self.error: BaseException | None = None
        """The error that ended the run; None while the run plays, and after `aclose` without an error."""
        self._checks = TaskChecks(self.run.environment, is_kept=self.run.options.file is not None)
        self._host: asyncio.Task[None] | None = None
        self._started = anyio.Event()
        self._ended = anyio.Event()

    async def start(self) -> Self:
        """Start the engine and the run.

        Raises:
            RuntimeError: the player was started before.
            BadInput, EngineError, RunFileError: the run cannot begin; see `Run`.
        """
        if self._host is not None:
            raise RuntimeError("a player can be started only once: make another Player(...)")
        require_asyncio("a player")
        # The run has its own asyncio task, so that start and aclose may be called from different tasks.
        self._host = asyncio.get_running_loop().create_task(self._live(), name="deltarunner player")
        try:
            await self._started.wait()
        except BaseException:
            self._host.cancel()
            with anyio.CancelScope(shield=True):
                await self._ended.wait()
            raise
        if self.error is not None:
            raise self.error
        return self

    async def play(self, task: Task, *, index: int = 0, sampling: Sampling | None = None) -> list[Trajectory]:
        """Play one episode of a task and return the trajectories of `main` and of the trained agents, `main` first.

        Args:
            task: the task.
            index: the number of the episode within the task's group, which determines its seeds.
            sampling: the sampling of this episode, such as for validation; it overrides the player's sampling.

        Raises:
            BadTask: the task cannot be played.
            BadOption: the engine does not support the sampling, the group has no such index, or a group reward compares
                the episodes of a group, which needs `play_group`.
            RunStopped, EngineError, StorageFailed: the run ended before the episode.
        """
        size = self.run.options.group_size
        checked.whole(f"index={index!r:.60}", index, least=0)
        if index >= size:
            raise BadOption(f"index={index}: a group has the episodes 0 to {size - 1}: set a larger group_size.")
        if size > 1 and any(scorer.kind == ScorerKind.GROUP_REWARD for scorer in self.run.scorers):
            raise BadOption("play(): the environment has a group_reward, which compares a group: use play_group().")
        return await self._played(task, (index,), sampling)

    async def play_group(self, task: Task, *, sampling: Sampling | None = None) -> list[Group]:
        """Play `group_size` episodes of a task and return a group for `main` and for each trained agent.

        Args:
            task: the task.
            sampling: the sampling of these episodes; it overrides the player's sampling.

        Raises:
            BadTask: the task cannot be played.
            BadOption: the engine does not support the sampling.
            RunStopped, EngineError, StorageFailed: the run ended before the group.
        """
        options = self.run.options
        trajectories = await self._played(task, range(options.group_size), sampling)
        return by_agent(trajectories, seed=options.seed, group_size=options.group_size)

    def share_visits(self, number: int, of: int, *, skip: int = 0) -> None:
        """Play only every `of`-th visit of each task, so that processes that play the same tasks use different seeds.

        Args:
            number: the number of this process, from 0.
            of: the number of processes.
            skip: the number of visits to skip, since an earlier run played them.
        """
        checked.whole(f"share_visits(of={of!r:.60})", of, least=1)
        checked.whole(f"share_visits(number={number!r:.60})", number, least=0, most=of - 1)
        checked.whole(f"share_visits(skip={skip!r:.60})", skip, least=0)
        self._requests.first_visit, self._requests.visit_step = skip * of + number, of

    def cancel(self) -> None:
        """Cancel every episode in flight and end the run; calls that wait get partial trajectories or an error."""
        self._requests.close()
        self.run.cancel()

    async def aclose(self) -> None:
        """Play the requested episodes, then end the run and close the engine if the run entered it."""
        self._requests.close()
        if self._host is None:
            return
        try:
            await self._ended.wait()
        except BaseException:
            self.cancel()
            with anyio.CancelScope(shield=True):
                await self._ended.wait()
            raise

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.cancel()
        await self.aclose()

    async def _played(self, task: Task, indices: Sequence[int], sampling: Sampling | None) -> list[Trajectory]:
        self._require_running()
        if sampling is not None:
            self._check_sampling(sampling)
        request = TaskRequest(self._checks.checked(task), indices, sampling)
        self._requests.add(request)
        try:
            await request.done.wait()
        except BaseException:
            request.cancel()
            raise
        if request.error is not None:
            raise request.error
        return request.trajectories

    def _check_sampling(self, sampling: Sampling) -> None:
        if not isinstance(sampling, Sampling):
            raise BadOption(f"sampling={sampling!r:.60}: give Sampling(...).")
        for part in self.run.environment.parts().values():
            require_sampling(self.run.engine, sampling.over(self.run.options.sampling).over(part.sampling))

    def _require_running(self) -> None:
        if self.error is not None:
            raise self.error
        if self._host is None:
            raise RuntimeError("the player has not begun: write `async with Player(...) as player:`, or await start()")
        if self._requests.closed:
            raise RunStopped("the player was closed: play before aclose(), or make another Player(...)")

    async def _live(self) -> None:
        try:
            async with self.run as run:
                self._started.set()
                async for _ in run:  # the callers have received the results
                    pass
        except asyncio.CancelledError:
            self.error = RunStopped("the player's asyncio task was cancelled: its event loop ends")
            raise
        except BaseException as error:
            self.error = error
        finally:
            self._requests.end(self.error or RunStopped("the player was closed during this call: make another player"))
            self._started.set()
            self._ended.set()
