"""What is shown of a run while it plays."""

import io
import math
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import anyio
import anyio.to_thread
import pytest
from rich.console import Console

from runner import (
    Concurrency,
    Conversation,
    Environment,
    Limits,
    Run,
    ScriptedEngine,
    Task,
    reward,
    tool,
)
from runner.cli.display import LiveDisplay, PlainDisplay, display_for, live_view
from runner.cli.report import summary_table
from runner.cli.run import Plan
from runner.cli.settings import RunSettings
from runner.concurrency.loop_lag import Blocker
from runner.engines.base import EngineStats
from runner.runs.figures import Figures, Gauge, Stuck, as_time, in_words

FIGURES = Figures(
    total=64,
    before=10,
    done=32,
    failed=2,
    running=16,
    waiting=3,
    rate=540.4,
    reward=0.6111,
    reward_error=0.05,
    elapsed=44.0,
    lag=0.003,
    slowest=(Stuck("17#0", 2, "main: engine", 4.25), Stuck("18#0", 0, "add()", 1.0)),
    fault="3#0 env_error: ValueError: no",
)


class Waiting(Environment):
    """Speaks; the second episode fails, and the third waits until it is told to go on."""

    def __init__(self, go: anyio.Event | None = None) -> None:
        self.go = go

    def tasks(self) -> Iterator[Task]:
        for number in range(4):
            yield Task(id=str(number), prompt="hello")

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate()
        if self.task.id == "1":
            raise ValueError("no\nsecond line")
        if self.task.id == "2" and self.go is not None:
            await self.go.wait()

    @reward
    def spoke(self) -> bool:
        return True


class Screen(io.StringIO):
    """Says when it was told that all four episodes are done."""

    def __init__(self) -> None:
        super().__init__()
        self.complete = threading.Event()

    def write(self, text: str) -> int:
        if "4 of 4" in text:
            self.complete.set()
        return super().write(text)


def drawn(figures: Figures, *, width: int, height: int = 30) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(live_view(figures, "calculator on smollm2-135m", width=width, height=height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_the_live_view_says_what_runs_waits_failed_and_is_slowest() -> None:
    lines = [line.strip() for line in drawn(FIGURES, width=120)]
    assert lines[0] == "calculator on smollm2-135m"
    for expected in (
        "32 of 64 · 16 running · 3 waiting for the engine · 2 failed",
        "540 tokens/s · reward 0.611 ± 0.050 · 0:44, 1:04 left · loop lag 3 ms",
        "last fault: 3#0 env_error: ValueError: no",
        "4.2 s  17#0  turn 3  waits for main: engine",
        "1.0 s  18#0  turn 1  waits for add()",
    ):
        assert expected in lines


@pytest.mark.parametrize("width", [24, 40, 60, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = drawn(FIGURES, width=width)
    assert max(map(len, lines)) <= width
    assert any("17#0" in line for line in lines)


def test_a_low_terminal_shows_fewer_of_the_slowest() -> None:
    assert not any("17#0" in line for line in drawn(FIGURES, width=100, height=6))
    assert any("32 of 64" in line for line in drawn(FIGURES, width=100, height=6))


def test_who_makes_the_loop_late_is_named_with_what_to_do() -> None:
    late = Figures(lag=0.5, blocker=Blocker("Mine.add (mine.py:7)", 3.0, thread=True))
    assert "slow loop: Mine.add (mine.py:7) it computes" in " ".join(drawn(late, width=200))


def test_what_is_inside_each_rank_of_an_engine_is_shown() -> None:
    figures = replace(FIGURES, ranks=(12, 3, 0))
    assert "12 + 3 + 0 inside 3 ranks" in " ".join(drawn(figures, width=200))
    assert "12 + 3 + 0 inside 3 ranks" in list(in_words(figures))
    assert not any("rank" in line for line in [*drawn(FIGURES, width=200), *in_words(FIGURES)])


def test_the_title_of_a_run_names_the_sizes_of_its_engine() -> None:
    options = ["max_num_seqs=8", "data_parallel_size=2", "tensor_parallel_size=4"]
    settings = RunSettings(environment="calculator", engine_options=options)
    plan = Plan.of(settings, lambda _: ScriptedEngine("Yes"))
    assert plan.title == "calculator on smollm2-135m, data_parallel_size=2, tensor_parallel_size=4"


@pytest.mark.anyio
async def test_ranks_are_read_from_the_engine_that_has_them() -> None:
    class Spread(ScriptedEngine):
        def stats(self) -> EngineStats:
            return replace(super().stats(), ranks=(2, 1))

    for engine, ranks in ((Spread("Yes"), (2, 1)), (ScriptedEngine("Yes"), ())):
        async with Run(Waiting, engine) as run:
            assert Gauge().read(run).ranks == ranks


def test_calls_that_cannot_be_read_are_counted_and_of_many_it_is_said_what_to_do() -> None:
    few, many = (" ".join(" ".join(drawn(Figures(calls=20, malformed=each), width=200)).split()) for each in (2, 5))
    assert "2 of 20 tool calls could not be read" in few
    assert "otherwise than its template" not in few
    assert "5 of 20 tool calls could not be read: the model seems to write calls otherwise than its template" in many
    assert "give the template that it was trained with (--template)" in many
    assert "could not be read" not in " ".join(drawn(Figures(calls=20), width=200))


class Calling(Environment):
    """Lets the model call a tool, as often as it likes."""

    limits = Limits(turns=4)

    def tasks(self) -> Iterator[Task]:
        yield Task(id="0", prompt="hello")

    @tool
    def wave(self) -> str:
        """Wave."""
        return "waved"

    @reward
    def spoke(self) -> bool:
        return True


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("said", "told"), [('<tool_call>{"wave"}</tool_call>', True), ('<tool_call>{"name": "wave"}</tool_call>', False)]
)
async def test_a_model_that_writes_otherwise_than_its_template_is_told_of_while_it_plays_and_at_the_end(
    said: str, told: bool
) -> None:
    async with Run(Calling, ScriptedEngine(said, template="hermes")) as run:
        [_ async for _ in run]
        figures = Gauge().read(run)
        summary = run.summary
    assert (figures.calls, figures.malformed) == (4, 4 if told else 0)
    assert ("4 of 4 tool calls could not be read" in list(in_words(figures))) == told
    console = Console(file=io.StringIO(), width=200)
    console.print(summary_table(summary.as_dict()))
    assert isinstance(console.file, io.StringIO)
    assert ("otherwise than its template" in console.file.getvalue()) == told


def test_time_left_follows_the_pace_of_this_run_and_not_of_earlier_ones() -> None:
    assert FIGURES.remaining == pytest.approx(32 * 2.0)
    assert Figures(total=None, done=3, elapsed=1.0).remaining is None
    assert Figures(total=8, done=0, elapsed=1.0).remaining is None
    assert (as_time(64.4), as_time(3661)) == ("1:04", "1:01:01")


@pytest.mark.anyio
async def test_the_gauge_reads_a_run_while_it_plays() -> None:
    go = anyio.Event()
    async with Run(Waiting(go), ScriptedEngine("hi"), concurrency=Concurrency(episodes=3)) as run:
        gauge = Gauge()
        async for _ in run:
            if run.summary.episodes == 3:
                break
        await anyio.wait_all_tasks_blocked()
        figures = gauge.read(run, total=4)
        assert (figures.done, figures.failed, figures.running, figures.total) == (3, 1, 1, 4)
        assert figures.reward == 1.0
        assert [(stuck.id, stuck.turns) for stuck in figures.slowest] == [("2#0", 1)]
        assert figures.elapsed > 0
        assert not math.isnan(figures.rate)
        go.set()
        assert [trajectory.id async for trajectory in run] == ["2#0"]
        assert gauge.read(run, total=4).running == 0


@pytest.mark.anyio
@pytest.mark.parametrize("terminal", [True, False], ids=["live", "plain"])
async def test_a_run_is_shown_from_its_start_to_its_end(terminal: bool) -> None:
    screen = Screen()
    environment = {"TERM": "xterm"}  # a dumb one gets plain lines
    console = Console(file=screen, force_terminal=terminal, width=100, color_system=None, _environ=environment)
    display = display_for(console, "waiting on scripted")
    assert isinstance(display, LiveDisplay if terminal else PlainDisplay)
    display.total = 4
    run = Run(Waiting(), ScriptedEngine("hi"))
    async with anyio.create_task_group() as group:
        group.start_soon(display.watch, run)
        await anyio.wait_all_tasks_blocked()
        async with run:
            async for trajectory in run:
                display.finished(trajectory)
                display.say(f"{trajectory.id} is over \x1b[2J")
        await anyio.to_thread.run_sync(screen.complete.wait, 20)
        group.cancel_scope.cancel()
    text = screen.getvalue()
    assert "starting the engine" in text
    assert "4 of 4" in text
    assert "\\x1b[2J" in text
    assert "\x1b[2J" not in text


def test_what_keeps_stdout_while_the_display_is_shown_does_not_write_over_it() -> None:
    screen = io.StringIO()
    shown = LiveDisplay(Console(file=screen, force_terminal=True), "Waiting")
    before = sys.stdout, sys.stderr
    with shown._shown():
        assert (sys.stdout, sys.stderr) == before
