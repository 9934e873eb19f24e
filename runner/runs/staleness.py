"""Staleness: an episode whose oldest sampled id is too many weight updates behind is dropped and played again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from runner.engines.base import BaseEngine
from runner.episode.limits import Ending
from runner.errors import BadOption
from runner.runs.player import Attempt
from runner.tokens.log import Source, TokenLog
from runner.trajectory import Outcome, Trajectory

__all__ = ["Staleness"]


class Staleness:
    """How many updates old the weights behind an episode may be; any number where `max_lag` is None."""

    def __init__(self, engine: BaseEngine, max_lag: int | None) -> None:
        if max_lag is not None and not engine.is_controlled:
            kind = type(engine).__name__
            raise BadOption(f"max_version_lag={max_lag}: {kind} has no weights of ours; leave it out.")
        self._engine = engine
        self._max_lag = max_lag

    @contextmanager
    def cutting(self, plays: Collection[Attempt]) -> Iterator[None]:
        """After each update of the weights, cut those of `plays` that are too old."""
        with self._engine.telling(partial(self._cut_stale, plays)):
            yield

    def _cut_stale(self, plays: Iterable[Attempt]) -> None:
        """Cut the episodes that are too old already: the rest of them would be played in vain."""
        for play in plays:
            why = self._why_too_old(play.trained_logs())
            if why:
                play.cancel(Ending(Outcome.CANCELLED, error=why))

    def drop_stale(self, trajectories: list[Trajectory]) -> bool:
        """Whether an episode that ended is too old; its trajectories then say so, and have no reward."""
        why = self._why_too_old(segment.log for each in trajectories if each.trained for segment in each.segments)
        for trajectory in trajectories if why else ():
            # All that was given for another outcome goes: an episode that is played again has no reward yet.
            trajectory.outcome, trajectory.error = Outcome.CANCELLED, why
            trajectory.limit = trajectory.limit_agent = ""
            trajectory.reward, trajectory.rewards, trajectory.metrics = None, {}, {}
        return bool(why)

    def _why_too_old(self, logs: Iterable[TokenLog]) -> str:
        """What makes the episode with these logs too old, for people; "" where nothing does."""
        if self._max_lag is None:
            return ""
        engine = self._engine
        lag, version = max(((engine.lag(version), version) for version in _versions(logs)), default=(0, ""))
        if lag <= self._max_lag:
            return ""
        return f"too old: weights {version!r} are {lag} updates behind {engine.weight_version!r} (max_version_lag)"


def _versions(logs: Iterable[TokenLog]) -> Iterator[str]:
    """The versions of each log's trained ids; of two adapters, or one and none, a later id may be the older one."""
    for log in logs:
        yield from dict.fromkeys(span.version for span in log.versions if log.sources[span.start] == Source.SAMPLED)
