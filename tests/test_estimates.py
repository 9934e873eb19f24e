"""Means with a standard error clustered by task, against references with another way of computing them."""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict

import numpy as np
import pytest

from runner.estimates import MAX_OPEN_TASKS, Mean

Values = list[tuple[float, str]]


def mean_of(values: Values) -> Mean:
    mean = Mean()
    for value, task in values:
        mean.add(value, task)
    return mean


def sandwich(values: Values) -> float:
    """The cluster-robust standard error of a regression on a constant, as statsmodels computes it."""
    y, tasks = np.array([value for value, _ in values]), np.array([task for _, task in values])
    design = np.ones((len(y), 1))
    bread = np.linalg.inv(design.T @ design)
    residuals = y - design @ (bread @ design.T @ y)
    scores = np.array([design[tasks == task].T @ residuals[tasks == task] for task in np.unique(tasks)])
    count, clusters = len(y), len(scores)
    # `use_correction=True`: G / (G - 1) * (N - 1) / (N - K), with one parameter.
    correction = clusters / (clusters - 1) * (count - 1) / (count - 1)
    return float(np.sqrt((correction * bread @ (scores.T @ scores) @ bread)[0, 0]))


def drawn(dice: random.Random) -> Values:
    values: Values = []
    for task in range(dice.randrange(2, 30)):
        level = dice.choice([0, 1, dice.gauss(0, 3), 1e9])
        values += [(level + dice.gauss(0, 1), f"task {task}") for _ in range(dice.randrange(1, 9))]
    dice.shuffle(values)
    return values


def test_ten_tasks_of_four_equal_episodes_have_the_error_of_ten() -> None:
    mean = mean_of([(float(task % 2), f"{task}") for task in range(10) for _ in range(4)])
    assert mean.as_dict() == {"mean": 0.5, "standard_error": pytest.approx(1 / 6), "count": 40, "tasks": 10}


@pytest.mark.parametrize("seed", range(50))
def test_error_equals_the_sandwich_for_groups_of_any_size(seed: int) -> None:
    values = drawn(random.Random(seed))
    mean = mean_of(values)
    assert mean.mean == pytest.approx(math.fsum(value for value, _ in values) / len(values), rel=1e-12)
    assert mean.standard_error == pytest.approx(sandwich(values), rel=1e-6)


def test_error_agrees_with_a_bootstrap_over_tasks() -> None:
    values = [(task % 3 / 2 + dice / 10, f"{task}") for task in range(60) for dice in range(4)]
    groups = defaultdict(list)
    for value, task in values:
        groups[task].append(value)
    sums = np.array([(sum(group), len(group)) for group in groups.values()])
    draws = np.random.default_rng(0).integers(0, len(sums), size=(20_000, len(sums)))
    means = sums[draws].sum(axis=1)
    assert mean_of(values).standard_error == pytest.approx(float((means[:, 0] / means[:, 1]).std()), rel=0.03)


def test_error_of_one_episode_a_task_is_the_ordinary_one() -> None:
    mean = mean_of([(-2.0, "a"), (4.0, "b"), (7.0, "c")])
    assert mean.mean == 3.0
    assert mean.standard_error == pytest.approx(math.sqrt(7))


@pytest.mark.parametrize("values", [[], [(1.0, "a")], [(1.0, "a"), (0.0, "a"), (3.5, "a")]])
def test_error_below_two_tasks_is_not_a_number(values: Values) -> None:
    mean = mean_of(values)
    assert math.isnan(mean.standard_error)
    assert json.loads(json.dumps(mean.as_dict(), allow_nan=False))["standard_error"] is None
    assert math.isnan(mean.mean) == (not values)


def test_repr_of_a_mean_has_its_figures() -> None:
    mean = Mean()
    assert repr(mean) == "Mean(no values)"
    mean.add(1, "a")
    assert repr(mean) == "Mean(1 ± nan, 1 values of 1 tasks)"
    mean.add(0, "a")
    mean.add(0, "b")
    assert repr(mean) == f"Mean(0.3333 ± {mean.standard_error:.2g}, 3 values of 2 tasks)"


def test_values_that_are_none_are_left_out() -> None:
    mean = Mean()
    for value, task in ((None, "a"), (1.0, "b"), (None, "b"), (0.0, "c")):
        mean.add(value, task)
    assert (mean.count, mean.tasks, mean.mean) == (2, 2, 0.5)


@pytest.mark.parametrize("seed", range(5))
def test_figures_do_not_depend_on_the_order(seed: int) -> None:
    values = [*drawn(random.Random(seed)), (0.1, "x"), (1e-300, "y"), (1e200, "z"), (-1e200, "z")]
    shuffled = random.Random(seed + 1).sample(values, len(values))
    assert mean_of(values).as_dict() == mean_of(shuffled).as_dict()


def test_values_too_large_for_a_float_have_no_error() -> None:
    assert mean_of([(1.7e308, "a"), (-1.7e308, "b")]).as_dict()["standard_error"] is None


def test_a_closed_task_stays_in_the_figures() -> None:
    values = [(float(task % 2), f"{task}") for task in range(10) for _ in range(4)]
    closing = Mean()
    for number, (value, task) in enumerate(values):
        closing.add(value, task)
        if number % 4 == 3:
            closing.close(task)
    assert closing.as_dict() == mean_of(values).as_dict()


def test_tasks_that_are_never_closed_take_bounded_memory() -> None:
    mean = mean_of([(1.0, f"{number}") for number in range(MAX_OPEN_TASKS + 10)])
    assert (mean.tasks, len(mean._open)) == (MAX_OPEN_TASKS + 10, MAX_OPEN_TASKS)
