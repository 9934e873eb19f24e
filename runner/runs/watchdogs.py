"""What ends a run before its work is done: too many failures, a dead engine, or nothing happening any more."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable
from typing import Final

import anyio

from runner.engines.base import BaseEngine
from runner.errors import EngineDead, RunStuck, TooManyFailures
from runner.runs.player import Attempt
from runner.trajectory import Outcome, Trajectory

__all__ = ["Breaker", "until_dead", "until_stuck"]

BREAKER_WINDOW: Final = 32
"""The number of last episodes that the breaker looks at: older ones cannot hide that an environment has broken."""

BREAKER_LEAST: Final = 16
"""The number of episodes that the breaker waits for: a run whose first one fails may be fine."""

RUN_STUCK_SECONDS: Final = 600.0
"""The seconds without any sign of life after which a run is stuck. No default limit of an episode is longer, so that
limits end what they can before the whole run ends."""

LISTED: Final = 10
"""The most episodes of a stuck run that the error names, those that waited longest."""

HEALTH_SECONDS: Final = 1.0
"""The seconds from one question whether the engines are alive to the next."""


class Breaker:
    """Counts failures among the recent episodes."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._recent: deque[bool] = deque(maxlen=BREAKER_WINDOW)
        self._causes: Counter[str] = Counter()

    def note(self, trajectory: Trajectory) -> TooManyFailures | None:
        """Count an episode; gives the error to end the run with, once there were too many failures."""
        if trajectory.outcome is Outcome.CANCELLED:  # by whoever ended it, so it tells nothing of the environment
            return None
        self._recent.append(trajectory.outcome.failed)
        if trajectory.outcome.failed:
            self._causes[trajectory.error or trajectory.outcome.value] += 1
        failed = sum(self._recent)
        if len(self._recent) < BREAKER_LEAST or failed <= self._share * len(self._recent):
            return None
        cause, count = self._causes.most_common(1)[0]
        return TooManyFailures(
            f"{failed} of the last {len(self._recent)} episodes failed, more than breaker={self._share:g} "
            f"allows; most often ({count} times): {cause}"
        )


async def until_dead(engines: Collection[BaseEngine]) -> EngineDead:
    """Return when one of these can answer no more, with the cause; also while nobody asks them for anything."""
    while True:
        try:
            for engine in engines:
                await engine.health()
        except EngineDead as death:
            return death
        await anyio.sleep(HEALTH_SECONDS)


async def until_stuck(plays: Collection[Attempt], progress: Callable[[], Hashable]) -> RunStuck:
    """Return when nothing happened for `RUN_STUCK_SECONDS`, with an error that says who waits for what.

    Args:
        plays: the episodes in flight; as long as there are none nothing is stuck.
        progress: gives something that differs whenever anything has happened.
    """
    seen: Hashable = None
    since = anyio.current_time()
    while True:
        await anyio.sleep(1)
        # Sampled ids alone would not do: an episode may go from one thing to the next without its engine.
        signs = progress(), max((play.since for play in plays), default=0.0)
        if signs != seen or not plays:
            seen, since = signs, anyio.current_time()
        elif anyio.current_time() - since > RUN_STUCK_SECONDS:
            return RunStuck(_who_waits(plays))


def _who_waits(plays: Collection[Attempt]) -> str:
    now = anyio.current_time()
    longest = sorted(plays, key=lambda play: play.since)[:LISTED]
    lines = [f"nothing happened for {RUN_STUCK_SECONDS:.0f} s; {len(plays)} episodes in flight:"]
    lines += [f"  {play.key.id} waits for {play.activity} since {now - play.since:.0f} s" for play in longest]
    if len(plays) > len(longest):
        lines.append(f"  and {len(plays) - len(longest)} more")
    return "\n".join(lines)
