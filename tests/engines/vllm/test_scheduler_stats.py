"""Counts of the schedulers: several cores, rates, and tasks that wait for a step."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from runner.engines.base import EngineStats
from runner.engines.vllm.scheduler_stats import Rate, SchedulerStats


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def stats(running: int = 0, waiting: int = 0, *, usage: float = 0.0, queries: int = 0, hits: int = 0) -> Any:
    cache = SimpleNamespace(queries=queries, hits=hits)
    return SimpleNamespace(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_skipped_waiting_reqs=1,
        kv_cache_usage=usage,
        prefix_cache_stats=cache,
    )


def test_the_cores_of_a_data_parallel_engine_are_counted_together() -> None:
    count = SchedulerStats()
    count.record(0, stats(3, 2, usage=0.25, queries=100, hits=40))
    count.record(1, stats(5, 0, usage=0.5, queries=50, hits=10))
    count.record(1, stats(4, 0, usage=0.4, queries=7))
    assert (count.running, count.queued, count.open, count.kv_usage) == (7, 4, 11, 0.4)
    assert (count.prefix_queries, count.prefix_hits) == (157, 50)


def test_clear_resets_open_requests_and_cache_use() -> None:
    count = SchedulerStats()
    count.clear()
    assert (count.open, count.kv_usage) == (0, None)
    for core in (0, 1):
        count.record(core, stats(3, 2, usage=0.25, queries=100, hits=40))
    count.clear()
    assert (count.running, count.queued, count.open, count.kv_usage) == (0, 0, 0, 0.0)
    assert (count.prefix_queries, count.prefix_hits) == (200, 80)


def test_a_scheduler_without_a_prefix_cache_counts_none() -> None:
    count = SchedulerStats()
    said = stats(1)
    said.prefix_cache_stats = None
    count.record(0, said)
    assert (count.open, count.prefix_queries) == (2, 0)


def test_the_hit_rate_is_of_ids_and_unknown_before_the_first_prompt() -> None:
    assert EngineStats(open=0).prefix_hit_rate is None
    assert EngineStats(open=0, prefix_queries=200, prefix_hits=50).prefix_hit_rate == 0.25


def test_a_rate_is_of_the_last_ten_seconds_and_none_once_idle() -> None:
    clock = Clock()
    rate = Rate(clock)
    assert rate.per_second() == 0
    for _ in range(100):  # 20 a second, for ten seconds
        rate.add(2)
        clock.now += 0.1
    assert rate.per_second() == pytest.approx(20)
    clock.now += 5
    assert 0 < rate.per_second() < 20
    clock.now += 5
    assert rate.per_second() == 0
    rate.add(7)
    assert rate.per_second() == 7, "a run of less than a second counts as one second"


def test_a_rate_keeps_little_however_many_steps_there_are() -> None:
    clock = Clock()
    rate = Rate(clock)
    for _ in range(50_000):
        rate.add(1)
        rate.add(0)
        clock.now += 0.001
    assert rate.per_second() == pytest.approx(1000, rel=0.02)
    assert len(rate._buckets) <= 101


@pytest.mark.anyio
async def test_news_come_with_a_step_and_with_a_request_that_was_left() -> None:
    count = SchedulerStats()
    open_counts: list[int] = []

    async def listen() -> None:
        await count.wait_for_step()
        open_counts.append(count.open)

    notifiers: list[Callable[[], None]] = [lambda: count.record(0, stats(3)), count.notify, count.clear]
    for notify in notifiers:
        async with anyio.create_task_group() as group:
            group.start_soon(listen)
            group.start_soon(listen)
            await anyio.wait_all_tasks_blocked()
            notify()
    assert open_counts == [4, 4, 4, 4, 0, 0]
    with anyio.fail_after(300):
        await count.until_idle()
