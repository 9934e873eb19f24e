"""Starts a run: its engines, its file, what its episodes share, and its tasks, each when what it needs is there."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from runner.concurrency.loop_lag import LagMonitor
from runner.concurrency.threads import Job
from runner.engines.base import width_of
from runner.engines.sharing import running
from runner.environment.task_feed import TaskFeed, own_tasks
from runner.episode.shared import RunShared
from runner.runs.describe import describe_run
from runner.runs.player import LocalPlayer, Player, PlayingEngine, Sent
from runner.runs.preflight import require_sampling
from runner.runs.stage import Stage
from runner.runs.staleness import Staleness
from runner.runs.started import StartedRun
from runner.runs.state import RunState
from runner.store.writer import RunWriter

__all__ = ["Start"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Start:
    """What a run is started with."""

    stage: Stage
    """What its episodes are played with."""
    lag: LagMonitor
    """The monitor of the event loop, entered once the engines run."""
    state: RunState
    """The state of the run, which learns of faults and of the file's path."""

    async def enter(self, exit_stack: AsyncExitStack) -> StartedRun:
        """Enter what has to be left again, and give what plays the run; nothing plays yet."""
        stage = self.stage
        options, engine = stage.options, stage.engines[0]
        exit_stack.callback(stage.workers.close)
        await stage.check_options()
        sent = engine.sent(stage) if isinstance(engine, PlayingEngine) else None
        # Engines before all else: what the header says, and which adapters there are, only a running one knows.
        for each in stage.engines:
            if sent is None or each not in sent.elsewhere:
                await exit_stack.enter_async_context(running(each))
        if sent is not None:
            stage = stage.with_others(await exit_stack.enter_async_context(sent.engines()))
        staleness = Staleness(engine, options.max_version_lag)
        require_sampling(engine, options.sampling.over(stage.environment.sampling))
        await exit_stack.enter_async_context(self.lag)
        now = datetime.now().astimezone()
        await stage.check_templates(now)  # before the header says how they write turns, which takes renders
        writer = await exit_stack.enter_async_context(await self._writer(stage, now))
        # A resumed run goes on with the clock that its templates saw first.
        clock = writer.header.clock
        shared, faults = await stage.open(exit_stack, clock)
        self.state.summary.faults.extend(faults)
        feed = await self._feed()  # after lifespan(), whose resources tasks() may read
        exit_stack.push_async_callback(feed.aclose)
        player = await self._player(exit_stack, sent, shared, clock)
        exit_stack.enter_context(staleness.cutting(self.state.plays))
        return StartedRun(
            options=stage.options,
            engines=stage.engines,
            shared=shared,
            player=player,
            writer=writer,
            feed=feed,
            state=self.state,
            staleness=staleness,
        )

    async def _player(
        self, exit_stack: AsyncExitStack, sent: Sent | None, shared: RunShared, clock: datetime
    ) -> Player:
        width = self.stage.options.concurrency.episodes
        if sent is not None:
            told = self.state.summary.faults.append
            return await exit_stack.enter_async_context(sent.player(shared, clock, width, told))
        return LocalPlayer(shared, width or width_of(self.stage.engines[0]))

    async def _writer(self, stage: Stage, now: datetime) -> RunWriter:
        state = self.state
        options = stage.options
        describe = partial(describe_run, stage.environment, stage.engines[0], options, now=now)
        # In a thread where a file is kept: only then git is asked, which takes some milliseconds.
        header = describe() if options.file is None else await stage.workers.call(Job(describe, "run header"))
        if callable(options.file):
            state.file = options.file(header)
        task_class = stage.environment.task_class()
        return RunWriter(state.file, header, task_class=task_class, retry_failed=options.retry_failed)

    async def _feed(self) -> TaskFeed:
        stage = self.stage
        tasks = stage.options.tasks
        if tasks is None:  # in a thread, since it may load them all
            tasks = await stage.workers.call(Job(partial(own_tasks, stage.environment), "tasks()"))
        return TaskFeed(tasks, task_class=stage.environment.task_class(), workers=stage.workers)
