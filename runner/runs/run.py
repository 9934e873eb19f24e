"""Runs: many episodes of one configuration at once, their results as they finish."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import datetime
from functools import partial
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectSendStream

from runner.concurrency.loop_lag import LagMonitor
from runner.concurrency.threads import Job, Workers
from runner.concurrency.user_code import describe_error
from runner.engines.base import Engine
from runner.engines.sharing import running
from runner.environment.checks import as_environment, check_playable, check_tools, common_system_prompt
from runner.environment.environment import Environment
from runner.environment.lifespan import lifespan_of, own_tasks
from runner.environment.task_feed import TaskFeed, Tasks
from runner.episode.context import RunContext
from runner.episode.hooks import check_system_prompts
from runner.episode.key import MAIN, EpisodeKey
from runner.episode.lifecycle import Play
from runner.episode.limits import Ending
from runner.episode.model import ChatModel
from runner.errors import BadTask, DeltarunnerError, EngineDead, unwrapped
from runner.messages import as_messages
from runner.options import Concurrency, History, Limits, Sampling
from runner.runs.attempts import Attempts
from runner.runs.groups import GroupBook, Result, by_agent, score_group
from runner.runs.preflight import check_adapter, check_appends, check_templates
from runner.runs.results import Results
from runner.runs.staleness import Freshness
from runner.runs.summary import Summary
from runner.runs.validation import (
    check_engines,
    check_file,
    check_numbers,
    check_objects,
    check_retry_failed,
    check_template_options,
)
from runner.runs.watchdogs import Breaker, until_dead, until_stuck
from runner.scoring import ScorerKind, with_weights
from runner.store.header import Header
from runner.store.writer import RunWriter
from runner.tasks import Task
from runner.trajectory import Group, Outcome, Trajectory

__all__ = ["Run"]

RECALLED_AT_ONCE = 100

_EPISODE = attrgetter("task.id", "visit", "index")


class Run:
    """Many episodes with one configuration.

        async with Run(environment, engine) as run:
            async for trajectory in run:
                ...

    Leaving the block early cancels what is in flight; it is kept as partial and played again by the next run.

    Args:
        environment: the environment, or its class if it can be constructed without arguments.
        engine: what speaks. Whoever entered it closes it; a run enters one that nobody has, and runs may share it.
        tasks: instead of the environment's own: an iterable, an async iterable, a source, or the path of a JSONL file.
        group_size: episodes of each task.
        engines: agents that are placed on engines of their own; those are not trained.
        sampling: goes over the environment's, field by field, for trained agents.
        limits: goes over the environment's, field by field.
        concurrency: how wide the run is; it never changes a result.
        seed: all random numbers follow from it.
        template_options: names that the chat template reads, such as `enable_thinking`.
        file: the run file, or what names it by the run's header; one of the same configuration is resumed. None keeps
            none.
        weights: of rewards, by name, over those in the class.
        retries: how often an episode is played again after an engine's failure; a request that it refuses is none.
        breaker: the run stops when more than this share of the recent episodes failed; 1 never stops it.
        history: how the past of a conversation is kept: append, fork, refuse, or a History with further options.
        retry_failed: play the episodes again that earlier runs of the file left failed (`env_error`, `token_error`).
        max_version_lag: an episode whose oldest sampled id is more weight updates behind the engine, when one lands or
            when the episode ends, is dropped and counted, and its task is played again; None keeps it, however old.

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
        group_size: int = 1,
        engines: Mapping[str, Engine] | None = None,
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        concurrency: Concurrency | None = None,
        seed: int = 0,
        template_options: Mapping[str, Any] | None = None,
        file: str | Path | Callable[[Header], Path] | None = None,
        weights: Mapping[str, float] | None = None,
        retries: int = 2,
        breaker: float = 0.5,
        history: History | str | None = None,
        max_version_lag: int | None = None,
        retry_failed: bool = False,
    ) -> None:
        self.environment = as_environment(environment)
        check_playable(self.environment)
        check_engines(engine, engines)
        check_numbers(group_size=group_size, retries=retries, seed=seed, breaker=breaker)
        check_objects(sampling=sampling, limits=limits, concurrency=concurrency)
        check_template_options(template_options)
        check_file(file)
        check_retry_failed(retry_failed, file)
        self.engine = engine
        self.engines = dict(engines or {})
        self._engines = list(dict.fromkeys((engine, *self.engines.values())))
        self.group_size = group_size
        self.indices: Sequence[int] = range(group_size)  # narrowed, to look at single episodes of a group
        self.sampling = sampling or Sampling()
        self._own_limits = limits or Limits()
        self.limits = self._own_limits.over(self.environment.limits).over(Limits.defaults())
        self.concurrency = concurrency or Concurrency()
        self.seed = seed
        self.template_options = dict(template_options or {})
        self.history = History.of(history)
        self.file = Path(file) if isinstance(file, str | Path) else None
        self._name_file = file if callable(file) else None
        self.scorers = with_weights(self.environment.scorers, weights or {})
        self.retries = retries
        self.retry_failed = retry_failed
        self.max_version_lag = max_version_lag
        self._freshness = Freshness(engine, max_version_lag)
        self.breaker = breaker
        self.summary = Summary(group_size=group_size)
        self.workers = Workers(self.concurrency.threads)
        self.lag = LagMonitor(self.workers)
        self.plays: set[Play] = set()
        self.failure: DeltarunnerError | None = None
        self.draining = self.over = False
        self._entered = self._all_begun = False
        self._given = 0
        self._tasks = tasks
        self._context: RunContext
        self._writer: RunWriter
        self._feed: TaskFeed
        self._group: TaskGroup
        self._results: Results
        self._attempts: Attempts
        self._announce_to: MemoryObjectSendStream[Result]
        self._places: anyio.Semaphore
        self._exit = AsyncExitStack()
        self._feeding = anyio.CancelScope()
        self._book: GroupBook
        self._breaker = Breaker(breaker)

    # --- starting and ending

    async def __aenter__(self) -> Self:
        if self._entered:
            raise RuntimeError("a run is entered once: make another Run(...) to play again")
        self._entered = True
        async with AsyncExitStack() as exit_stack:
            exit_stack.callback(self.workers.close)
            for engine in self._engines:
                await exit_stack.enter_async_context(running(engine))
            self._freshness.check()
            check_adapter(self.engine, self.sampling.over(self.environment.sampling))
            await exit_stack.enter_async_context(self.lag)
            self._context = await self._open(exit_stack)
            lifespan = lifespan_of(self.environment, self.workers, close_seconds=self.limits.close_seconds)
            self._context.shared = await exit_stack.enter_async_context(lifespan)
            source = self._tasks if self._tasks is not None else await own_tasks(self.environment, self.workers)
            self._feed = TaskFeed(source, task_class=self.environment.task_class(), workers=self.workers)
            exit_stack.push_async_callback(self._feed.aclose)
            self._start()
            self._heed_updates(exit_stack)
            self._group = await exit_stack.enter_async_context(anyio.create_task_group())
            self._group.start_soon(self._play_all, name="deltarunner feed")
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
            single = unwrapped(group)
            if single is group:
                raise
            if single is error:
                return False
            raise single from single.__cause__

    async def _open(self, exit_stack: AsyncExitStack) -> RunContext:
        now = datetime.now().astimezone()
        if self.keeps_file:  # then git is asked
            header = await self.workers.call(Job(lambda: Header.of(self, now=now), "run header"))
        else:
            header = Header.of(self, now=now)
        if self._name_file is not None:
            self.file = self._name_file(header)
        self._writer = await exit_stack.enter_async_context(
            RunWriter(self.file, header, task_class=self.environment.task_class(), retry_failed=self.retry_failed)
        )
        # A resumed run goes on with the clock that its templates saw first.
        now = self._writer.header.clock
        await check_templates([each.template for each in self._engines], self.template_options, now)
        chat_of = partial(ChatModel, options=self.template_options, now=now, history=self.history)
        chat = chat_of(self.engine)
        other_models = {name: chat_of(engine) for name, engine in self.engines.items()}
        main = other_models.get(MAIN, chat)
        check_tools(self.environment, main)
        tools = bool(self.environment.bound_tools())
        system = getattr(type(self.environment), "system_prompt", None) is not None
        self.summary.faults.extend(await check_appends(main, now, self.workers, tools=tools, system=system))
        return RunContext(
            environment=self.environment,
            chat=chat,
            other_models=other_models,
            sampling=self.sampling,
            limits=self.limits,
            own_limits=self._own_limits,
            scorers=self.scorers,
            seed=self.seed,
            workers=self.workers,
        )

    def _start(self) -> None:
        episodes = self.concurrency.episodes or 2 * self.engine.places
        self._places = anyio.Semaphore(episodes)
        self._announce_to, announced = anyio.create_memory_object_stream[Result](episodes)
        self._results = Results(self, announced, self._writer)
        self._attempts = Attempts(self, self._context, self._engines, self._writer, self._freshness)
        self._book = GroupBook(keep=self._has_group_rewards)
        self.summary.start()

    def _heed_updates(self, exit_stack: AsyncExitStack) -> None:
        control = self.engine.control
        if control is not None:
            heed = partial(self._freshness.cut_stale, self.plays)
            control.listeners.add(heed)
            exit_stack.callback(control.listeners.discard, heed)

    @property
    def _has_group_rewards(self) -> bool:
        return any(scorer.kind == ScorerKind.GROUP_REWARD for scorer in self.scorers)

    @property
    def keeps_file(self) -> bool:
        return self.file is not None or self._name_file is not None

    def drain(self) -> None:
        """Begin no further episode; those in flight are played to their end."""
        self.draining = True
        self._feeding.cancel()

    def cancel(self) -> None:
        """Cut every episode in flight; each is closed and kept as partial."""
        self.drain()
        for play in self.plays:
            play.cancel()

    def fail(self, failure: DeltarunnerError, *, cancel: bool = False) -> None:
        """End the run for this reason, which the iteration raises after the last result; the first one stays."""
        self.failure = self.failure or failure
        if cancel:
            self.cancel()
        else:
            self.drain()

    # --- results

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Trajectory:
        return (await self._reading().next()).trajectory

    def groups(self) -> AsyncIterator[Group]:
        """The same results by task: a group for each trained agent, once its last episode is in.

        Groups that the end of the run left unfinished come last, with `complete` false.
        """
        return self._reading().groups()

    def stored(self) -> Iterator[Trajectory]:
        """What the run file held before this run, in the order of its commits, read as you go."""
        return self._writer.stored()

    def flush(self) -> None:
        """Commit what is on its way to the file, from any thread, where the event loop can do nothing any more."""
        self._writer.flush()

    def _reading(self) -> Results:
        if not hasattr(self, "_results"):
            raise RuntimeError("the run has not begun: write `async with Run(...) as run:` and iterate inside")
        return self._results

    # --- playing

    async def _play_all(self) -> None:
        try:
            async with self._announce_to, anyio.create_task_group() as watched:
                watched.start_soon(self._watch_progress)
                watched.start_soon(self._watch_engines)
                try:
                    await self._play_tasks()
                except DeltarunnerError as error:  # here, since the task group would wrap it
                    self.failure = self.failure or error
                watched.cancel_scope.cancel()
        finally:
            self.over = True

    async def _play_tasks(self) -> None:
        await self._recall_stored()
        async with anyio.create_task_group() as episodes:
            with self._feeding:
                await self._begin_episodes(episodes)
                self._all_begun = True
        await self._announce_unfinished_groups()
        self.summary.faults.extend(f"engines: no agent {name!r} ever spoke" for name in self._context.unused())
        self.summary.stop()
        complete = self._all_begun and self.failure is None and not self.summary.cut_short
        await self._writer.finish(self.summary.as_dict(), complete=complete)

    async def _recall_stored(self) -> None:
        """Count what an earlier run of the file finished, and tell the source."""
        if self._writer.resumed:
            stored = (list(agents) for _, agents in groupby(self._writer.stored(), key=_EPISODE))
            # In a thread, some at a time: a large file must not hold up the loop.
            while some := await self.workers.call(Job(lambda: list(islice(stored, RECALLED_AT_ONCE)), "run file")):
                for trajectories in some:
                    if not trajectories[0].outcome.cut_short:
                        self.summary.recall(trajectories, final=self._is_final(trajectories))
                    for trajectory in trajectories:
                        await self._feed.finished(trajectory)

    async def _begin_episodes(self, episodes: TaskGroup) -> None:
        try:
            while True:
                await self._places.acquire()
                task = await self._feed.next()
                if task is None:
                    return
                await self._begin_group(task, episodes)
        except DeltarunnerError as error:
            self.fail(error)
        except (Exception, SystemExit) as error:
            self.fail(BadTask(f"tasks() raised {describe_error(error)}"))

    def _check_system_prompt(self, task: Task) -> None:
        system_prompt = common_system_prompt(self.environment)
        if system_prompt is not None and not self.environment.overrides("prompt"):
            check_system_prompts(self.environment, system_prompt, task, as_messages(task.prompt))

    async def _begin_group(self, task: Task, episodes: TaskGroup) -> None:
        """Begin the episodes of a task that no earlier run finished; a place is held for the first of them."""
        self._check_system_prompt(task)
        self._given += 1
        claim = partial(self._writer.claim, task, self._given, repeatable=self._feed.repeatable)
        # Only what an earlier run left has to be read from the file.
        claimed = await self.workers.call(Job(claim, "run file")) if self._writer.resumed else claim()
        missing = [index for index in self.indices if index not in claimed.finished]
        if missing:
            self._book.open(task, claimed.visit, len(missing))
        elif self._has_group_rewards and not claimed.group_scored:
            episodes.start_soon(self._score_stored, task, claimed.visit)
        for number, index in enumerate(missing):
            if number:
                await self._places.acquire()
            attempt = claimed.attempts.get(index, 0)
            key = EpisodeKey(task=task, index=index, visit=claimed.visit, attempt=attempt)
            episodes.start_soon(self._episode, key, name=f"episode {key.id}")
        if not missing:
            self._places.release()

    async def _episode(self, key: EpisodeKey) -> None:
        try:
            trajectories = await self._attempts.play(key)
            await self._finished(trajectories)
        except DeltarunnerError as error:
            self.fail(error, cancel=True)
        finally:
            self._places.release()

    async def _finished(self, trajectories: list[Trajectory]) -> None:
        await self._writer.commit_episode(trajectories)
        self.summary.add(trajectories)
        self._watch_failures(trajectories[0])
        missing, group = self._book.finished(trajectories)
        if self._has_group_rewards:
            if group is not None:
                await self._score_group(group, missing)
            return
        self.summary.add_rewards(trajectories)
        await self._announce(trajectories, missing)

    async def _score_group(self, new: list[Trajectory], missing: int) -> None:
        groups = await self._results.groups_of(new)
        # What the next run of the file plays again belongs to the comparison: until then there is no reward to tell.
        if self.file is None or not any(t.outcome.cut_short for group in groups for t in group.trajectories):
            await self._score(groups, new)
        for members in _by_episode(new):
            await self._announce(members, missing)

    async def _score(self, groups: list[Group], new: Collection[Trajectory] = ()) -> None:
        """Give and commit the group rewards; what has its final reward only now is counted only now."""
        members = [trajectory for group in groups for trajectory in group.trajectories]
        counted = [each for each in _by_episode(members) if each[0] in new or not self._is_final(each)]
        await score_group(self._context, groups, self.summary.faults.append)
        await self._writer.commit_group_rewards(members)
        for trajectories in counted:
            self.summary.add_rewards(trajectories)

    def _is_final(self, trajectories: Sequence[Trajectory]) -> bool:
        """The rewards of this episode do not wait for its group any more."""
        if _EPISODE(trajectories[0])[:2] in self._writer.reopened and self._has_group_rewards:
            return not any(t.outcome.scored and t.turns for t in trajectories)
        names = [scorer.name for scorer in self.scorers if scorer.kind == ScorerKind.GROUP_REWARD]
        waiting = (t for t in trajectories if t.outcome.scored and t.turns and (t.trained or t.agent == MAIN))
        return not names or all(any(name in each.rewards for name in names) for each in waiting)

    async def _score_stored(self, task: Task, visit: int) -> None:
        """The last run ended between an episode's commit and its group's rewards."""
        try:
            stored = await self._writer.stored_group(task.id, visit)
            await self._score(by_agent(stored, seed=self.seed, group_size=self.group_size))
        except DeltarunnerError as error:
            self.fail(error, cancel=True)

    async def _announce_unfinished_groups(self) -> None:
        for missing, trajectories in self._book.unfinished():
            await self._announce(trajectories, missing)

    async def _announce(self, trajectories: list[Trajectory], missing: int) -> None:
        told = [t for t in trajectories if t.trained or t.agent == MAIN]
        # Where nobody reads any more, the run file has it.
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            for trajectory in told:
                await self._feed.finished(trajectory)
                await self._announce_to.send(Result(trajectory, trajectory is told[-1], missing))

    # --- watching

    def _watch_failures(self, trajectory: Trajectory) -> None:
        too_many = self._breaker.note(trajectory)
        if too_many is not None and self.failure is None:
            self.fail(too_many)

    async def _watch_progress(self) -> None:
        self.fail(await until_stuck(self.plays, self._progress), cancel=True)

    def _progress(self) -> tuple[object, ...]:
        # While an engine stands still for its trainer, nothing can happen, and nothing is stuck.
        moved = [object() if engine.standstill.on else engine.stats().sampled_tokens for engine in self._engines]
        return (self.summary.episodes, *moved)

    async def _watch_engines(self) -> None:
        self.engine_died(await until_dead(self._engines))

    def engine_died(self, error: EngineDead) -> None:
        """End the run: what is in flight failed for its engine's sake."""
        self.fail(error)
        for play in self.plays:
            play.cancel(Ending(Outcome.ENGINE_ERROR, error=str(error)))


def _by_episode(trajectories: Iterable[Trajectory]) -> Iterator[list[Trajectory]]:
    """The trajectories of one task by the episodes that they are of, by index."""
    by_index = attrgetter("index")
    for _, agents in groupby(sorted(trajectories, key=by_index), key=by_index):
        yield list(agents)
