"""A task source with pools of tasks by pass rate, for a run that prefers tasks of some difficulty."""

from __future__ import annotations

import enum
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from runner.errors import BadOption, BadTask
from runner.tasks import Task
from runner.trajectory import Trajectory

__all__ = ["Pool", "Pools"]


class Pool(enum.StrEnum):
    """The difficulty of a task, by its pass rate."""

    NEW = "new"
    """No episode of the task has a reward yet."""
    LOW = "low"
    """The pass rate is below 0.2."""
    MIDDLE = "middle"
    """The pass rate is from 0.2 to 0.8."""
    SOLVED = "solved"
    """The pass rate is above 0.8."""


LOW_RATE: Final = 0.2
"""The pass rate below which a task is in the pool `low`."""
SOLVED_RATE: Final = 0.8
"""The pass rate above which a task is in the pool `solved`."""
DEFAULT_WEIGHTS: Final[Mapping[str, float]] = {Pool.NEW: 1.0, Pool.LOW: 0.5, Pool.MIDDLE: 2.0, Pool.SOLVED: 0.1}


class Pools:
    """An endless task source for a run that prefers tasks by their pass rate.

        run = Run(environment, engine, tasks=Pools(tasks, weights={"new": 1, "middle": 2}), group_size=8)

    Each task is drawn in two steps: first a pool, by its weight, among the pools that have tasks; then a task of this
    pool. Seed and results determine the draws. A resumed run file restores the pass rates. The source never ends: leave
    the loop over the run, or use `run.groups(full=n)`.

    Args:
        tasks: the tasks, all kept in memory.
        weights: the weight of each pool by name; a pool that is left out has weight 0. If only pools of weight 0 have
            tasks, tasks are drawn from all pools. The default is new 1, low 0.5, middle 2 and solved 0.1.
        seed: seed of the draws.
        decay: weight of the previous pass rate when an episode is added.
        passed: function that returns the value of a scored trajectory, from 0 to 1; by default the clipped reward.

    Raises:
        BadOption: a weight, the decay or the name of a pool is invalid.
        BadTask: there is no task, or an id occurs twice.
    """

    def __init__(
        self,
        tasks: Iterable[Task],
        *,
        weights: Mapping[str, float] | None = None,
        seed: int = 0,
        decay: float = 0.8,
        passed: Callable[[Trajectory], float] | None = None,
    ) -> None:
        self._tasks: dict[str, Task] = {}
        for task in tasks:
            if task.id in self._tasks:
                raise BadTask(f"two tasks have the id {task.id!r}: give each task a unique id.")
            self._tasks[task.id] = task
        if not self._tasks:
            raise BadTask("Pools(tasks): there are no tasks to draw: give at least one.")
        self._weights = _checked_weights(DEFAULT_WEIGHTS if weights is None else weights)
        if not 0 <= decay < 1:
            raise BadOption(f"decay={decay!r:.60}: give a number from 0 to below 1.")
        self._decay = decay
        self._passed = passed or _reward
        self._random = random.Random(seed)
        self._rates: dict[str, float] = {}
        self._pools: dict[Pool, dict[str, None]] = {pool: {} for pool in Pool}
        self._pools[Pool.NEW] = dict.fromkeys(self._tasks)
        self._lock = threading.Lock()  # a run draws in one thread and reports results in another

    def __iter__(self) -> Iterator[Task]:
        while True:
            with self._lock:
                task = self._draw()
            yield task

    def finished(self, trajectory: Trajectory) -> None:
        """Update the pass rate of a task by a result. A trajectory without a reward changes nothing."""
        id = trajectory.task.id
        if trajectory.reward is None or not trajectory.outcome.scored or id not in self._tasks:
            return
        value = self._passed(trajectory)
        with self._lock:
            before = self._rates.get(id)
            self._pools[_pool(before)].pop(id, None)
            self._rates[id] = value if before is None else self._decay * before + (1 - self._decay) * value
            self._pools[_pool(self._rates[id])][id] = None

    @property
    def rates(self) -> Mapping[str, float]:
        """The pass rate of each task that has one."""
        with self._lock:
            return dict(self._rates)

    @property
    def sizes(self) -> Mapping[Pool, int]:
        """The number of tasks in each pool."""
        with self._lock:
            return {pool: len(ids) for pool, ids in self._pools.items()}

    def _draw(self) -> Task:
        pools = [pool for pool in Pool if self._pools[pool]]
        weights = [self._weights[pool] for pool in pools]
        if not any(weights):
            weights = [float(len(self._pools[pool])) for pool in pools]
        (pool,) = self._random.choices(pools, weights)
        return self._tasks[self._random.choice(list(self._pools[pool]))]


def _pool(rate: float | None) -> Pool:
    if rate is None:
        return Pool.NEW
    return Pool.LOW if rate < LOW_RATE else Pool.SOLVED if rate > SOLVED_RATE else Pool.MIDDLE


def _checked_weights(weights: Mapping[str, float]) -> dict[Pool, float]:
    checked = dict.fromkeys(Pool, 0.0)
    for name, weight in weights.items():
        try:
            pool = Pool(name)
        except ValueError:
            raise BadOption(f"weights={{{name!r:.30}: ...}}: the pools are {', '.join(Pool)}.") from None
        if not 0 <= weight < float("inf"):
            raise BadOption(f"weights={{{name!r}: {weight!r:.30}}}: give a finite number of at least 0.")
        checked[pool] = float(weight)
    if not any(checked.values()):
        raise BadOption("weights: at least one pool needs a weight above 0.")
    return checked


def _reward(trajectory: Trajectory) -> float:
    assert trajectory.reward is not None, "only scored trajectories are counted"
    return min(1.0, max(0.0, trajectory.reward))
