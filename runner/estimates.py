"""Statistics over the episodes of a run: means with a standard error clustered by task, and pass@k."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Final

__all__ = ["MIN_SOLVED_REWARD", "Mean", "pass_at_k"]

MIN_SOLVED_REWARD: Final = 1.0
"""Lowest reward of a solved episode."""

MAX_OPEN_TASKS: Final = 65_536
"""Tasks whose next values are added to their earlier ones; later values of older tasks count as new tasks."""


class Mean:
    """The mean of values that belong to tasks, with its standard error clustered by task.

    The episodes of one task are not independent: they share its difficulty. With the sum S and the number n of the
    values of each of G tasks, and N values in all with the mean m, the standard error is `sqrt(G / (G - 1) * sum((S - n
    * m) ** 2)) / N`. Where each task has one value, this is the ordinary one.

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
        # Sums over the tasks of S * S, n * S and n * n, from which the standard error follows.
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
        """Forget a task that gets no more values; its values stay in the statistics."""
        self._open.pop(task, None)

    @property
    def mean(self) -> float:
        """The mean of the values; NaN without values."""
        return float(Fraction(self._total, self.count)) if self.count else math.nan

    @property
    def standard_error(self) -> float:
        """The standard error of the mean, clustered by task; NaN below two tasks."""
        if self.tasks < 2:
            return math.nan
        mean = Fraction(self._total, self.count)
        squares = self._squares - 2 * mean * self._products + mean * mean * self._numbers
        variance = squares * Fraction(self.tasks, (self.tasks - 1) * self.count**2)
        try:
            return math.sqrt(variance)
        except OverflowError:
            return math.inf

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
    groups = sum(count for (n, _), count in solved.items() if n >= k)
    if not groups:
        return None
    missed = sum(count * math.comb(n - c, k) / math.comb(n, k) for (n, c), count in solved.items() if n >= k)
    return 1 - missed / groups
