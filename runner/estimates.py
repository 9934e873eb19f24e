"""Statistics over the episodes of a run: means with a standard error clustered by task, and pass@k."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final

__all__ = [
    "MIN_SOLVED_REWARD",
    "Mean",
    "pass_all_k",
    "pass_at_k",
    "student_t_p_value",
    "student_t_quantile",
]

MIN_SOLVED_REWARD: Final = 1.0
"""Lowest reward of a solved episode."""

MAX_OPEN_TASKS: Final = 65_536
"""Maximum number of open tasks. Later values of an open task are added to its earlier values.

If there are more tasks, the one that got no value for the longest time is closed. Its later values count as a new task.
"""


class Mean:
    """The mean of values that belong to tasks, with its standard error clustered by task.

    The episodes of one task are not independent: they share its difficulty. Let G tasks have N values in total, with
    the mean m. Let S be the sum and n the number of the values of one task. The standard error is
    `sqrt(G / (G - 1) * sum((S - n * m) ** 2)) / N`, where the inner sum is over the tasks. If each task has one value,
    this is the ordinary standard error.

    All sums are exact, so the figures do not depend on the order of the values.
    """

    __slots__ = ("_numbers", "_open", "_products", "_squares", "_total", "count", "tasks")

    def __init__(self) -> None:
        self.count = 0
        """The number of values."""
        self.tasks = 0
        """The number of their tasks."""
        self._open: OrderedDict[str, tuple[int, int | Fraction]] = OrderedDict()
        self._total: int | Fraction = 0
        # Sums over the tasks of S * S, n * S and n * n. The standard error follows from them.
        self._squares: int | Fraction = 0
        self._products: int | Fraction = 0
        self._numbers = 0

    def add(self, value: float | None, task: str) -> None:
        """Add a value of a task.

        Args:
            value: a finite number; None is ignored.
            task: the id of the task.
        """
        if value is None:
            return
        # Integers are exact too, and much faster; most rewards are 0 or 1.
        exact: int | Fraction = int(value) if float(value).is_integer() else Fraction(value)
        number, total = self._open.pop(task, (0, 0))
        self.tasks += number == 0
        self.count += 1
        self._total += exact
        self._squares += exact * (2 * total + exact)
        self._products += total + (number + 1) * exact
        self._numbers += 2 * number + 1
        self._open[task] = number + 1, total + exact
        if len(self._open) > MAX_OPEN_TASKS:
            self._open.popitem(last=False)

    def close(self, task: str) -> None:
        """Close a task that gets no more values. Its values stay in the statistics."""
        self._open.pop(task, None)

    @property
    def mean(self) -> float:
        """The mean of the values; NaN without values."""
        return float(Fraction(self._total, self.count)) if self.count else math.nan

    @property
    def standard_error(self) -> float:
        """The standard error of the mean, clustered by task; NaN with fewer than two tasks."""
        if self.tasks < 2:
            return math.nan
        mean = Fraction(self._total, self.count)
        squares = self._squares - 2 * mean * self._products + mean * mean * self._numbers
        variance = squares * Fraction(self.tasks, (self.tasks - 1) * self.count**2)
        try:
            return math.sqrt(variance)
        except OverflowError:
            return math.inf

    def __repr__(self) -> str:
        if not self.count:
            return "Mean(no values)"
        return f"Mean({self.mean:.4g} ± {self.standard_error:.2g}, {self.count} values of {self.tasks} tasks)"

    def as_dict(self) -> dict[str, Any]:
        """The statistics as JSON values; None for NaN and infinity."""
        error = self.standard_error
        return {
            "mean": self.mean if self.count else None,
            "standard_error": error if math.isfinite(error) else None,
            "count": self.count,
            "tasks": self.tasks,
        }


def pass_at_k(solved: Mapping[tuple[int, int], int], k: int) -> float | None:
    """The probability that one of k episodes of a task is solved, unbiased (Chen et al. 2021).

    Args:
        solved: the number of groups by (number of episodes, number of solved ones).
        k: at least 1.

    Returns:
        The mean over the groups of at least k episodes; None without such a group.
    """
    missed = _mean_over_groups(solved, k, lambda n, c: math.comb(n - c, k))
    return None if missed is None else 1 - missed


def pass_all_k(solved: Mapping[tuple[int, int], int], k: int) -> float | None:
    """The probability that all of k episodes of a task are solved, unbiased: pass^k of the tau-bench paper.

    Args:
        solved: the number of groups by (number of episodes, number of solved ones).
        k: at least 1.

    Returns:
        The mean over the groups of at least k episodes; None without such a group.
    """
    return _mean_over_groups(solved, k, lambda n, c: math.comb(c, k))


def _mean_over_groups(solved: Mapping[tuple[int, int], int], k: int, chosen: Callable[[int, int], int]) -> float | None:
    """Return the mean of a share over the groups of at least k episodes; None without such a group.

    A group of n episodes, c of them solved, has `comb(n, k)` samples of k episodes. `chosen(n, c)` of them count, and
    the share of the group is `chosen(n, c) / comb(n, k)`.
    """
    groups = sum(count for (n, _), count in solved.items() if n >= k)
    if not groups:
        return None
    return sum(count * chosen(n, c) / math.comb(n, k) for (n, c), count in solved.items() if n >= k) / groups


# --- Student's t, for intervals and tests over a few tasks


def student_t_p_value(t: float, degrees: float) -> float:
    """The two-sided p-value of a t statistic: the probability of a statistic at least as far from 0."""
    if math.isinf(t):
        return 0.0
    return _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))


@lru_cache(maxsize=1024)  # comparisons need the same few numbers of tasks again and again
def student_t_quantile(confidence: float, degrees: float) -> float:
    """The bound that the absolute value of a t statistic does not exceed with the probability `confidence`.

    For 0.95 and many degrees of freedom, it is about 1.96.
    """
    low, high = 0.0, 1.0
    while student_t_p_value(high, degrees) > 1 - confidence:
        high *= 2
    for _ in range(_BISECTION_TIMES):
        middle = (low + high) / 2
        low, high = (middle, high) if student_t_p_value(middle, degrees) > 1 - confidence else (low, middle)
    return (low + high) / 2


_BISECTION_TIMES: Final = 80
_MAX_FRACTION_ITEMS: Final = 500
_FRACTION_TOLERANCE: Final = 1e-15


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (Lentz's method)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast only below this point
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x) - math.log(a)
    )
    fraction, c, d = 1.0, 1.0, 0.0
    for item in range(_MAX_FRACTION_ITEMS):
        m = item // 2
        if item == 0:
            factor = 1.0
        elif item % 2 == 0:
            factor = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            factor = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / _nonzero(1 + factor * d)
        c = _nonzero(1 + factor / c)
        fraction *= c * d
        if abs(1 - c * d) < _FRACTION_TOLERANCE:
            break
    return front * (fraction - 1)


def _nonzero(value: float) -> float:
    return value if abs(value) > 1e-300 else 1e-300
