"""Runs: many episodes of one configuration at once, their results as they finish."""

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
from runner.runs.options import RunKeywords, RunOptions, check_engine
from runner.runs.player import Attempt
from runner.runs.results import Results
from runner.runs.stage import Stage
from runner.runs.start import Start
from runner.runs.started import StartedRun
from runner.runs.state import RunState
from runner.runs.summary import Summary
from runner.trajectory import Group, Trajectory

__all__ = ["Run"]


class Run:
    """Many episodes with one configuration.

        async with Run(environment, engine) as run:
            async for trajectory in run:
                ...

    Leaving the block early cancels what is in flight; it is kept as partial and played again by the next run.

    Args:
        environment: the environment, or its class if it can be constructed without arguments.
        engine: the engine that the agents sample from. A run enters an engine that nobody has entered, and leaves it
            at its end; one that its caller entered stays open. Several runs may share an engine.
        tasks: instead of the environment's own: an iterable, an async iterable, a source, or the path of a JSONL file.
        options: the other fields of `RunOptions`, by name.

    Raises (when it is entered):
        BadInput: something given cannot be used; the message names it and the fix.
        RunFileError: the file holds another configuration, or cannot be written.
        EngineError: the engine does not start.

    Raises (from the iteration, after the last result):
        EngineDead, RunStopped, StorageFailed, BadTask: why the run ended before its work did.
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
        """The environment object. It gives the tasks, the shared resources and the group rewards, and plays nothing
        itself."""
        check_playable(self.environment)
        check_engine("engine", engine)
        self.engine = engine
        """The engine of every agent that has none of its own."""
        self.options = RunOptions(tasks=tasks, **options)  # type: ignore[arg-type]  # it settles None and names
        """The options, checked, with their defaults."""
        self.workers = Workers(self.options.concurrency.threads)
        """The threads in which the author's synchronous code runs."""
        self._stage = Stage.of(self.environment, engine, self.options, self.workers)
        self.limits = self._stage.limits
        """What every episode may use: the run's limits over the environment's over the defaults."""
        self.scorers = self._stage.scorers
        """The rewards and metrics of the environment, with the run's weights."""
        self.summary = Summary(group_size=self.options.group_size)
        """What came of the run so far; it may be read at any time."""
        self.lag = LagMonitor(self.workers)
        """How late the event loop is, and whose code makes it so."""
        self._state = RunState(self.summary)
        if isinstance(self.options.file, Path):
            self._state.file = self.options.file
        self._started: StartedRun | None = None
        self._entered = False
        self._exit = AsyncExitStack()

    @property
    def engines(self) -> list[BaseEngine]:
        """All engines of the run, each once; the one of the trained agents comes first.

        Once it has begun, what stands for those that its workers have entered is among them in their place.
        """
        return list(self._stage.engines if self._started is None else self._started.engines)

    @property
    def file(self) -> Path | None:
        """The path of the run file; None where there is none, or none is named yet."""
        return self._state.file

    @property
    def plays(self) -> Set[Attempt]:
        """The episodes in flight."""
        return self._state.plays

    @property
    def over(self) -> bool:
        """Whether every episode has ended; the last results may still wait to be read."""
        return self._state.over

    # --- starting and ending

    async def __aenter__(self) -> Self:
        if self._entered:
            raise RuntimeError("a run is entered once: make another Run(...) to play again")
        self._entered = True
        start = Start(stage=self._stage, lag=self.lag, state=self._state)
        async with AsyncExitStack() as exit_stack:
            self._started = started = await start.enter(exit_stack)
            self.summary.start()
            group = await exit_stack.enter_async_context(anyio.create_task_group())
            group.start_soon(started.play_all, name="deltarunner feed")
            self._exit = exit_stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        if not self.over:
            self.cancel()
        self._results.close()
        try:
            return await self._exit.__aexit__(kind, error, traceback)
        except BaseExceptionGroup as group:
            # The task group wraps what passes through it; whoever uses the run has not asked for one.
            single = unwrapped(group)
            if single is group:
                raise
            if single is error:
                return False
            raise single from single.__cause__

    def drain(self) -> None:
        """Begin no further episode; those in flight are played to their end."""
        self._state.drain()
        if self._started is not None:
            self._started.player.drain()

    def cancel(self) -> None:
        """Cut every episode in flight; each is closed and kept as partial."""
        self._state.cancel()

    # --- results

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Trajectory:
        return (await self._results.next()).trajectory

    def groups(self) -> AsyncIterator[Group]:
        """The same results by task: a group for each trained agent, once its last episode is in.

        Groups that the end of the run left unfinished come last, with `complete` false.
        """
        return self._results.groups()

    def stored(self) -> Iterator[Trajectory]:
        """What the run file held before this run, in the order of its commits, read as you go."""
        return self._begun.writer.stored()

    def flush(self) -> None:
        """Commit what is on its way to the file, from any thread, where the event loop can do nothing any more."""
        if self._started is not None:
            self._started.writer.flush()

    @property
    def _results(self) -> Results:
        return self._begun.results

    @property
    def _begun(self) -> StartedRun:
        if self._started is None:
            raise RuntimeError("the run has not begun: write `async with Run(...) as run:` and iterate inside")
        return self._started
