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
"""Maximum number of samples of the pace, over the last half of the run."""

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
class _Sample:
    now: float
    turns: int
    running: int


class TimeLeftEstimator:
    """Estimates the time left from the turns of a run.

    Durations of episodes are a biased measure: many episodes run at once, and the first to finish are the shortest. So
    turns are counted. The turns of an episode are estimated from finished and running episodes (Kaplan-Meier), and the
    pace is that of the last half of the run.
    """

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()
        self._whole: list[_Sample] = []
        """Samples of the whole run, evenly spaced."""

    def read(
        self, now: float, *, finished: Mapping[int, int], done_turns: int, running: Sequence[int], left: int | None
    ) -> TimeLeft | None:
        """Estimate the time left; None while there is too little data.

        Args:
            now: seconds since the run began to play.
            finished: the number of finished episodes by their turns.
            done_turns: the turns of the episodes that finished in this launch.
            running: the turns so far of each episode in flight.
            left: the number of unfinished episodes, including those in flight; None if unknown.
        """
        turns = done_turns + sum(running)
        self._note(_Sample(now, turns, len(running)))
        if left is None or sum(finished.values()) < MIN_EPISODES:
            return None
        if left <= 0:
            return TimeLeft(0.0, 0.0)
        since = self._samples[0]
        played, seconds = turns - since.turns, now - since.now
        taken = Counter(running)
        survival = _survival(finished, taken)
        if played <= 0 or seconds <= 0 or survival[-1] > MAX_UNSEEN_SHARE:
            return None
        pace = seconds / played  # seconds per turn of the whole run
        width = sum(sample.running for sample in self._samples) / len(self._samples)
        remaining = _remaining_turns(survival)
        fresh, more = remaining[0], max(0, left - len(running))
        due = [
            (remaining[turns] if turns < len(remaining) else _BEYOND_LONGEST, count) for turns, count in taken.items()
        ]
        due += [(fresh, more)] if more else []
        still = sum(count * rest.mean for rest, count in due)
        variance = sum(count * rest.variance for rest, count in due)
        # Near the end, fewer and fewer episodes run at once: half of a long episode runs with free slots.
        longest = len(survival) - 1 if more else max(rest.mean for rest, _ in due)
        alone = pace * (width - 1) * longest / 2 if width > 1 else 0.0
        expected = still * pace + alone
        error = fresh.variance / sum(finished.values())  # variance of the estimated mean
        unsure = math.hypot(math.sqrt(variance + left**2 * error) / still, max(played**-0.5, self._pace_spread()))
        spread = math.hypot(expected * unsure, alone / 2)
        # A time near 0 is shown whatever its spread. A longer time that may be 0 is unknown.
        return TimeLeft(expected, spread) if spread < expected or expected < MIN_UNKNOWN_SECONDS else None

    def _pace_spread(self) -> float:
        """The standard deviation of the pace over parts of the run, as a share of its mean.

        The rest of the run may have the pace of any part: other programs, long prompts and full caches change the pace.
        """
        samples = self._whole
        count = min(MAX_PACE_PARTS, len(samples) - 1)
        if count < 2:
            return 0.0
        ends = [samples[number * (len(samples) - 1) // count] for number in range(count + 1)]
        seconds, turns = ends[-1].now - ends[0].now, ends[-1].turns - ends[0].turns
        squares = sum(
            (last.now - first.now) * ((last.turns - first.turns) / (last.now - first.now) - turns / seconds) ** 2
            for first, last in pairwise(ends)
        )
        return math.sqrt(squares / seconds * count / (count - 1)) * seconds / turns

    def _note(self, sample: _Sample) -> None:
        samples, whole = self._samples, self._whole
        if not whole or sample.now - whole[-1].now > sample.now / MAX_PACE_SAMPLES:
            whole.append(sample)
        if len(whole) > 2 * MAX_PACE_SAMPLES:
            del whole[1::2]
        if not samples or sample.now - samples[-1].now >= sample.now / MAX_PACE_SAMPLES:
            samples.append(sample)
        # The first turns read long prompts, so only the last half of the run counts.
        while len(samples) > 1 and samples[1].now <= sample.now / 2:
            samples.popleft()


@dataclass(frozen=True, slots=True)
class _Remaining:
    """Mean and variance of the number of turns left of an episode."""

    mean: float
    variance: float


_BEYOND_LONGEST: Final = _Remaining(1.0, 1.0)
"""For an episode with more turns than any finished one."""


def _remaining_turns(survival: Sequence[float]) -> list[_Remaining]:
    """The number of turns left of an episode, by its turns so far."""
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
    """The share of episodes with more than k turns, for each k up to the maximum of the finished ones."""
    at_risk = sum(finished.values()) + sum(reached.values())
    survival, share = [], 1.0
    for k in range(max(finished) + 1):
        ended = finished.get(k, 0)
        share *= 1 - ended / at_risk if at_risk else 0.0
        survival.append(share)
        at_risk -= ended + reached.get(k, 0)
    return survival
