"""Attempts: an episode is played until it is one to keep, again after an engine's failure and when it is too old."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import anyio

from runner.engines.base import Engine
from runner.episode.context import RunContext
from runner.episode.key import EpisodeKey
from runner.episode.lifecycle import Play
from runner.errors import DeltarunnerError, EngineDead
from runner.runs.staleness import Freshness
from runner.runs.summary import Summary
from runner.store.writer import RunWriter
from runner.trajectory import Outcome, Trajectory

__all__ = ["Attempts"]

COMMIT_SECONDS = 10.0


class _Run(Protocol):
    plays: set[Play]
    summary: Summary
    retries: int
    draining: bool
    failure: DeltarunnerError | None

    def engine_died(self, error: EngineDead) -> None: ...


@dataclass(frozen=True, slots=True)
class Attempts:
    """Plays the episodes of a run.

    Attributes:
        run: is told what is in flight and how often something was played again.
        context: what every episode gets.
        engines: that must be alive for another attempt.
        writer: keeps the earlier attempts.
        freshness: says which episode is too old.
    """

    run: _Run
    context: RunContext
    engines: Sequence[Engine]
    writer: RunWriter
    freshness: Freshness

    async def play(self, key: EpisodeKey) -> list[Trajectory]:
        """The trajectories of the last attempt, not yet committed; earlier ones are."""
        failed = 0
        while True:
            play = Play(self.context, key)
            trajectories = await self._played(play)
            if self.freshness.drop_stale(trajectories):
                self.run.summary.stale += 1
                if self.run.draining or self.run.failure is not None:
                    return trajectories
            elif not play.permanent and await self._failed_by_the_engine(trajectories[0], failed):
                failed += 1
                self.run.summary.retried += 1
            else:
                return trajectories
            await self.writer.commit_episode(trajectories, retry=True)
            key = replace(key, attempt=key.attempt + 1)

    async def _played(self, play: Play) -> list[Trajectory]:
        self.run.plays.add(play)
        try:
            return await play.run()
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + COMMIT_SECONDS):
                await self.writer.commit_episode(play.trajectories())
            raise
        finally:
            self.run.plays.discard(play)
            self.run.summary.faults.extend(f"{play.key.id}: {fault}" for fault in play.faults)

    async def _failed_by_the_engine(self, trajectory: Trajectory, before: int) -> bool:
        """The engine failed it, not for the first `retries` times yet, and can answer again."""
        if trajectory.outcome is not Outcome.ENGINE_ERROR or self.run.failure is not None:
            return False
        try:
            for engine in self.engines:
                await engine.health()
        except EngineDead as error:
            self.run.engine_died(error)
            return False
        return before < self.run.retries and not self.run.draining
