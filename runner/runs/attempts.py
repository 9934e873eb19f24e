"""Attempts at episodes: an episode is repeated after an engine failure, or if its weights are too old."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import anyio

from runner.engines.base import BaseEngine
from runner.episode.key import EpisodeKey
from runner.errors import EngineDead
from runner.logs import logger_for
from runner.runs.player import Attempt, EpisodePlayer
from runner.runs.staleness import Staleness
from runner.runs.state import RunState
from runner.store.writer import RunWriter
from runner.trajectory import Outcome, Trajectory

__all__ = ["Attempts"]

log = logger_for("runs")

COMMIT_SECONDS = 10.0
"""Longest time by which the commit of a cancelled episode may delay the end of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """A player of the episodes of a run, which repeats failed and outdated attempts."""

    state: RunState
    """The state of the run, with the attempts in flight and the counts of repeated ones."""

    engines: Sequence[BaseEngine]
    """All engines of the run; their health is checked after an engine failed an episode."""

    player: EpisodePlayer
    """The player of the attempts, on this event loop or on workers."""

    writer: RunWriter
    """The run file, which also keeps superseded attempts."""

    staleness: Staleness
    """The check whether an episode's weights are too old."""

    retries: int
    """Maximum number of times that an episode is repeated after engine failures."""

    async def play(self, key: EpisodeKey) -> list[Trajectory]:
        """Play an episode and return the trajectories of its last attempt.

        Earlier attempts are committed here; the caller commits the last one.
        """
        failed = 0
        while True:
            attempt = self.player.begin(key, last_try=failed >= self.retries)
            trajectories = await self._run(attempt)
            if self.staleness.drop_stale(trajectories):
                self.state.summary.stale += 1
                log.info("episode %s, attempt %d: %s", key.id, key.attempt, trajectories[0].error)
                if self.state.draining:  # a run that failed is draining too
                    return trajectories
            elif not attempt.permanent and await self._may_retry(trajectories[0], failed):
                failed += 1
                self.state.summary.retried += 1
                cause = _cause(trajectories[0])
                self.state.summary.add_retry_cause(cause)
                log.warning("episode %s, attempt %d is repeated, the engine failed: %s", key.id, key.attempt, cause)
            else:
                return trajectories
            await self.writer.commit_episode(trajectories, retry=True)
            key = replace(key, attempt=key.attempt + 1)

    async def _run(self, attempt: Attempt) -> list[Trajectory]:
        self.state.begin(attempt)
        try:
            return await attempt.run()
        except anyio.get_cancelled_exc_class():
            # Commit the sampled part as a partial episode. This task is cancelled, so the await needs a shield.
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + COMMIT_SECONDS):
                await self.writer.commit_episode(attempt.trajectories())
            raise
        finally:
            self.state.in_flight.discard(attempt)
            self.state.add_faults(f"{attempt.key.id}: {fault}" for fault in attempt.faults)

    async def _may_retry(self, trajectory: Trajectory, failed_before: int) -> bool:
        """True if the engine failed the episode, all engines work now, retries are left, and the run does not drain."""
        if trajectory.outcome is not Outcome.ENGINE_ERROR or self.state.failure is not None:
            return False
        try:
            for engine in self.engines:
                await engine.health()
        except EngineDead as error:
            self.state.engine_died(error)
            return False
        return failed_before < self.retries and not self.state.draining


def _cause(trajectory: Trajectory) -> str:
    """The cause of a failed attempt without the name of the turn, so that equal causes are counted together."""
    error = trajectory.error or "no cause known"
    return error.partition(": ")[2] if error.startswith(f"{trajectory.id}/") else error
