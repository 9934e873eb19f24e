"""Staleness: an episode is dropped and repeated if too many weight updates followed its oldest sampled id."""

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
    """A limit on the number of weight updates by which an episode may lag.

    Args:
        engine: the engine of the trained agents.
        max_lag: the limit; None sets no limit.

    Raises:
        BadOption: there is a limit, but the engine has no weight updates.
    """

    def __init__(self, engine: BaseEngine, max_lag: int | None) -> None:
        if max_lag is not None and not engine.is_controlled:
            kind = type(engine).__name__
            raise BadOption(f"max_version_lag={max_lag}: {kind} has no weight updates; leave it out.")
        self._engine = engine
        self._max_lag = max_lag

    @contextmanager
    def cancelling(self, in_flight: Collection[Attempt]) -> Iterator[None]:
        """After each weight update during the block, cancel the episodes in flight that are too old."""
        with self._engine.on_update(partial(self._cut_stale, in_flight)):
            yield

    def _cut_stale(self, in_flight: Iterable[Attempt]) -> None:
        """Cancel the episodes that are too old, since their results would be dropped."""
        for attempt in in_flight:
            why = self._why_too_old(attempt.trained_logs())
            if why:
                attempt.cancel(Ending(Outcome.CANCELLED, error=why))

    def drop_stale(self, trajectories: list[Trajectory]) -> bool:
        """Return True if a finished episode is too old. Its trajectories then become cancelled, without rewards."""
        why = self._why_too_old(segment.log for each in trajectories if each.trained for segment in each.segments)
        for trajectory in trajectories if why else ():
            # Remove the results of the first outcome, since a repeated episode has no reward yet.
            trajectory.outcome, trajectory.error = Outcome.CANCELLED, why
            trajectory.limit = trajectory.limit_agent = ""
            trajectory.reward, trajectory.rewards, trajectory.metrics = None, {}, {}
        return bool(why)

    def _why_too_old(self, logs: Iterable[TokenLog]) -> str:
        """Return the reason why the episode with these logs is too old; "" if it is not."""
        if self._max_lag is None:
            return ""
        engine = self._engine
        lag, version = max(((engine.lag(version), version) for version in _versions(logs)), default=(0, ""))
        if lag <= self._max_lag:
            return ""
        return f"too old: weights {version!r} are {lag} updates older than {engine.weight_version!r} (max_version_lag)"


def _versions(logs: Iterable[TokenLog]) -> Iterator[str]:
    """Yield the weight versions of trained ids. With several adapters, a later id may have older weights."""
    for log in logs:
        yield from dict.fromkeys(span.version for span in log.versions if log.sources[span.start] == Source.SAMPLED)
