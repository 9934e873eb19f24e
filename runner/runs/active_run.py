"""A started run: it takes tasks, plays their episodes, and delivers the results."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from operator import attrgetter
from typing import Any, Final

import anyio
import anyio.to_thread

from runner.concurrency.threads import Job
from runner.engines.base import BaseEngine, EngineStats
from runner.engines.proofs import ProofFigures
from runner.environment.task_feed import TaskFeed
from runner.episode.key import EpisodeKey
from runner.episode.shared import RunShared
from runner.errors import DeltarunnerError
from runner.logs import logger_for
from runner.runs.attempts import Attempts
from runner.runs.group_scoring import GroupScoring
from runner.runs.observers import ObserverThreads
from runner.runs.options import RunOptions
from runner.runs.player import EpisodePlayer, PlayingEngine
from runner.runs.results import Results
from runner.runs.staleness import Staleness
from runner.runs.state import RunState
from runner.runs.task_feeder import Slots, TaskFeeder
from runner.runs.watchdogs import Breaker, until_dead, until_stuck
from runner.store.json_values import class_name
from runner.store.writer import RunWriter
from runner.trajectory import Trajectory

__all__ = ["ActiveRun"]

log = logger_for("runs")

RECALL_BATCH_SIZE: Final = 100
"""The number of stored episodes read per call of a thread; a larger number takes more memory."""

_SERVER_COUNTS: Final = ("throttled", "retried")
"""The counts in `EngineStats` of an engine's requests to its server."""

_EPISODE: Final = attrgetter("task.id", "visit", "index")


def _is_idle(engine: BaseEngine) -> bool:
    """True if the engine is paused, or if no worker of the engine plays.

    A run that waits for such an engine is not stuck.
    """
    return engine.pause_state.on or (isinstance(engine, PlayingEngine) and engine.is_deserted)


def _progress_of(stats: EngineStats) -> tuple[int, int]:
    # A retried request is progress: a server may ask for pauses of minutes.
    return stats.sampled_tokens, stats.retried


@dataclass(eq=False, kw_only=True)
class ActiveRun:
    """A run whose engines, file and tasks are ready.

    `TaskFeeder` takes a task from its source and begins the task's episodes. `play_episode` plays and commits an
    episode, `GroupScoring` compares the episodes of a task, and `Results` delivers trajectories to the reader.
    """

    options: RunOptions
    engines: Sequence[BaseEngine]
    """All engines of the run, each once."""
    shared: RunShared
    """The objects that all episodes share."""
    player: EpisodePlayer
    """The player of the episodes, on this event loop or on workers."""
    writer: RunWriter
    feed: TaskFeed
    state: RunState
    staleness: Staleness
    """The check whether an episode's weights are too old."""

    def __post_init__(self) -> None:
        options, state, shared, writer = self.options, self.state, self.shared, self.writer
        slots = Slots(self.player)
        self._versions = {number: engine.weight_version for number, engine in enumerate(self.engines)}
        self._new_weights: deque[tuple[int, str, ProofFigures | None, float]] = deque()
        self._weights_came = anyio.Event()
        self._observers = ObserverThreads(options.observers, group_size=options.group_size, seed=options.seed)
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
        """Play every task, with watchdogs. The run's state stores the cause of an early end."""
        self._observers.start(self._about())
        try:
            async with anyio.create_task_group() as watched:
                watched.start_soon(self._watch_progress)
                watched.start_soon(self._watch_engines)
                watched.start_soon(self._commit_weights_as_they_come)
                try:
                    with self._recording_weights():
                        await self._play_tasks()
                except DeltarunnerError as error:  # it is caught here, since the task group would wrap it
                    log.error("the run ends early: %s: %s", type(error).__name__, error)
                    self.state.failure = self.state.failure or error
                watched.cancel_scope.cancel()
        finally:
            self.results.end()
            self.state.over = True
            self._log_end()
            await self._end_observers()

    async def _play_tasks(self) -> None:
        state, summary = self.state, self.state.summary
        # The stored results come before the first task, since a source chooses tasks by all results.
        await self._recall_stored()
        all_begun = False
        async with anyio.create_task_group() as episodes:
            # Draining cancels the inner scope only, so that episodes in flight finish.
            with state.feeding:
                await self._feeder.begin_episodes(episodes, self.play_episode)
                all_begun = True
        for missing, trajectories in self._scoring.unfinished():
            await self.results.announce(trajectories, missing)
        state.add_faults(f"engines: agent {name!r} never had a turn" for name in self.shared.unused())
        stats = [engine.stats() for engine in self.engines]
        summary.throttled, summary.resent = (sum(getattr(each, name) for each in stats) for name in _SERVER_COUNTS)
        summary.stop()
        complete = all_begun and state.failure is None and not summary.cut_short
        await self._store_weights()
        await self.writer.finish(summary.as_dict(), complete=complete)

    async def play_episode(self, key: EpisodeKey) -> None:
        """Play, commit and count an episode. Announce the episode, or its whole group, once its rewards are final."""
        try:
            trajectories = await self._attempts.play(key)
            # The episode is committed before the announcement, so that a resumed run never repeats an announced
            # episode.
            await self.writer.commit_episode(trajectories)
            self.state.summary.add(trajectories)
            _log_episode(trajectories)
            too_many_failed = self._breaker.note(trajectories[0])
            if too_many_failed is not None:
                self.state.fail(too_many_failed)
            scored, missing = await self._scoring.finished(trajectories)
            for members in scored:
                self._observers.episode(members, missing)
                await self.results.announce(members, missing)
        except DeltarunnerError as error:
            self.state.fail(error, cancel=True)

    def _about(self) -> dict[str, Any]:
        return {
            "environment": class_name(type(self.shared.environment)),
            "engine": type(self.engines[0]).__name__,
            "group_size": self.options.group_size,
            "seed": self.options.seed,
            "file": None if self.writer.path is None else str(self.writer.path),
        }

    async def _end_observers(self) -> None:
        if self.options.observers:
            with anyio.CancelScope(shield=True):  # `end` has its own time limit
                self.state.add_faults(await anyio.to_thread.run_sync(self._observers.end, self.state.summary))

    def _log_end(self) -> None:
        summary = self.state.summary
        outcomes = ", ".join(f"{count} {outcome.value}" for outcome, count in sorted(summary.outcomes.items()))
        log.info(
            "the run is over after %.1f s: %d episodes (%s), %d attempts repeated, %d too old, %d sampled ids dropped",
            *(summary.elapsed, summary.episodes, outcomes or "none", summary.retried, summary.stale, summary.resampled),
        )

    async def _recall_stored(self) -> None:
        """Count the finished episodes in the run file, and pass all stored trajectories to the task source."""
        if not self.writer.resumed:
            return
        stored = (list(agents) for _, agents in groupby(self.writer.stored(), key=_EPISODE))
        recalled = 0
        # The file is read in a thread and in parts, so that a large file does not block the loop.
        while some := await self.shared.workers.call(Job(lambda: list(islice(stored, RECALL_BATCH_SIZE)), "run file")):
            recalled += len(some)
            for trajectories in some:
                if not trajectories[0].outcome.cut_short:
                    self.state.summary.recall(trajectories, final=self._scoring.is_final(trajectories))
                for trajectory in trajectories:
                    await self.feed.finished(trajectory)

        log.info("%d episodes recalled from the run file", recalled)

    @contextmanager
    def _recording_weights(self) -> Iterator[None]:
        with ExitStack() as listening:
            for number, engine in enumerate(self.engines):
                listening.enter_context(engine.on_update(partial(self._record_weights, number)))
            yield

    def _record_weights(self, number: int) -> None:
        engine = self.engines[number]
        # If the version is the same, only an adapter has changed.
        if self._versions.get(number) != engine.weight_version:
            self._versions[number] = engine.weight_version
            log.info("engine %d has weights %r", number, engine.weight_version)
            self._new_weights.append((number, engine.weight_version, engine.proof_figures, time.time()))
            self._weights_came.set()
            self._observers.weights(engine.weight_version)

    async def _commit_weights_as_they_come(self) -> None:
        try:
            while True:
                await self._weights_came.wait()
                self._weights_came = anyio.Event()
                await self._store_weights()
        except DeltarunnerError as error:
            self.state.fail(error, cancel=True)

    async def _store_weights(self) -> None:
        while self._new_weights:
            await self.writer.commit_weights(*self._new_weights.popleft())

    async def _watch_progress(self) -> None:
        self.state.fail(await until_stuck(self.state.in_flight, self._progress), cancel=True)

    def _progress(self) -> tuple[object, ...]:
        moved = [object() if _is_idle(engine) else _progress_of(engine.stats()) for engine in self.engines]
        return (self.state.summary.episodes, *moved)

    async def _watch_engines(self) -> None:
        self.state.engine_died(await until_dead(self.engines))


def _log_episode(trajectories: Sequence[Trajectory]) -> None:
    first = trajectories[0]
    values = first.id, first.attempt, first.outcome.value
    if first.outcome.failed:
        log.warning("episode %s, attempt %d failed (%s): %s", *values, first.error)
    elif first.limit:
        log.info("episode %s, attempt %d ended (%s): limit %s %s", *values, first.limit, first.limit_agent)
    else:
        log.debug("episode %s, attempt %d ended (%s), %d turns", *values, len(first.turns))
