"""Pools: tasks by pass rate, drawn by weights and a seed, restored from a resumed run."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from runner import BadOption, BadTask, Outcome, Run, Task, reward
from runner.training import Pool, Pools
from tests.playing import Plain, recording, tasks
from tests.training.making import made

pytestmark = pytest.mark.anyio


def played(id: str, value: float | None, outcome: Outcome = Outcome.COMPLETED) -> Any:
    return made(id=f"{id}#0", reward=value, outcome=outcome)


def test_tasks_move_between_pools_by_their_pass_rate() -> None:
    pools = Pools(tasks(3), decay=0.5)
    assert pools.sizes == {Pool.NEW: 3, Pool.LOW: 0, Pool.MIDDLE: 0, Pool.SOLVED: 0}
    pools.finished(played("t0", 1.0))
    pools.finished(played("t1", 0.0))
    assert pools.sizes == {Pool.NEW: 1, Pool.LOW: 1, Pool.MIDDLE: 0, Pool.SOLVED: 1}
    pools.finished(played("t0", 0.0))
    pools.finished(played("t1", 1.0))
    assert pools.rates == {"t0": 0.5, "t1": 0.5}
    assert pools.sizes[Pool.MIDDLE] == 2


@pytest.mark.parametrize(
    "trajectory",
    [played("t0", None), played("t0", None, Outcome.ENV_ERROR), played("unknown", 1.0)],
    ids=["a reward of None", "failed", "another run's task"],
)
def test_result_without_a_reward_changes_no_rate(trajectory: Any) -> None:
    pools = Pools(tasks(1))
    pools.finished(trajectory)
    assert pools.rates == {}


def test_draws_follow_the_weights() -> None:
    pools = Pools(tasks(30), weights={"low": 1, "middle": 3})
    for number in range(10):
        pools.finished(played(f"t{number}", 0.0))
        pools.finished(played(f"t{number + 10}", 0.5))
    drawn = Counter(int(task.id[1:]) // 10 for task in islice(pools, 4000))
    assert drawn[2] == 0
    assert 2.5 < drawn[1] / drawn[0] < 3.5


def test_draws_are_the_same_for_the_same_seed() -> None:
    first, second, other = ([task.id for task in islice(Pools(tasks(50), seed=seed), 40)] for seed in (1, 1, 2))
    assert first == second != other


def test_tasks_of_weight_zero_are_drawn_if_there_are_no_others() -> None:
    pools = Pools(tasks(2), weights={"middle": 1})
    assert {task.id for task in islice(pools, 50)} == {"t0", "t1"}


async def test_resumed_file_restores_the_pass_rates(tmp_path: Path) -> None:
    class Half(Plain):
        @reward
        def correct(self) -> float:
            return float(int(self.task.id[1:]) % 2)

    async def play(count: int) -> Pools:
        pools = Pools(tasks(6), decay=0.5)
        async with Run(Half, recording("Yes"), tasks=pools, file=tmp_path / "run.db") as run:
            seen = 0
            async for _ in run:
                seen += 1
                if seen >= count:
                    break
            run.drain()
        return pools

    before = await play(40)
    assert set(before.rates.values()) == {0.0, 1.0}
    resumed = Pools(tasks(6), decay=0.5)
    async with Run(Half, recording("Yes"), tasks=resumed, file=tmp_path / "run.db") as run:
        await anext(run)
        assert resumed.rates.keys() >= before.rates.keys()


def test_unusable_pools_are_refused_by_name() -> None:
    with pytest.raises(BadOption, match="the pools are new, low, middle, solved"):
        Pools(tasks(1), weights={"hard": 1})
    with pytest.raises(BadOption, match="give a finite number of at least 0"):
        Pools(tasks(1), weights={"new": -1})
    with pytest.raises(BadOption, match="at least one pool"):
        Pools(tasks(1), weights={})
    with pytest.raises(BadOption, match="decay=1"):
        Pools(tasks(1), decay=1)
    with pytest.raises(BadTask, match="no task"):
        Pools([])
    with pytest.raises(BadTask, match="two tasks have the id 'a'"):
        Pools([Task(id="a"), Task(id="a")])
