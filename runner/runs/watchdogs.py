"""Watchdogs that end a run early: too many failures, a dead engine, or no progress."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable
from typing import Final

import anyio

from runner.engines.base import BaseEngine
from runner.errors import EngineDead, RunStuck, TooManyFailures
from runner.quantities import counted
from runner.runs.player import Attempt
from runner.trajectory import Outcome, Trajectory

__all__ = ["Breaker", "until_dead", "until_stuck"]

BREAKER_WINDOW_SIZE: Final = 32
"""Number of recent episodes that the breaker counts, so that older ones cannot hide a broken environment."""

MIN_BREAKER_EPISODES: Final = 16
"""Minimum number of episodes before the breaker acts, since the first ones may fail by chance."""

RUN_STUCK_SECONDS: Final = 600.0
"""Time without progress after which a run is stuck. Default limits of episodes are shorter, so they fire first."""

MAX_LISTED_EPISODES: Final = 10
"""Maximum number of waiting episodes that the error names, the longest waits first."""


class Breaker:
    """A count of the failures among the recent episodes."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._recent: deque[bool] = deque(maxlen=BREAKER_WINDOW_SIZE)
        self._causes: Counter[str] = Counter()

    def note(self, trajectory: Trajectory) -> TooManyFailures | None:
        """Count an episode, and return the error that ends the run; None if not too many failed."""
        if trajectory.outcome is Outcome.CANCELLED:  # the cancellation is not a fault of the environment
            return None
        self._recent.append(trajectory.outcome.failed)
        if trajectory.outcome.failed:
            self._causes[trajectory.error or trajectory.outcome.value] += 1
        failed = sum(self._recent)
        if len(self._recent) < MIN_BREAKER_EPISODES or failed <= self._share * len(self._recent):
            return None
        cause, count = self._causes.most_common(1)[0]
        return TooManyFailures(
            f"{failed} of the last {len(self._recent)} episodes failed, more than breaker={self._share:g} "
            f"allows; most often ({counted(count, 'time')}): {cause}"
        )


async def until_dead(engines: Collection[BaseEngine]) -> EngineDead:
    """Wait until an engine dies, even while it is idle, and return the error.

    Raises:
        Exception: `health()` of an engine raised another error than `EngineDead`.
    """
    ends: list[Exception] = []

    async def watch(engine: BaseEngine) -> None:
        # An engine with a long interval is not checked at once, since its check may be a request to a paid API.
        await anyio.sleep(engine.health_interval - BaseEngine.health_interval)
        try:
            while True:
                await engine.health()
                await anyio.sleep(engine.health_interval)
        except Exception as error:  # the error is used below, since the task group would wrap it
            ends.append(error)
            watching.cancel_scope.cancel()

    async with anyio.create_task_group() as watching:
        for engine in engines:
            watching.start_soon(watch, engine)
        await anyio.sleep_forever()
    if isinstance(ends[0], EngineDead):
        return ends[0]
    raise ends[0]


async def until_stuck(in_flight: Collection[Attempt], progress: Callable[[], Hashable]) -> RunStuck:
    """Wait until there is no progress for `RUN_STUCK_SECONDS`; return an error that lists the waiting episodes.

    Args:
        in_flight: the episodes in flight; without any, the run is not stuck.
        progress: a function whose result changes with any progress.
    """
    seen: Hashable = None
    since = anyio.current_time()
    while True:
        await anyio.sleep(1)
        # Sampled ids are not enough: an episode may progress without its engine.
        signs = progress(), max((attempt.since for attempt in in_flight), default=0.0)
        if signs != seen or not in_flight:
            seen, since = signs, anyio.current_time()
        elif anyio.current_time() - since > RUN_STUCK_SECONDS:
            return RunStuck(_list_waiting(in_flight))


def _list_waiting(in_flight: Collection[Attempt]) -> str:
    now = anyio.current_time()
    longest = sorted(in_flight, key=lambda attempt: attempt.since)[:MAX_LISTED_EPISODES]
    lines = [f"nothing happened for {RUN_STUCK_SECONDS:.0f} s; {counted(len(in_flight), 'episode')} in flight:"]
    lines += [
        f"  {attempt.key.id} has been waiting for {attempt.activity} for {now - attempt.since:.0f} s"
        for attempt in longest
    ]
    if len(in_flight) > len(longest):
        lines.append(f"  and {len(in_flight) - len(longest)} more")
    return "\n".join(lines)
