"""Statistics of comparisons: differences over tasks with intervals, paired tests, Holm's method, clustered errors."""

from __future__ import annotations

import enum
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from runner.estimates import student_t_p_value, student_t_quantile

__all__ = ["Decision", "MetricDifference", "clustered_difference", "holm", "paired_difference"]

CONFIDENCE_SHARE: Final = 0.95
NORMAL_POWER_FACTOR: Final = (1.959964 + 0.841621) ** 2
"""The square of the sum of two normal quantiles: for 95% confidence, two-sided, and for a power of 80%."""
MAX_MORE_TASKS: Final = 1_000_000
MAX_EXACT_TASKS: Final = 12
"""Maximum number of tasks for the exact test. With more tasks, its smallest possible p-value is below 0.0003."""
MIN_DECISIVE_TASKS: Final = 6
"""Minimum number of tasks with which the exact test can be decisive: 2 / 2**6 < 0.05."""


class Decision(enum.StrEnum):
    """The result of a comparison of one metric."""

    HIGHER = "higher"
    """The metric is higher in the second file."""
    LOWER = "lower"
    """The metric is lower in the second file."""
    UNDECIDED = "not decisive"
    """The difference may be chance."""


@dataclass(frozen=True, slots=True)
class MetricDifference:
    """The difference of one metric between two files, over the tasks that both have."""

    metric: str
    """"reward", "solved", "reward NAME", "metric NAME", "turns", "sampled", "seconds", or a metric of failed episodes.
    """
    slice: str
    """The value of the task's field, or "" for all tasks."""
    tasks: int
    """Number of tasks with values in both files."""
    episodes: tuple[int, int]
    """Number of episodes of these tasks in each file."""
    first: float
    """The mean over the tasks in the first file; each task counts the same."""
    second: float
    """The mean over the tasks in the second file."""
    difference: float
    """`second - first`."""
    low: float | None
    """The lower end of the 95% interval of the difference; None with fewer than two tasks."""
    high: float | None
    """The upper end of the interval."""
    p_value: float | None
    """The two-sided p-value of the paired t test. With up to 12 tasks, the p-value of the exact sign-flip test, if that
    is larger. In slices, the p-value is adjusted by Holm's method. None with fewer than two tasks.
    """
    more_tasks: int | None
    """The number of further tasks that would show a difference of this size, with a probability of 80%; None if the
    result is decisive, or no number is known."""

    @property
    def decision(self) -> Decision:
        """The result: decisive below a p-value of 0.05."""
        if self.p_value is None or self.p_value >= 1 - CONFIDENCE_SHARE:
            return Decision.UNDECIDED
        return Decision.HIGHER if self.difference > 0 else Decision.LOWER

    @property
    def words(self) -> str:
        """The result in one sentence."""
        if self.decision is not Decision.UNDECIDED:
            return f"decisive: B is {self.decision.value} by {abs(self.difference):.3g}"
        if self.p_value is None:
            return "not decisive: an interval needs two tasks"
        if self.difference == 0:
            return "not decisive: no difference was seen"
        if self.more_tasks is None:
            return "not decisive: the difference is too small for any practical number of tasks"
        return f"not decisive: about {self.more_tasks:,} more tasks would decide, if the difference stays the same"


def paired_difference(
    metric: str, pairs: Sequence[tuple[float, float]], *, slice: str = "", episodes: tuple[int, int] = (0, 0)
) -> MetricDifference:
    """The difference of means over tasks, with its interval and its p-value (see `MetricDifference`).

    Each pair has the means of one task in both files. The episodes of a task are one observation, so the interval is
    clustered by task, for any number of episodes.

    Args:
        metric: the name of the metric.
        pairs: (mean in the first file, mean in the second file) of each task; at least one.
        slice: the name of the slice, or "".
        episodes: the number of episodes in each file.
    """
    count = len(pairs)
    changes = [second - first for first, second in pairs]
    mean = math.fsum(changes) / count
    first, second = (math.fsum(pair[side] for pair in pairs) / count for side in (0, 1))
    low = high = p_value = more = None
    if count > 1:
        error = _standard_error(changes, mean)
        half = student_t_quantile(CONFIDENCE_SHARE, count - 1) * error
        low, high = mean - half, mean + half
        p_value = student_t_p_value(mean / error, count - 1) if error else (1.0 if mean == 0 else 0.0)
        p_value = max(p_value, _exact_p_value(changes))
        if p_value >= 1 - CONFIDENCE_SHARE:
            more = _more_tasks(count, mean, error)
    return MetricDifference(metric, slice, count, episodes, first, second, mean, low, high, p_value, more)


def _standard_error(changes: Sequence[float], mean: float) -> float:
    count = len(changes)
    # hypot scales, so that values up to the largest float do not overflow.
    return math.hypot(*(change - mean for change in changes)) / math.sqrt(count - 1) / math.sqrt(count)


def _exact_p_value(changes: Sequence[float]) -> float:
    """The p-value of the exact sign-flip test; 0 for more than `MAX_EXACT_TASKS` changes.

    It is the share of all choices of signs with which the mean is at least as far from 0 as the mean of `changes`.
    The t test treats equal changes of two or three tasks as certain; this test does not.
    """
    if len(changes) > MAX_EXACT_TASKS:
        return 0.0
    largest = max(map(abs, changes)) or 1.0
    scaled = [change / largest for change in changes]
    bound = abs(math.fsum(scaled)) - 1e-9
    signs = itertools.product((1, -1), repeat=len(scaled) - 1)
    sums = [scaled[0] + math.fsum(map(operator.mul, each, scaled[1:])) for each in signs]
    return sum(abs(each) >= bound for each in sums) / len(sums)


def _more_tasks(count: int, mean: float, error: float) -> int | None:
    """The number of further tasks that would decide with a probability of 80%; None if no number is known."""
    if not mean or not math.isfinite(error):
        return None
    needed = max(MIN_DECISIVE_TASKS, NORMAL_POWER_FACTOR * count * (error / mean) ** 2)
    return max(1, math.ceil(needed) - count) if needed < MAX_MORE_TASKS else None


def holm(differences: Sequence[MetricDifference]) -> Iterator[MetricDifference]:
    """The differences with p-values adjusted for their number, by Holm's method."""
    known = sorted((each.p_value, place) for place, each in enumerate(differences) if each.p_value is not None)
    adjusted: dict[int, float] = {}
    largest = 0.0
    for rank, (p_value, place) in enumerate(known):
        largest = max(largest, min(1.0, p_value * (len(known) - rank)))
        adjusted[place] = largest
    for place, each in enumerate(differences):
        yield _adjusted(each, adjusted[place]) if place in adjusted else each


def _adjusted(each: MetricDifference, p_value: float) -> MetricDifference:
    """The difference with another p-value, and the number of further tasks that belongs to it."""
    more = each.more_tasks
    if more is None and p_value >= 1 - CONFIDENCE_SHARE and each.high is not None:
        error = (each.high - each.difference) / student_t_quantile(CONFIDENCE_SHARE, each.tasks - 1)
        more = _more_tasks(each.tasks, each.difference, error)
    return replace(each, p_value=p_value, more_tasks=more)


def clustered_difference(
    first: Sequence[tuple[str, float]], second: Sequence[tuple[str, float]]
) -> tuple[float, float, int]:
    """The difference of the means of two samples, its standard error clustered by task, and the number of tasks.

    Each sample has (task, value) of its episodes, at least one; a task may be in both. The standard error comes from a
    linear regression of the value on the sample (first or second), with clustered errors and the usual correction for
    few tasks and episodes.
    """
    samples, count = (first, second), len(first) + len(second)
    # The values are scaled, so that sums of the largest floats do not overflow.
    scale = max(abs(value) for sample in samples for _, value in sample) or 1.0
    means = [math.fsum(value / scale for _, value in sample) / len(sample) for sample in samples]
    sums: dict[str, float] = defaultdict(float)
    for sample, mean, sign in zip(samples, means, (-1, 1), strict=True):
        for task, value in sample:
            sums[task] += sign * (value / scale - mean) / len(sample)
    tasks = len(sums)
    correction = tasks / (tasks - 1) * (count - 1) / (count - 2) if tasks > 1 and count > 2 else math.inf
    error = math.hypot(*sums.values()) * math.sqrt(correction) if math.isfinite(correction) else math.inf
    return scale * (means[1] - means[0]), scale * error, tasks
