"""Runs: many episodes of one configuration at once, their results as they finish."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Set
from contextlib import AsyncExitStack
from datetime import datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
from typing_extensions import Unpack

from runner.concurrency.loop_lag import LagMonitor
from runner.concurrency.threads import Job, Workers
from runner.engines.base import Engine
from runner.engines.sharing import running
from runner.environment.checks import as_environment, check_playable, check_tools
from runner.environment.environment import Environment
from runner.environment.lifespan import lifespan_of
from runner.environment.task_feed import TaskFeed, Tasks, own_tasks
from runner.episode.key import MAIN
from runner.episode.lifecycle import Play
from runner.episode.model import ChatModel
from runner.episode.shared import RunShared
from runner.errors import unwrapped
from runner.runs.describe import describe_run
from runner.runs.options import RunKeywords, RunOptions, check_engine
from runner.runs.preflight import check_appends, check_templates, require_adapter
from runner.runs.results import Results
from runner.runs.staleness import Staleness
from runner.runs.started import StartedRun
from runner.runs.state import RunState
from runner.runs.summary import Summary
from runner.scoring import with_weights
from runner.store.writer import RunWriter
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
        engine: Engine,
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
        self.limits = self.options.limits_of(self.environment)
        """What every episode may use: the run's limits over the environment's over the defaults."""
        self.scorers = with_weights(self.environment.scorers, self.options.weights)
        """The rewards and metrics of the environment, with the run's weights."""
        self.summary = Summary(group_size=self.options.group_size)
        """What came of the run so far; it may be read at any time."""
        self.file = self.options.file if isinstance(self.options.file, Path) else None
        """The path of the run file; None where there is none, or none is named yet."""
        self.workers = Workers(self.options.concurrency.threads)
        """The threads in which the author's synchronous code runs."""
        self.lag = LagMonitor(self.workers)
        """How late the event loop is, and whose code makes it so."""
        self._state = RunState(self.summary)
        self._started: StartedRun | None = None
        self._entered = False
        self._exit = AsyncExitStack()

    @property
    def engines(self) -> list[Engine]:
        """All engines of the run, each once; the one of the trained agents comes first."""
        return list(dict.fromkeys((self.engine, *self.options.engines.values())))

    @property
    def plays(self) -> Set[Play]:
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
        async with AsyncExitStack() as exit_stack:
            exit_stack.callback(self.workers.close)
            # Engines before all else: what the header says, and which adapters there are, only a running one knows.
            for engine in self.engines:
                await exit_stack.enter_async_context(running(engine))
            staleness = Staleness(self.engine, self.options.max_version_lag)
            require_adapter(self.engine, self.options.sampling.over(self.environment.sampling))
            await exit_stack.enter_async_context(self.lag)
            writer = await exit_stack.enter_async_context(await self._make_writer())
            # A resumed run goes on with the clock that its templates saw first.
            shared = await self._make_shared(writer.header.clock)
            lifespan = lifespan_of(self.environment, self.workers, close_seconds=shared.limits.close_seconds)
            shared.resources = await exit_stack.enter_async_context(lifespan)
            feed = await self._make_feed()  # after lifespan(), whose resources tasks() may read
            exit_stack.push_async_callback(feed.aclose)
            started = StartedRun(
                options=self.options,
                shared=shared,
                writer=writer,
                feed=feed,
                state=self._state,
                staleness=staleness,
            )
            exit_stack.enter_context(staleness.cutting(self.plays))
            self._started = started
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

    async def _make_writer(self) -> RunWriter:
        describe = partial(describe_run, self.environment, self.engine, self.options, now=datetime.now().astimezone())
        # In a thread where a file is kept: only then git is asked, which takes some milliseconds.
        header = describe() if self.options.file is None else await self.workers.call(Job(describe, "run header"))
        if callable(self.options.file):
            self.file = self.options.file(header)
        task_class, retry_failed = self.environment.task_class(), self.options.retry_failed
        return RunWriter(self.file, header, task_class=task_class, retry_failed=retry_failed)

    async def _make_shared(self, now: datetime) -> RunShared:
        """What all episodes share; templates that cannot serve them are refused before anything is sampled."""
        environment, options = self.environment, self.options
        await check_templates([each.template for each in self.engines], options.template_options, now)
        chat_of = partial(ChatModel, options=options.template_options, now=now, history=options.history)
        chat = chat_of(self.engine)
        other_models = {name: chat_of(engine) for name, engine in options.engines.items()}
        main = other_models.get(MAIN, chat)
        check_tools(environment, main)
        tools = bool(environment.bound_tools())
        system = getattr(type(environment), "system_prompt", None) is not None
        self.summary.faults.extend(await check_appends(main, now, self.workers, tools=tools, system=system))
        return RunShared(
            environment=environment,
            chat=chat,
            other_models=other_models,
            sampling=options.sampling,
            limits=self.limits,
            own_limits=options.limits,
            scorers=self.scorers,
            seed=options.seed,
            workers=self.workers,
        )

    async def _make_feed(self) -> TaskFeed:
        tasks = self.options.tasks
        if tasks is None:  # in a thread, since it may load them all
            tasks = await self.workers.call(Job(partial(own_tasks, self.environment), "tasks()"))
        return TaskFeed(tasks, task_class=self.environment.task_class(), workers=self.workers)

    def drain(self) -> None:
        """Begin no further episode; those in flight are played to their end."""
        self._state.drain()

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
