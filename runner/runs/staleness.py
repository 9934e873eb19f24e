"""Freshness: an episode whose oldest sampled id is too many weight updates behind is dropped and played again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from runner import checked
from runner.engines.base import Engine
from runner.episode.lifecycle import Play
from runner.episode.limits import Ending
from runner.errors import BadOption
from runner.tokens.log import Source, TokenLog
from runner.trajectory import Outcome, Trajectory

__all__ = ["Freshness", "oldest_version"]


class Freshness:
    """How old the weights behind an episode may be.

    Args:
        engine: of the trained agents.
        max_lag: updates that an episode's oldest sampled id may be behind the engine; None allows any.

    Raises:
        BadOption: no whole number of at least 0, or an engine whose weights are not ours.
    """

    def __init__(self, engine: Engine, max_lag: int | None) -> None:
        if max_lag is not None:
            checked.whole(f"max_version_lag={max_lag!r:.60}", max_lag, least=0, otherwise=", or None for any age")
        self._engine = engine
        self._max_lag = max_lag

    def check(self) -> None:
        """Refuse an engine, once it runs, that does not know of weight versions.

        Raises:
            BadOption: it does not.
        """
        if self._max_lag is not None and self._engine.control is None:
            kind = type(self._engine).__name__
            raise BadOption(f"max_version_lag={self._max_lag}: {kind} has no weights of ours; leave it out.")

    def cut_stale(self, plays: Iterable[Play]) -> None:
        """Cut the episodes in flight that are too old already: the rest of them would be played in vain."""
        for play in plays:
            told = self._told(play.trained_logs())
            if told:
                play.cancel(Ending(Outcome.CANCELLED, error=told))

    def drop_stale(self, trajectories: Iterable[Trajectory]) -> bool:
        """Whether an episode that ended is too old; its trajectories then say so, and have no reward."""
        trajectories = list(trajectories)
        told = self._told(segment.log for each in trajectories if each.trained for segment in each.segments)
        for trajectory in trajectories if told else ():
            trajectory.outcome, trajectory.error = Outcome.CANCELLED, told
            trajectory.limit = trajectory.limit_agent = ""
            trajectory.reward, trajectory.rewards, trajectory.metrics = None, {}, {}
        return bool(told)

    def _told(self, logs: Iterable[TokenLog]) -> str:
        """What makes the episode with these logs too old, for people; "" where nothing does."""
        control = self._engine.control
        if self._max_lag is None or control is None:
            return ""
        lag, version = max(((control.lag(version), version) for version in _versions(logs)), default=(0, ""))
        if lag <= self._max_lag:
            return ""
        return f"too old: weights {version!r} are {lag} updates behind {control.version!r} (max_version_lag)"


def oldest_version(trajectory: Trajectory) -> str:
    """The weight version of the first id that is trained on; "" where there is none."""
    return next(_versions(segment.log for segment in trajectory.segments), "")


def _versions(logs: Iterable[TokenLog]) -> Iterator[str]:
    """The versions of each log's trained ids; of two adapters, or one and none, a later id may be the older one."""
    for log in logs:
        yield from dict.fromkeys(span.version for span in log.versions if log.sources[span.start] == Source.SAMPLED)
