"""An estimate of the time left of a run, with its standard error, from the turns played so far."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

__all__ = ["MIN_EPISODES", "TimeLeft", "TimeLeftEstimator"]

MIN_EPISODES: Final = 4
"""Minimum number of finished episodes for an estimate of the turns of an episode."""

MAX_UNSEEN_SHARE: Final = 0.5
"""Largest share of episodes with more turns than any finished one; above it the time left is unknown."""

MAX_PACE_SAMPLES: Final = 64
"""Maximum number of points of the pace, over the last half of the run."""

MAX_PACE_PARTS: Final = 8
"""Maximum number of parts of the run whose paces are compared."""

MIN_UNKNOWN_SECONDS: Final = 30.0
"""A shorter time left is shown even if its spread is larger than the time."""


@dataclass(frozen=True, slots=True)
class TimeLeft:
    """An estimate of the time left."""

    seconds: float
    spread: float
    """Standard error of the estimate, in seconds."""


@dataclass(frozen=True, slots=True)
class _ProgressPoint:
    now: float
    turns: int
    running: int


class TimeLeftEstimator:
    """An estimator of the time left, from the turns of a run.

    Durations of episodes are a biased measure: many episodes run at once, and the first to finish are the shortest. So
    turns are counted. The turns of an episode are estimated from finished and running episodes (Kaplan-Meier), and the
    pace is measured over the last half of the run.
    """

    def __init__(self) -> None:
        self._recent: deque[_ProgressPoint] = deque()
        self._whole: list[_ProgressPoint] = []
        """Points of the whole run. The time between two points grows during the run."""

    def read(
        self, now: float, *, finished: Mapping[int, int], done_turns: int, running: Sequence[int], left: int | None
    ) -> TimeLeft | None:
        """Estimate the time left; None while there is too little data.

        Args:
            now: seconds since the run began to play.
            finished: the number of finished episodes by their turns.
            done_turns: the turns of the episodes that finished in this launch.
            running: the turns so far of each episode in flight.
            left: the number of unfinished episodes, including episodes in flight; None if unknown.
        """
        turns = done_turns + sum(running)
        self._note(_ProgressPoint(now, turns, len(running)))
        if left is None or sum(finished.values()) < MIN_EPISODES:
            return None
        if left <= 0:
            return TimeLeft(0.0, 0.0)
        since = self._recent[0]
        played, seconds = turns - since.turns, now - since.now
        taken = Counter(running)
        survival = _survival(finished, taken)
        if played <= 0 or seconds <= 0 or survival[-1] > MAX_UNSEEN_SHARE:
            return None
        pace = seconds / played  # seconds per turn, counting the turns of all episodes
        width = sum(point.running for point in self._recent) / len(self._recent)
        remaining = _remaining_turns(survival)
        fresh, more = remaining[0], max(0, left - len(running))
        due = [
            (remaining[turns] if turns < len(remaining) else _BEYOND_LONGEST, count) for turns, count in taken.items()
        ]
        due += [(fresh, more)] if more else []
        still = sum(count * rest.mean for rest, count in due)
        variance = sum(count * rest.variance for rest, count in due)
        # Near the end, fewer and fewer episodes run at once. The estimate assumes free slots during half of the longest
        # episode.
        longest = len(survival) - 1 if more else max(rest.mean for rest, _ in due)
        alone = pace * (width - 1) * longest / 2 if width > 1 else 0.0
        expected = still * pace + alone
        error = fresh.variance / sum(finished.values())  # variance of the estimated mean
        unsure = math.hypot(math.sqrt(variance + left**2 * error) / still, max(played**-0.5, self._pace_spread()))
        spread = math.hypot(expected * unsure, alone / 2)
        # A time near 0 is shown with any spread. A longer time is unknown if its spread includes 0.
        return TimeLeft(expected, spread) if spread < expected or expected < MIN_UNKNOWN_SECONDS else None

    def _pace_spread(self) -> float:
        """The standard deviation of the pace over parts of the run, as a share of its mean.

        The rest of the run may have the pace of any part: other programs, long prompts and full caches change the pace.
        """
        points = self._whole
        count = min(MAX_PACE_PARTS, len(points) - 1)
        if count < 2:
            return 0.0
        ends = [points[number * (len(points) - 1) // count] for number in range(count + 1)]
        seconds, turns = ends[-1].now - ends[0].now, ends[-1].turns - ends[0].turns
        squares = sum(
            (last.now - first.now) * ((last.turns - first.turns) / (last.now - first.now) - turns / seconds) ** 2
            for first, last in pairwise(ends)
        )
        return math.sqrt(squares / seconds * count / (count - 1)) * seconds / turns

    def _note(self, point: _ProgressPoint) -> None:
        points, whole = self._recent, self._whole
        if not whole or point.now - whole[-1].now > point.now / MAX_PACE_SAMPLES:
            whole.append(point)
        if len(whole) > 2 * MAX_PACE_SAMPLES:
            del whole[1::2]
        if not points or point.now - points[-1].now >= point.now / MAX_PACE_SAMPLES:
            points.append(point)
        # The first turns read long prompts, so only the last half of the run counts.
        while len(points) > 1 and points[1].now <= point.now / 2:
            points.popleft()


@dataclass(frozen=True, slots=True)
class _Remaining:
    """Mean and variance of the number of turns that an episode has left."""

    mean: float
    variance: float


_BEYOND_LONGEST: Final = _Remaining(1.0, 1.0)
"""The estimate for an episode with more turns than any finished one."""


def _remaining_turns(survival: Sequence[float]) -> list[_Remaining]:
    """The number of turns that an episode has left, by its turns so far."""
    remaining = [_BEYOND_LONGEST] * len(survival)
    first = second = 0.0  # sums over k of the shares, and of k times the shares
    for k in reversed(range(len(survival))):
        first, second = first + survival[k], second + k * survival[k]
        if survival[k] > 0:
            mean = first / survival[k]
            squares = (2 * second + (1 - 2 * k) * first) / survival[k]
            remaining[k] = _Remaining(mean, max(0.0, squares - mean**2))
    return remaining


def _survival(finished: Mapping[int, int], reached: Mapping[int, int]) -> list[float]:
    """The share of episodes with more than k turns, for each k from 0 to the most turns of a finished episode."""
    at_risk = sum(finished.values()) + sum(reached.values())
    survival, share = [], 1.0
    for k in range(max(finished) + 1):
        ended = finished.get(k, 0)
        share *= 1 - ended / at_risk if at_risk else 0.0
        survival.append(share)
        at_risk -= ended + reached.get(k, 0)
    return survival
