"""Attempts: an episode is played until it is one to keep, again after an engine's failure and when it is too old."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import anyio

from runner.engines.base import BaseEngine
from runner.episode.key import EpisodeKey
from runner.errors import EngineDead
from runner.runs.player import Attempt, Player
from runner.runs.staleness import Staleness
from runner.runs.state import RunState
from runner.store.writer import RunWriter
from runner.trajectory import Outcome, Trajectory

__all__ = ["Attempts"]

COMMIT_SECONDS = 10.0
"""The seconds of a shield: an episode that was cancelled may hold up the end of the run for as long, to be kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """Plays the episodes of a run."""

    state: RunState
    """The state of the run, which is told what is in flight and what was played again."""

    engines: Sequence[BaseEngine]
    """All engines of the run; each is asked for its health where one of them failed an episode."""

    player: Player
    """The player of each attempt, on this event loop or on workers."""

    writer: RunWriter
    """The run file, which keeps the attempts that are no results too."""

    staleness: Staleness
    """The rule by which an episode's weights are too old."""

    retries: int
    """The number of times that an episode is played again after failures of the engine."""

    async def play(self, key: EpisodeKey) -> list[Trajectory]:
        """The trajectories of the last attempt, not yet committed; earlier ones are."""
        failed = 0
        while True:
            attempt = self.player.begin(key, last_try=failed >= self.retries)
            trajectories = await self._played(attempt)
            if self.staleness.drop_stale(trajectories):
                self.state.summary.stale += 1
                if self.state.draining:  # which a run that failed is too
                    return trajectories
            elif not attempt.permanent and await self._failed_by_the_engine(trajectories[0], failed):
                failed += 1
                self.state.summary.retried += 1
            else:
                return trajectories
            await self.writer.commit_episode(trajectories, retry=True)
            key = replace(key, attempt=key.attempt + 1)

    async def _played(self, attempt: Attempt) -> list[Trajectory]:
        self.state.begin(attempt)
        try:
            return await attempt.run()
        except anyio.get_cancelled_exc_class():
            # What was sampled so far is kept as partial, although nothing may be awaited here unshielded.
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + COMMIT_SECONDS):
                await self.writer.commit_episode(attempt.trajectories())
            raise
        finally:
            self.state.plays.discard(attempt)
            self.state.summary.faults.extend(f"{attempt.key.id}: {fault}" for fault in attempt.faults)

    async def _failed_by_the_engine(self, trajectory: Trajectory, before: int) -> bool:
        """Whether the engine failed it, not for the first `retries` times yet, and can answer again."""
        if trajectory.outcome is not Outcome.ENGINE_ERROR or self.state.failure is not None:
            return False
        try:
            for engine in self.engines:
                await engine.health()
        except EngineDead as error:
            self.state.engine_died(error)
            return False
        return before < self.retries and not self.state.draining
