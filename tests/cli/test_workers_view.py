"""Workers in the live display and in plain lines."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from runner import FleetWorker
from runner.cli.display import PlainDisplay, live_view
from runner.runs.fleet_stats import FleetStats
from runner.runs.live_stats import LiveStats, WaitingEpisode, in_words
from runner.runs.player import IdleReason
from tests.repository import DOCS

FIGURES = LiveStats(
    total=6400,
    done=3200,
    failed=2,
    running=448,
    rate=54040.0,
    elapsed=444.0,
    lag=0.003,
    slowest=tuple(WaitingEpisode(f"{number}#0", 2, "search(), on worker 3 on gpu-a00", 340.2) for number in range(5)),
)


def worker(number: int, **otherwise: Any) -> FleetWorker:
    well = FleetWorker(
        number=number,
        node=f"gpu-a{number // 4:02}",
        pid=number,
        playing=61 + number % 3,
        width=64,
        version="13",
        lag=0.003,
        silent=1.0,
        oldest="main: engine",
        waited=4.0 + number % 10,
    )
    return replace(well, **otherwise)


FEW = FleetStats(
    workers=(
        worker(0),
        worker(1),
        worker(2, version="12"),
        worker(3, oldest="search()", waited=340.2),
        worker(4),
        worker(6, lag=0.25),
        worker(7, silent=92.0),
    ),
    most=8,
    version="13",
    absent={IdleReason.STARTING: 1},
)


def many(*otherwise: FleetWorker, **fields: Any) -> FleetStats:
    workers = {number: worker(number) for number in range(500)} | {each.number: each for each in otherwise}
    return FleetStats(**{"workers": tuple(workers.values()), "most": 500, "version": "13", **fields})


def drawn(fleet: FleetStats | None, *, width: int = 80, height: int = 24) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(live_view(replace(FIGURES, fleet=fleet), "weather on qwen3-8b", width=width, height=height))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def rows(lines: list[str]) -> list[str]:
    """The rows of workers, without the column heads."""
    (heading,) = [place for place, line in enumerate(lines) if line.startswith("worker ")]
    return [line for line in lines[heading + 1 :] if re.match(r" *\d+ +(\S+ +)?\d+/\d+", line)]


@pytest.mark.parametrize("width", [80, 120])
def test_few_workers_have_a_row_each(width: int) -> None:
    lines = drawn(FEW, width=width)
    assert [" ".join(row.split()) for row in rows(lines)] == [
        "0 gpu-a00 61/64 13 3 ms 1 s 4 s for main: engine",
        "1 gpu-a00 62/64 13 3 ms 1 s 5 s for main: engine",
        "2 gpu-a00 63/64 12 3 ms 1 s 6 s for main: engine",
        "3 gpu-a00 61/64 13 3 ms 1 s 340 s for search()",
        "4 gpu-a01 62/64 13 3 ms 1 s 8 s for main: engine",
        "6 gpu-a01 61/64 13 250 ms 1 s 10 s for main: engine",
        "7 gpu-a01 62/64 13 3 ms 92 s 11 s for main: engine",
    ]
    assert "7 of 8 workers · 1 on weights 12 instead of 13 · 1 starting" in lines
    assert sum(line.endswith("search(), on worker 3 on gpu-a00") for line in lines) == 5, "the episodes are shown too"


def test_the_view_of_the_page_on_scale_is_what_is_drawn() -> None:
    (block,) = re.findall(r"```text\n(\d+ of \d+ workers.*?)```", (DOCS / "scale.md").read_text(), flags=re.DOTALL)
    lines = drawn(FEW)
    first = lines.index("7 of 8 workers · 1 on weights 12 instead of 13 · 1 starting")
    assert block.splitlines() == lines[first : first + 1 + 1 + len(FEW.workers)]


def test_many_workers_show_stuck_one_and_a_line_for_the_rest() -> None:
    stuck, silent = worker(117, oldest="search()", waited=340.2), worker(203, silent=80.0, playing=7)
    lines = drawn(many(stuck, silent, worker(340, playing=2), worker(341, lag=0.012)))
    shown = rows(lines)
    assert [int(row.split()[0]) for row in shown[:2]] == [117, 203], "workers with faults come first"
    assert shown[0].endswith("340 s for search()")
    assert " 80 s " in shown[1]
    assert any(row.split()[:3] == ["340", "gpu-a85", "2/64"] for row in shown), "the worker with the fewest episodes"
    assert "494 more on 125 nodes · 61-63 playing · lag up to 12 ms" in lines
    assert len(lines) <= 24


def test_workers_without_row_are_counted_with_versions() -> None:
    lines = drawn(many(*[worker(number, version="12") for number in range(100)]), width=100)
    assert "500 of 500 workers · 100 on weights 12 instead of 13" in lines
    (summary,) = [line for line in lines if " more on " in line]
    left = 100 - len(rows(lines))
    assert f"{left} in trouble" in summary
    assert summary.endswith(f"weights 13 x400, 12 x{left}")


def test_a_tall_terminal_has_a_row_for_each_of_more_workers() -> None:
    forty = many().workers[:40]
    lines = drawn(FleetStats(workers=forty, most=40, version="13"), height=60)
    assert len(rows(lines)) == 40
    assert not any(" more on " in line for line in lines)


@pytest.mark.parametrize("fleet", [FEW, many(worker(4, silent=99.0), worker(5, waited=99.0))], ids=["few", "many"])
@pytest.mark.parametrize("width", [24, 40, 60, 66, 70, 80, 200])
def test_worker_lines_fit_the_terminal(fleet: FleetStats, width: int) -> None:
    named = [
        replace(each, node="rayclus-worker-gpu-group-" + "x" * 40, version="step-0012-" + "y" * 40, oldest="z" * 300)
        for each in fleet.workers
    ]
    long = replace(fleet, workers=tuple(named), absent=dict.fromkeys(IdleReason, 7))
    lines = drawn(long, width=width)
    assert max(map(len, lines)) <= width
    (heading,) = [place for place, line in enumerate(lines) if line.startswith("worker ")]
    shown = rows(lines)
    assert len(shown) >= 4
    assert lines[heading + 1 : heading + 1 + len(shown)] == shown, "a row is one line"
    assert all(line.endswith("…") for line in shown if width < 200)
    assert all(f"7 {why.value}" in " ".join(lines) for why in IdleReason)


def test_row_in_few_columns_names_the_problem_of_its_worker() -> None:
    assert [" ".join(row.split()) for row in rows(drawn(FEW, width=60))][2:] == [
        "2 63/64 weights 12, 6 s for main: engine",
        "3 61/64 340 s for search()",
        "4 62/64 8 s for main: engine",
        "6 61/64 lag 250 ms, 10 s for main: engine",
        "7 62/64 silent for 92 s, 11 s for main: engine",
    ]


@pytest.mark.parametrize("height", range(1, 30))
def test_number_of_workers_is_shown_at_any_height(height: int) -> None:
    for fleet in (FEW, many(), FleetStats(most=8, few=True, absent={IdleReason.RESTING: 8})):
        lines = drawn(fleet, height=height)
        assert any(f"{len(fleet.workers)} of {fleet.most} workers" in line for line in lines)
        assert len(lines) <= max(height, len(drawn(None, height=1)) + 1)


def test_a_long_name_of_a_node_loses_its_middle() -> None:
    (row,) = rows(drawn(FleetStats(workers=(worker(0, node="rayclus-worker-gpu-group-abcde"),), most=1, version="13")))
    assert " rayc…up-abcde " in row


def test_name_of_a_node_sends_no_control_codes_to_the_terminal() -> None:
    fleet = FleetStats(workers=(worker(0, node="a\x1b[2J", version="b\x1b[2J", oldest="c\x1b[2J\nd"),), most=1)
    assert "\x1b[2J" not in "\n".join(drawn(fleet))
    assert "\x1b[2J" not in ", ".join(in_words(replace(FIGURES, fleet=fleet)))


def test_a_run_without_workers_shows_nothing_of_them() -> None:
    for lines in (drawn(None), list(in_words(FIGURES))):
        assert not any("worker" in line.partition("search()")[0] for line in lines)
    assert drawn(None)[4:] == [
        f" 340.2 s  {number}#0  turn 3  waits for search(), on worker 3 on gpu-a00" for number in range(5)
    ]


def said(stats: LiveStats) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    PlainDisplay(console, "weather")._playing(replace(stats, elapsed=1000.0))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_plain_line_counts_workers_and_names_up_to_five() -> None:
    line, *named = said(replace(FIGURES, fleet=FEW))
    assert "448 running, 7 of 8 workers (1 on weights 12 instead of 13; 1 starting), 2 failed" in line
    assert [each.split()[1] for each in named] == ["7", "3", "2", "6"]
    assert named[1].endswith("61 of 64 playing, weights 13, loop lag 3 ms, search() for 340 s")
    assert len(said(replace(FIGURES, fleet=many(version="14")))) == 1 + 5
    assert len(said(replace(FIGURES, fleet=many()))) == 1
