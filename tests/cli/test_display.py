"""The live display of a run."""

import io
import math
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Self

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
from runner.cli.run import RunPlan
from runner.cli.settings import RunSettings
from runner.concurrency.loop_lag import Blocker
from runner.engines.base import EngineStats, FinishReason
from runner.runs.live_stats import LiveStats, StatsReader, WaitingEpisode, as_time, in_words
from runner.runs.reporter import PlainReporter
from runner.runs.summary import Summary
from runner.runs.time_left import TimeLeft
from runner.tokens.junction import Anchor, Close, Result, Seam
from tests.terminal import Terminal

FIGURES = LiveStats(
    total=64,
    before=10,
    done=32,
    failed=2,
    running=16,
    in_engine=11,
    waiting=3,
    read=1850.2,
    rate=540.4,
    left=TimeLeft(64.0, 12.0),
    reward=0.6111,
    reward_error=0.05,
    elapsed=44.0,
    lag=0.003,
    slowest=(WaitingEpisode("17#0", 2, "main: engine", 4.25), WaitingEpisode("18#0", 0, "add()", 1.0)),
    fault="3#0 env_error: ValueError: no",
)


class Waiting(Environment):
    """Environment with one turn. The second episode then fails, and the third waits for `go`."""

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
    """Terminal that sets `complete` once it shows four finished episodes."""

    def __init__(self) -> None:
        super().__init__()
        self.complete = threading.Event()

    def write(self, text: str) -> int:
        if "4 of 4" in text:
            self.complete.set()
        return super().write(text)


def drawn(stats: LiveStats, *, width: int, height: int = 30) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(live_view(stats, "calculator on smollm2-135m", width=width, height=height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_live_view_shows_running_failed_and_slowest_episodes() -> None:
    lines = [line.strip() for line in drawn(FIGURES, width=120)]
    assert lines[0] == "calculator on smollm2-135m"
    for expected in (
        "32 of 64 · 16 running (11 in the engine, 3 waiting for a place) · 2 failed",
        "1,850 tokens/s read, 540 tokens/s sampled · reward 0.611 ± 0.050 · 0:44, 1:04 ± 0:12 left · loop lag 3 ms",
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


def test_code_that_blocks_the_loop_is_named_with_its_cause() -> None:
    late = LiveStats(lag=0.5, blocker=Blocker("Mine.add (mine.py:7)", 3.0, thread=True))
    assert "slow loop: Mine.add (mine.py:7) it computes" in " ".join(drawn(late, width=200))


def test_requests_inside_each_rank_of_an_engine_are_shown() -> None:
    stats = replace(FIGURES, ranks=(12, 3, 0))
    assert "12 + 3 + 0 inside 3 ranks" in " ".join(drawn(stats, width=200))
    assert "12 + 3 + 0 inside 3 ranks" in list(in_words(stats))
    assert not any("rank" in line for line in [*drawn(FIGURES, width=200), *in_words(FIGURES)])


def test_the_title_of_a_run_names_the_sizes_of_its_engine() -> None:
    options = ["max_num_seqs=8", "data_parallel_size=2", "tensor_parallel_size=4"]
    settings = RunSettings(environment="calculator", engine_options=options)
    plan = RunPlan.of(settings, lambda _: ScriptedEngine("Yes"))
    assert plan.title == "calculator on smollm2-135m, data_parallel_size=2, tensor_parallel_size=4"


@pytest.mark.anyio
async def test_ranks_are_read_from_the_engine_that_has_them() -> None:
    class Spread(ScriptedEngine):
        def stats(self) -> EngineStats:
            return replace(super().stats(), ranks=(2, 1))

    for engine, ranks in ((Spread("Yes"), (2, 1)), (ScriptedEngine("Yes"), ())):
        async with Run(Waiting, engine) as run:
            assert StatsReader().read(run).ranks == ranks


def test_unreadable_calls_are_counted_and_many_show_advice() -> None:
    few, many = (" ".join(" ".join(drawn(LiveStats(calls=20, malformed=each), width=200)).split()) for each in (2, 5))
    assert "2 of 20 tool calls could not be read" in few
    assert "in another format than its template" not in few
    assert (
        "5 of 20 tool calls could not be read: the model seems to write calls in another format than its template"
        in many
    )
    assert "give the template that it was trained with (--template)" in many
    assert "could not be read" not in " ".join(drawn(LiveStats(calls=20), width=200))


class Calling(Environment):
    """Environment in which the model may call a tool any number of times."""

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
    ("said", "reported"),
    [('<tool_call>{"wave"}</tool_call>', True), ('<tool_call>{"name": "wave"}</tool_call>', False)],
)
async def test_wrong_template_is_reported_during_and_after_the_run(said: str, reported: bool) -> None:
    async with Run(Calling, ScriptedEngine(said, template="hermes")) as run:
        [_ async for _ in run]
        stats = StatsReader().read(run)
        summary = run.summary
    assert (stats.calls, stats.malformed) == (4, 4 if reported else 0)
    assert ("4 of 4 tool calls could not be read" in list(in_words(stats))) == reported
    console = Console(file=io.StringIO(), width=200)
    console.print(summary_table(summary.as_dict()))
    assert isinstance(console.file, io.StringIO)
    assert ("in another format than its template" in console.file.getvalue()) == reported


def test_times_have_minutes_and_hours() -> None:
    assert (as_time(64.4), as_time(3661)) == ("1:04", "1:01:01")


@pytest.mark.anyio
async def test_the_gauge_reads_a_run_while_it_plays() -> None:
    go = anyio.Event()
    async with Run(Waiting(go), ScriptedEngine("hi"), concurrency=Concurrency(episodes=3)) as run:
        reader = StatsReader()
        async for _ in run:
            if run.summary.episodes == 3:
                break
        await anyio.wait_all_tasks_blocked()
        stats = reader.read(run, total=4)
        assert (stats.done, stats.failed, stats.running, stats.total) == (3, 1, 1, 4)
        assert stats.reward == 1.0
        assert [(stuck.id, stuck.turns) for stuck in stats.slowest] == [("2#0", 1)]
        assert stats.elapsed > 0
        assert not math.isnan(stats.rate)
        go.set()
        assert [trajectory.id async for trajectory in run] == ["2#0"]
        assert reader.read(run, total=4).running == 0


@pytest.mark.anyio
@pytest.mark.parametrize("terminal", [True, False], ids=["live", "plain"])
async def test_a_run_is_shown_from_its_start_to_its_end(terminal: bool) -> None:
    screen = Screen()
    environment = {"TERM": "xterm"}  # a dumb terminal gets plain lines
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


def test_kept_stdout_does_not_write_over_the_display() -> None:
    screen = io.StringIO()
    shown = LiveDisplay(Console(file=screen, force_terminal=True), "Waiting")
    before = sys.stdout, sys.stderr
    with shown._shown():
        assert (sys.stdout, sys.stderr) == before


CLEARED = "\x1b[H\x1b[2J"
RESIZED = """
import sys, time
from rich.console import Console
from runner.cli.display import LiveDisplay
from runner.runs.live_stats import LiveStats

display = LiveDisplay(Console(), "a long title of a run " * 3)
with display._shown():
    display.say("file  runs/calculator-001.db")
    while True:
        display._playing(LiveStats(total=64, done=12, running=8))
        time.sleep(0.05)
"""


@pytest.mark.parametrize(("columns", "rows"), [(50, 30), (140, 30), (100, 8)], ids=["narrower", "wider", "lower"])
def test_resized_window_is_cleared_and_lines_repeated(columns: int, rows: int, tmp_path: Path) -> None:
    with Terminal([sys.executable, "-c", RESIZED], folder=tmp_path) as terminal:
        terminal.read_until("12 of 64", seconds=300)
        assert CLEARED not in terminal.text
        before = len(terminal.text)
        terminal.resize(columns=columns, rows=rows)
        terminal.read_until(CLEARED, seconds=300)
        terminal.read_until("12 of 64", seconds=300)
        shown = terminal.text[before:].split(CLEARED)
        assert len(shown) == 2, "once"
        assert "file  runs/calculator-001.db" in shown[1]
        text = re.sub(r"\x1b\[[0-9;?]*m", "", shown[1])  # colours
        lines = re.split(r"\x1b\[[0-9;?]*[a-zA-Z]|[\r\n]", text)
        assert max(map(len, lines)) <= columns


# --- the start, and the first steps


class Starting(ScriptedEngine):
    """Engine that starts in two phases, each shown before the next begins, and then prints a line."""

    def __init__(self) -> None:
        super().__init__("hi")
        self.phase = "importing vLLM"

    @property
    def start_phase(self) -> str:
        return self.phase

    async def __aenter__(self) -> Self:
        await anyio.sleep(0.6)  # longer than the interval of the display
        self.phase = "loading the weights"
        await anyio.sleep(0.6)
        await super().__aenter__()
        self.phase, self.notes = "", ("computing in float32: bfloat16 is slow on this processor",)
        return self


def test_plain_lines_report_the_start_every_ten_seconds() -> None:
    said: list[str] = []

    class Kept(PlainReporter):
        def say(self, line: str) -> None:
            said.append(line)

    reporter = Kept("calculator on a model")
    for second in range(36):
        reporter._starting(
            second, ", importing vLLM" if second < 25 else ", loading the weights", "starting the engine"
        )
    assert [line.split("  ", 1)[1] for line in said] == [
        "calculator on a model: starting the engine, importing vLLM",
        "starting the engine, importing vLLM",
        "starting the engine, importing vLLM",
        "starting the engine, loading the weights",
    ]
    assert all(re.match(r" *\d+:\d\d  ", line) for line in said)


@pytest.mark.anyio
async def test_phases_and_notes_of_an_engine_are_shown() -> None:
    said: list[str] = []

    class Kept(PlainReporter):
        def _starting(self, seconds: float, doing: str, what: str) -> None:
            said.append(doing)

        def say(self, line: str) -> None:
            said.append(line)

    engine = Starting()
    run = Run(Waiting(), engine)
    async with anyio.create_task_group() as group:
        group.start_soon(Kept("x").watch, run)
        async with run:
            async for _ in run:
                pass
            while not any("computing in" in line for line in said):  # noqa: ASYNC110  # no event is set
                await anyio.sleep(0.05)
        group.cancel_scope.cancel()
    assert ", importing vLLM" in said
    assert ", loading the weights" in said
    (note,) = [line for line in said if "computing" in line]
    assert note.endswith("computing in float32: bfloat16 is slow on this processor")


@pytest.mark.anyio
async def test_notes_of_an_engine_that_was_entered_before_are_not_repeated() -> None:
    said: list[str] = []

    class Kept(PlainReporter):
        def say(self, line: str) -> None:
            said.append(line)

    async with Starting() as engine, anyio.create_task_group() as group:
        run = Run(Waiting(), engine)
        group.start_soon(Kept("x").watch, run)
        async with run:
            async for _ in run:
                pass
            while not any("4 of" in line or "4 episodes" in line for line in said):  # noqa: ASYNC110  # as above
                await anyio.sleep(0.05)
        group.cancel_scope.cancel()
    assert not any("computing in" in line for line in said)


@pytest.mark.anyio
async def test_tokens_read_are_shown_before_any_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reading(ScriptedEngine):
        computed = 0

        def stats(self) -> EngineStats:
            return replace(super().stats(), prompt_tokens=self.computed, steps=self.computed // 1024)

    now = 1000.0
    monkeypatch.setattr("runner.runs.live_stats.time", SimpleNamespace(monotonic=lambda: now))
    async with Run(Waiting, engine := Reading("Yes")) as run:
        reader = StatsReader()
        assert "tokens/s read" not in ", ".join(in_words(reader.read(run)))
        now, engine.computed = now + 4.0, 4096
        stats = reader.read(run)
        assert (stats.read, stats.rate) == (1024.0, 0.0)
        assert "1,024 tokens/s read, 0 tokens/s sampled" in list(in_words(stats))


@pytest.mark.anyio
async def test_pace_of_long_steps_is_kept_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(ScriptedEngine):
        computed = 0

        def stats(self) -> EngineStats:
            return replace(super().stats(), prompt_tokens=self.computed)

    now = 1000.0
    monkeypatch.setattr("runner.runs.live_stats.time", SimpleNamespace(monotonic=lambda: now))
    async with Run(Waiting, engine := Slow("Yes")) as run:
        reader, read = StatsReader(), list[float]()
        for second in range(1, 200):
            now += 1.0
            engine.computed = 1024 * min(second // 25, 4)  # a step takes 25 s, and there are four of them
            stats = reader.read(run)
            read.append(stats.read or 0.0)
    assert min(read[26:124]) > 15, "also just before the next step ends"
    assert read[-1] == 0.0, "no prompt token was read for a minute"
    assert stats.quiet == 99.0


def test_wait_for_the_first_tokens_is_shown() -> None:
    waits = LiveStats(total=64, running=48, in_engine=48, began=False)
    assert "waiting for the first tokens of the engine" in list(in_words(waits))
    assert "waiting for the first tokens of the engine" in " ".join(drawn(waits, width=120))
    assert "0 tokens/s sampled" in list(in_words(replace(waits, began=True)))
    assert "0 tokens/s sampled" in list(in_words(replace(waits, in_engine=0)))
    assert "waiting for the first tokens of the engine for 38 s" in list(in_words(replace(waits, quiet=38.2)))


def test_time_without_tokens_is_shown_in_place_of_rates() -> None:
    quiet = replace(FIGURES, quiet=42.4)
    assert "no tokens from the engine for 42 s" in list(in_words(quiet))
    assert "no tokens from the engine for 42 s" in " ".join(drawn(quiet, width=120))
    for stats in (replace(quiet, quiet=9.0), replace(quiet, in_engine=0)):  # a short step; only tools run
        assert "540 tokens/s sampled" in ", ".join(in_words(stats))


def test_the_counts_and_the_rows_of_those_in_the_engine_agree() -> None:
    stats = LiveStats(total=64, running=48, in_engine=48, slowest=(WaitingEpisode("1#0", 0, "main: engine", 3.0),))
    shown = " ".join(drawn(stats, width=120))
    assert "48 running (48 in the engine)" in shown
    assert "0 waiting" not in shown


# --- the summary


def test_only_verbose_summary_has_token_layer_terms() -> None:
    summary = Summary()
    summary.junctions[Result.APPENDED, Anchor.STOP, Close.SAMPLED, Seam.SPECIAL] = 128
    summary.turns, summary.finishes[FinishReason.STOP] = 192, 192
    summary.retried = 5
    summary.add_retry_cause("the engine sent nothing for 120 s")

    def shown(verbose: bool) -> str:
        console = Console(file=io.StringIO(), width=200)
        console.print(summary_table(summary.as_dict(), verbose=verbose))
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    plain = shown(False)
    assert not re.search(r"junction|anchor|seam|bridged|time a turn|stop", plain)
    assert re.search(r"turns +192 *\n", plain)
    assert "1 after: the engine sent nothing for 120 s" in plain
    assert "128 appended (anchor stop, close sampled, seam special)" in shown(True)
    assert "192 · stop 192" in shown(True)


def test_summary_counts_cut_turns_and_new_segments() -> None:
    summary = Summary()
    summary.turns, summary.finishes[FinishReason.LENGTH] = 10, 3
    summary.junctions[Result.FORKED, Anchor.NONE, Close.MASKED, Seam.VERIFIED] = 2
    summary.junction_causes["no_sentinel"] = 2
    console = Console(file=io.StringIO(), width=200)
    console.print(summary_table(summary.as_dict()))
    assert isinstance(console.file, io.StringIO)
    assert "10 · length 3 · 2 of them began a new segment" in console.file.getvalue()
    assert "no_sentinel 2" in console.file.getvalue()
