"""Runs: many concurrent episodes of one configuration, with results as they finish."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Set
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
from typing_extensions import Unpack

from runner.concurrency.loop_lag import LagMonitor
from runner.concurrency.threads import Workers
from runner.engines.base import BaseEngine
from runner.environment.checks import as_environment, check_playable
from runner.environment.environment import Environment
from runner.environment.task_feed import Tasks
from runner.errors import unwrapped
from runner.estimates import Mean
from runner.logs import logger_for
from runner.runs.active_run import ActiveRun
from runner.runs.options import RunKeywords, RunOptions, check_engine, check_full
from runner.runs.player import Attempt
from runner.runs.results import Results
from runner.runs.run_setup import RunSetup
from runner.runs.start import Start
from runner.runs.state import RunState
from runner.runs.summary import Summary
from runner.trajectory import Group, Trajectory

__all__ = ["Run"]

log = logger_for("runs")


class Run:
    """Many episodes with one configuration.

        async with Run(environment, engine) as run:
            async for trajectory in run:
                ...

    Leaving the block early cancels the episodes in flight; they are kept as partial, and the next run repeats them.
    Enter and leave the block in the same task; a `Player` has no such rule.

    Args:
        environment: the environment, or its class if it can be constructed without arguments.
        engine: the engine that the agents sample from. A run enters an engine that is not running, and leaves it at
            the end; an engine that the caller entered stays open. Several runs may share an engine.
        tasks: tasks in place of the environment's own: an iterable, an async iterable, a source that receives results,
            or the path of a JSONL file.
        options: the other fields of `RunOptions`, by name.

    Raises (when it is constructed or entered):
        BadInput: an argument cannot be used; the message names it and the fix.
        RunFileError: the file holds another configuration, or cannot be written.
        EngineError: the engine does not start.

    Raises (from the iteration, after the last result):
        EngineDead, RunStopped, StorageFailed, BadTask: the cause of an early end.
    """

    def __init__(
        self,
        environment: Environment[Any] | type[Environment[Any]],
        engine: BaseEngine,
        *,
        tasks: Tasks | None = None,
        **options: Unpack[RunKeywords],
    ) -> None:
        self.environment = as_environment(environment)
        """The environment object, for tasks, shared resources and group rewards. Each episode has its own object."""
        check_playable(self.environment)
        check_engine("engine", engine)
        self.engine = engine
        """The engine of every agent without a separate one."""
        if self.environment.engines:
            options["engines"] = {**self.environment.engines, **(options.get("engines") or {})}
        self.options = RunOptions(tasks=tasks, **options)  # type: ignore[arg-type]  # RunOptions replaces None and names
        """The checked options with their defaults."""
        self.workers = Workers(self.options.concurrency.threads)
        """The threads in which the author's synchronous code runs."""
        self._setup = RunSetup.of(self.environment, engine, self.options, self.workers)
        self.limits = self._setup.limits
        """The limits of an episode: the run's, then the environment's, then the defaults."""
        self.scorers = self._setup.scorers
        """The rewards and metrics of the environment, with the run's weights."""
        parts = {name: Mean() for name in self.environment.parts() if name}
        self.summary = Summary(group_size=self.options.group_size, environments=parts)
        """The summary so far. It may be read at any time."""
        self.lag = LagMonitor(self.workers)
        """The lag of the event loop, and the code that causes it."""
        self._state = RunState(self.summary)
        if isinstance(self.options.file, Path):
            self._state.file = self.options.file
        self._active: ActiveRun | None = None
        self._entered = False
        self._task_id = 0
        self._exit = AsyncExitStack()

    @property
    def engines(self) -> list[BaseEngine]:
        """All engines of the run, each once; the engine of the trained agents comes first.

        After the start, placeholders replace the engines that exist only on workers.
        """
        return list(self._setup.engines if self._active is None else self._active.engines)

    @property
    def file(self) -> Path | None:
        """The path of the run file; None without a file, or before it is named."""
        return self._state.file

    @property
    def in_flight(self) -> Set[Attempt]:
        """The episodes in flight."""
        return self._state.in_flight

    @property
    def over(self) -> bool:
        """True once every episode has ended; the last results may still be unread."""
        return self._state.over

    @property
    def waits_for(self) -> str:
        """The author's code outside of episodes that has run for a while, such as "tasks()"; else ""."""
        return self._state.waits_for

    # --- starting and ending

    async def __aenter__(self) -> Self:
        if self._entered:
            raise RuntimeError("a run can be entered only once: make another Run(...) to play again")
        self._entered = True
        self._task_id = anyio.get_current_task().id
        start = Start(setup=self._setup, lag=self.lag, state=self._state)
        async with AsyncExitStack() as exit_stack:
            try:
                self._active = active = await start.enter(exit_stack)
            except Exception as error:
                log.error("the run does not start: %s: %s", type(error).__name__, error)
                raise
            self.summary.start()
            group = await exit_stack.enter_async_context(anyio.create_task_group())
            group.start_soon(active.play_all, name="deltarunner feed")
            self._exit = exit_stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        if not self.over:
            self.cancel()
        self._results.close()
        if anyio.get_current_task().id != self._task_id:
            raise RuntimeError(
                "the run was entered in another task, so it cannot be closed here: leave "
                "it in the task that entered it, or use Player(...), which is started and closed from any task"
            )
        try:
            return await self._exit.__aexit__(kind, error, traceback)
        except BaseExceptionGroup as group:
            # The task group wraps errors in an exception group; callers expect the error itself.
            single = unwrapped(group)
            if single is group:
                raise
            if single is error:
                return False
            raise single from single.__cause__

    def drain(self) -> None:
        """Begin no further episode. Episodes in flight are played to their end."""
        self._state.drain()
        if self._active is not None:
            self._active.player.drain()

    def cancel(self) -> None:
        """Cancel every episode in flight. Each is closed and kept as partial."""
        self._state.cancel()

    # --- results

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Trajectory:
        self._state.quota.need(None)
        return (await self._results.next()).trajectory

    def groups(self, *, full: int | None = None) -> AsyncIterator[Group]:
        """Yield, after the last episode of each task, a group for `main` and one for each trained agent.

        Without `full`, unfinished groups come last, with `complete` false.

        Args:
            full: the number of tasks with spread (rewards that differ) after which the iteration ends; None yields all
                groups. Groups with equal rewards are left out and counted in `summary.flat`. A task begins only if it
                may still be needed, so no episode is discarded. A later call of `groups(full=)` continues with the next
                task. Make the first call at the start of the `async with` block: tasks that began before this call are
                played even if they are not needed.

        Raises:
            BadOption: `full` is not a positive integer, or the groups have a single episode.
        """
        if full is not None:
            check_full(full, self.options)
        self._state.quota.need(full)
        return self._results.groups(full)

    def stored(self) -> Iterator[Trajectory]:
        """The trajectories in the run file before this run, in commit order, read lazily."""
        return self._begun.writer.stored()

    def flush(self) -> None:
        """Commit the queued results to the file, and accept no further results.

        Any thread may call this, also while the event loop is blocked.
        """
        if self._active is not None:
            self._active.writer.flush()

    @property
    def _results(self) -> Results:
        return self._begun.results

    @property
    def _begun(self) -> ActiveRun:
        if self._active is None:
            raise RuntimeError("the run has not begun: write `async with Run(...) as run:` and iterate inside")
        return self._active
