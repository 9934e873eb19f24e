"""A run that was started: it takes tasks, plays their episodes, and hands over what came of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import attrgetter
from typing import Final

import anyio

from runner.concurrency.threads import Job
from runner.engines.base import BaseEngine, EngineStats
from runner.environment.task_feed import TaskFeed
from runner.episode.key import EpisodeKey
from runner.episode.shared import RunShared
from runner.errors import DeltarunnerError
from runner.runs.attempts import Attempts
from runner.runs.group_scoring import GroupScoring
from runner.runs.options import RunOptions
from runner.runs.player import Player, PlayingEngine
from runner.runs.results import Results
from runner.runs.staleness import Staleness
from runner.runs.state import RunState
from runner.runs.task_feeder import Slots, TaskFeeder
from runner.runs.watchdogs import Breaker, until_dead, until_stuck
from runner.store.writer import RunWriter

__all__ = ["StartedRun"]

RECALLED_AT_ONCE: Final = 100
"""The episodes of the file that one visit to a thread reads: each visit costs a hop, and memory follows this number."""

_OF_SERVERS: Final = ("throttled", "retried")
"""The counts that engines have which ask a server."""

_EPISODE: Final = attrgetter("task.id", "visit", "index")


def _stands_still(engine: BaseEngine) -> bool:
    """Whether nothing can happen, for its trainer or for want of workers, so that nothing is stuck."""
    return engine.standstill.on or (isinstance(engine, PlayingEngine) and engine.is_deserted)


def _moved(stats: EngineStats) -> tuple[int, int]:
    # What is asked again is not stuck: a server may want to be left alone for minutes, time and again.
    return stats.sampled_tokens, stats.retried


@dataclass(eq=False, kw_only=True)
class StartedRun:
    """What a run has once its engines, its file and its tasks are there.

    The way of a task: `TaskFeeder` takes it from its source and begins its episodes, `play_episode` plays one and
    keeps it, `GroupScoring` compares it with the others of its task, and `Results` hands it to the reader.
    """

    options: RunOptions
    """The options of the run."""
    engines: Sequence[BaseEngine]
    """All engines of the run, each once."""
    shared: RunShared
    """What all episodes share."""
    player: Player
    """The player of the episodes, on this event loop or on workers."""
    writer: RunWriter
    """The run file."""
    feed: TaskFeed
    """The source of the tasks."""
    state: RunState
    """The state that the parts of the run share."""
    staleness: Staleness
    """The rule by which an episode's weights are too old."""

    def __post_init__(self) -> None:
        options, state, shared, writer = self.options, self.state, self.shared, self.writer
        slots = Slots(self.player)
        self._breaker = Breaker(options.breaker)
        self._scoring = scoring = GroupScoring(shared, writer, state.summary, group_size=options.group_size)
        self._attempts = Attempts(
            state=state,
            engines=self.engines,
            player=self.player,
            writer=writer,
            staleness=self.staleness,
            retries=options.retries,
        )
        self._feeder = TaskFeeder(
            feed=self.feed,
            shared=shared,
            writer=writer,
            scoring=scoring,
            state=state,
            indices=range(options.group_size) if options.indices is None else options.indices,
            slots=slots,
        )
        self.results = Results(state, self.feed, scoring.groups_of, width=slots.width)

    async def play_all(self) -> None:
        """Play every task, and watch over it; why it ended before its work did is left in the run's state."""
        try:
            async with anyio.create_task_group() as watched:
                watched.start_soon(self._watch_progress)
                watched.start_soon(self._watch_engines)
                try:
                    await self._play_tasks()
                except DeltarunnerError as error:  # here, since the task group would wrap it
                    self.state.failure = self.state.failure or error
                watched.cancel_scope.cancel()
        finally:
            self.results.end()
            self.state.over = True

    async def _play_tasks(self) -> None:
        state, summary = self.state, self.state.summary
        # Before any task is asked for: a source decides by all results what is played next.
        await self._recall_stored()
        all_begun = False
        async with anyio.create_task_group() as episodes:
            # Two scopes: one that drains ends this one, and lets the episodes that were begun end by themselves.
            with state.feeding:
                await self._feeder.begin_episodes(episodes, self.play_episode)
                all_begun = True
        for missing, trajectories in self._scoring.unfinished():
            await self.results.announce(trajectories, missing)
        summary.faults.extend(f"engines: no agent {name!r} ever spoke" for name in self.shared.unused())
        stats = [engine.stats() for engine in self.engines]
        summary.throttled, summary.resent = (sum(getattr(each, name) for each in stats) for name in _OF_SERVERS)
        summary.stop()
        complete = all_begun and state.failure is None and not summary.cut_short
        await self.writer.finish(summary.as_dict(), complete=complete)

    async def play_episode(self, key: EpisodeKey) -> None:
        """Play an episode, keep it, count it, and announce what is scored by it: itself, or its whole group."""
        try:
            trajectories = await self._attempts.play(key)
            # Nothing is announced that the file does not hold: a reader never saw what a resumed run plays again.
            await self.writer.commit_episode(trajectories)
            self.state.summary.add(trajectories)
            too_many_failed = self._breaker.note(trajectories[0])
            if too_many_failed is not None:
                self.state.fail(too_many_failed)
            scored, missing = await self._scoring.finished(trajectories)
            for members in scored:
                await self.results.announce(members, missing)
        except DeltarunnerError as error:
            self.state.fail(error, cancel=True)

    async def _recall_stored(self) -> None:
        """Count what an earlier run of the file finished, and tell the tasks' source."""
        if not self.writer.resumed:
            return
        stored = (list(agents) for _, agents in groupby(self.writer.stored(), key=_EPISODE))
        # In a thread, some at a time: a large file must not hold up the loop.
        while some := await self.shared.workers.call(Job(lambda: list(islice(stored, RECALLED_AT_ONCE)), "run file")):
            for trajectories in some:
                if not trajectories[0].outcome.cut_short:
                    self.state.summary.recall(trajectories, final=self._scoring.is_final(trajectories))
                for trajectory in trajectories:
                    await self.feed.finished(trajectory)

    async def _watch_progress(self) -> None:
        self.state.fail(await until_stuck(self.state.plays, self._progress), cancel=True)

    def _progress(self) -> tuple[object, ...]:
        moved = [object() if _stands_still(engine) else _moved(engine.stats()) for engine in self.engines]
        return (self.state.summary.episodes, *moved)

    async def _watch_engines(self) -> None:
        self.state.engine_died(await until_dead(self.engines))
