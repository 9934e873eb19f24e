"""Live statistics of a fleet: workers with problems, the choice of shown workers, and their descriptions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runner import FleetWorker
from runner.concurrency.loop_lag import LATE_SECONDS
from runner.runs.fleet_stats import (
    SILENT_SECONDS,
    WAITED_SECONDS,
    FleetStats,
    Trouble,
    fleet_in_words,
    versions_in_words,
    worker_in_words,
)
from runner.runs.player import IdleReason


def worker(number: int, **otherwise: Any) -> FleetWorker:
    well = FleetWorker(
        number=number,
        node=f"node-{number // 8}",
        pid=number,
        playing=60,
        width=64,
        version="13",
        lag=0.003,
        silent=1.0,
        oldest="main: engine",
        waited=4.0,
    )
    return replace(well, **otherwise)


def fleet(*workers: FleetWorker, **otherwise: Any) -> FleetStats:
    return FleetStats(**{"workers": workers, "most": len(workers), "version": "13", **otherwise})


def numbers(workers: list[FleetWorker]) -> list[int]:
    return [worker.number for worker in workers]


@pytest.mark.parametrize(
    ("otherwise", "troubles"),
    [
        ({}, []),
        ({"silent": SILENT_SECONDS + 1}, [Trouble.SILENT]),
        ({"waited": WAITED_SECONDS + 1}, [Trouble.STUCK]),
        ({"version": "12"}, [Trouble.OUTDATED]),
        ({"lag": LATE_SECONDS + 1}, [Trouble.LATE]),
        ({"lag": LATE_SECONDS + 1, "silent": SILENT_SECONDS + 1}, [Trouble.SILENT, Trouble.LATE]),
    ],
)
def test_silent_stuck_outdated_or_late_workers_have_problems(
    otherwise: dict[str, Any], troubles: list[Trouble]
) -> None:
    seen = fleet(worker(0, **otherwise))
    assert seen.troubles(seen.workers[0]) == troubles
    assert len(seen.troubled()) == bool(troubles)


def test_worst_workers_come_first_ignoring_healthy_values() -> None:
    late, outdated = worker(0, lag=0.2, silent=4.9), worker(1, version="12", silent=4.8)
    stuck, silent = worker(2, waited=90.0, silent=0.1), worker(3, silent=20.0)
    assert numbers(fleet(late, outdated, stuck, silent, worker(4)).troubled()) == [3, 2, 1, 0]
    assert numbers(fleet(late, outdated, stuck, silent).troubled(2)) == [3, 2]
    alike = [worker(number, version="12", lag=0.001 * (number % 7)) for number in range(20)]
    assert numbers(fleet(*alike).troubled(3)) == [0, 1, 2]


def test_large_fleet_shows_problems_and_extremes() -> None:
    many = [worker(number) for number in range(500)]
    many[300] = worker(300, waited=340.0)
    many[117] = worker(117, silent=90.0)
    many[200], many[40] = worker(200, playing=2), worker(40, playing=64)
    looked_at = numbers(fleet(*many).worth_a_look(8))
    assert looked_at[:2] == [117, 300], "workers with problems, in the order of their numbers"
    assert len(looked_at) == 6
    assert {200, 40} < set(looked_at[2:])
    assert numbers(fleet(*many).worth_a_look(1)) == [117]
    assert numbers(fleet(*many).worth_a_look(0)) == []
    assert len(fleet(*[replace(each, version="12") for each in many]).worth_a_look(8)) == 8


def test_few_workers_are_all_worth_a_look() -> None:
    assert numbers(fleet(*[worker(number) for number in range(8)]).worth_a_look(8)) == list(range(8))


def test_fleet_line_counts_playing_outdated_and_absent_workers() -> None:
    well = [worker(number) for number in range(3)]
    assert fleet_in_words(fleet(*well)) == "3 of 3 workers"
    absent = {IdleReason.RESTING: 1, IdleReason.WAITING: 2, IdleReason.UNPLACED: 56}
    assert fleet_in_words(fleet(*well, most=62, absent=absent)) == (
        "3 of 62 workers (1 paused after losses; 2 waiting for weights; 56 without a machine)"
    )
    old, older = worker(3, version="12"), worker(4, version="11")
    assert fleet_in_words(fleet(*well, old)) == "4 of 4 workers (1 on weights 12 instead of 13)"
    assert fleet_in_words(fleet(*well, old, replace(old, number=5), older)) == (
        "6 of 6 workers (3 on weights 12 x2, 11 x1 instead of 13)"
    )


def test_only_the_most_common_versions_are_named() -> None:
    assert versions_in_words([worker(number, version=str(number)) for number in range(5)]) == (
        "0 x1, 1 x1, 2 x1 and 2 others"
    )


def test_worker_line_has_every_known_value() -> None:
    line = worker_in_words(worker(3, node="node-7", lag=0.25, silent=90.0, oldest="search()", waited=340.0))
    assert line == (
        "worker 3 on node-7, 60 of 64 playing, weights 13, loop lag 250 ms, silent for 90 s, search() for 340 s"
    )
    assert worker_in_words(worker(3, oldest="")) == "worker 3 on node-0, 60 of 64 playing, weights 13, loop lag 3 ms"
