"""The summary of a run file equals the summary of its rows, also after killed processes."""

from __future__ import annotations

import json
import math
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from typer.testing import CliRunner

from runner import Conversation, Environment, Outcome, Run, RunFile, Task, Trajectory, group_reward, metric, reward
from runner.cli.app import app
from runner.errors import RunFileError
from runner.estimates import Mean
from runner.interop import Mixture
from runner.testing import Fault, ScriptedEngine
from runner.trajectory import Group
from tests import sweeps
from tests.faults.crowd import GROUP_SIZE, Crowd, engine
from tests.playing import Plain, tasks
from tests.repository import ROOT
from tests.verifying import play as play_wandering

pytestmark = pytest.mark.anyio

OF_THE_LAUNCH = ("seconds", "tokens_per_second", "retried", "stale", "flat", "faults", "throttled", "resent")


def assert_alike(summary: dict[str, Any], expected: dict[str, Any], *, without: tuple[str, ...] = ()) -> None:
    """Compare two summaries. Seconds of turns may differ in the last digits, since the order of the sum differs."""
    summary, expected = (
        {key: value for key, value in one.items() if key not in without} for one in (summary, expected)
    )
    assert summary.pop("times") == pytest.approx(expected.pop("times"))
    summary["usage"]["cost"], expected["usage"]["cost"] = 0, 0
    assert summary == expected


async def played(environment: Any, with_engine: Any, file: Path, **options: Any) -> dict[str, Any]:
    async with Run(environment, with_engine, file=file, breaker=1, **options) as run:
        async for _ in run:
            pass
    return run.summary.as_dict()


def summary_of(file: Path) -> dict[str, Any]:
    with RunFile(file) as run_file:
        return run_file.summary()


async def test_cancelled_episodes_complete_no_group(tmp_path: Path) -> None:
    class Waiting(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await conversation.generate()
            await anyio.sleep_forever()

    file = tmp_path / "run.db"
    playing = Run(Waiting, ScriptedEngine("yes"), file=file, tasks=tasks(2), group_size=2)
    async with playing as run, anyio.create_task_group() as group:
        group.start_soon(cancelled_at, run, 4)
        outcomes = [trajectory.outcome async for trajectory in run]
    assert outcomes == [Outcome.CANCELLED] * 4
    summary = run.summary.as_dict()
    assert summary["pass_at"] == summary["pass_all"] == {"1": None, "2": None}
    assert_alike(summary_of(file), summary)


async def cancelled_at(run: Run, count: int) -> None:
    """Cancel a run once this many of its episodes wait."""
    while sum(attempt.turns_taken for attempt in run.in_flight) < count:  # noqa: ASYNC110  # the run sets no event
        await anyio.sleep(0.01)
    run.cancel()


async def test_summary_of_rows_is_the_runs_with_groups_and_agents(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    live = await played(Crowd(8), engine(), file, group_size=GROUP_SIZE)
    assert_alike(summary_of(file), live)
    with RunFile(file) as run_file:
        assert run_file.header.group_rewards == ("rank",)


async def test_summary_of_rows_is_the_runs_with_all_kinds_of_turns(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    await play_wandering(file, "pythonic")
    (text,) = stored_summary(file)
    assert_alike(summary_of(file), json.loads(text))


async def test_summary_of_rows_is_the_runs_where_episodes_fail(tmp_path: Path) -> None:
    class Sometimes(Plain):
        @reward
        def correct(self) -> Any:
            if self.episode.index == 1:
                raise ConnectionError("503")
            return self.episode.index / 2

        @metric
        def index(self) -> int:
            return self.episode.index

    file = tmp_path / "run.db"
    failing = ScriptedEngine("Yes", faults=lambda ask: Fault.error(at=1) if ask.episode == "t2#0" else None)
    live = await played(Sometimes, failing, file, tasks=tasks(4), group_size=4, retries=1)
    assert live["outcomes"] == {"completed": 11, "engine_error": 1, "env_error": 4}
    assert_alike(summary_of(file), live)


def stored_summary(file: Path) -> Any:
    with closing(sqlite3.connect(file)) as connection:
        return connection.execute("SELECT summary FROM run").fetchone()


# --- killed launches


def expected_of(file: Path) -> dict[str, Any]:
    """Return the summary of the rows, computed in another way, from whole trajectories."""
    with RunFile(file) as run_file:
        rows = list(run_file.rows(trained=None))
        trajectories = [run_file.trajectory(row) for row in rows]
        scored = {(group.task_id, group.visit) for group in run_file.groups() if group.scored}
    episodes = {row.id: row.outcome for row in rows}
    main = {row.id: row for row in rows if row.agent == "main" and (row.task_id, row.visit) in scored}
    reward_of = Mean()
    for row in main.values():
        reward_of.add(row.reward, row.task_id)
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    return {
        "episodes": len(episodes),
        "outcomes": {str(outcome): count for outcome, count in sorted(Counter(episodes.values()).items())},
        "reward": reward_of.as_dict(),
        "turns": len(turns),
        "sampled": sum(turn.tokens for turn in turns),
        "calls": sum(len(turn.tool_calls) for turn in turns),
        "finishes": dict(sorted(Counter(str(turn.finish) for turn in turns).items())),
    }


def check(file: Path) -> dict[str, Any]:
    summary, expected = summary_of(file), expected_of(file)
    sampled = expected.pop("sampled")
    assert {name: summary[name] for name in expected} == expected
    assert summary["tokens"]["sampled"] == sampled
    with RunFile(file) as run_file:
        assert summary["outcomes"] == {str(outcome): n for outcome, n in sorted(run_file.outcomes().items())}
    shown = CliRunner().invoke(app, ["show", str(file)])
    assert shown.exit_code == 0, shown.output
    assert f"completed {summary['outcomes']['completed']} of {summary['episodes']}" in shown.output
    return summary


PLAYED = """
import sys
from pathlib import Path
from tests.faults.crowd import announce
from runner.runs.event_loop import on_event_loop

on_event_loop(announce, Path(sys.argv[1]))
"""


def start(file: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PLAYED, str(file)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)


def after(process: subprocess.Popen[bytes], lines: int, sent: signal.Signals) -> int:
    """Send a signal after this many announced trajectories, and wait for the end of the process."""
    assert process.stdout is not None
    for _ in range(lines):
        process.stdout.readline()
    os.kill(process.pid, sent)
    with process.stdout:
        process.stdout.read()
    return process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(sweeps.times(6, 1)))
def test_summary_follows_the_rows_after_kills_at_random(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    file = tmp_path / "run.db"
    # The first launch ends normally, with a summary that later launches must replace.
    anyio.run(until_some_are_there, file)
    early = check(file)
    assert early["seconds"] is not None
    ends: list[int] = []
    for _ in range(4):
        ends.append(after(start(file), dice.randrange(1, 16), signal.SIGKILL))
        summary = check(file)
        assert summary["episodes"] >= early["episodes"]
    if summary["episodes"] > early["episodes"] and set(ends) == {-signal.SIGKILL}:  # no launch finished before the kill
        assert (summary["seconds"], stored_summary(file)) == (None, (None,))
    process = start(file)
    process.communicate(timeout=120)
    assert process.returncode == 0
    last = check(file)
    assert last["outcomes"] == {"completed": 24 * GROUP_SIZE}
    assert last["seconds"] > 0
    assert_alike(last, json.loads(stored_summary(file)[0]))


async def until_some_are_there(file: Path) -> None:
    async with Run(Crowd(), engine(), group_size=GROUP_SIZE, file=file, seed=9) as run:
        async for _ in run:
            if run.summary.episodes >= 20:
                run.drain()


class Halves(Plain):
    def tasks(self) -> list[Task]:
        return tasks(6)

    @reward
    def half(self) -> float:
        return self.episode.rng.randrange(3) / 2


def mixture() -> Mixture:
    return Mixture({"plain": Plain(), "halves": (Halves(), 2), "crowd": Crowd(4)})


KILLED = """
import os, signal, sys
from pathlib import Path
import anyio
from runner import Run
from tests.faults.crowd import GROUP_SIZE, engine
from tests.store.test_stored_summary import mixture

async def main():
    async with Run(mixture(), engine(), group_size=GROUP_SIZE, file=Path(sys.argv[1]), seed=9) as run:
        async for _ in run:
            if run.summary.episodes >= 20:
                os.kill(os.getpid(), signal.SIGKILL)

anyio.run(main)
"""


@pytest.mark.slow
def test_summary_of_a_killed_mixture_has_its_environments(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    done = subprocess.run([sys.executable, "-c", KILLED, str(file)], cwd=ROOT, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    killed = check(file)
    assert stored_summary(file) == (None,)
    expected: dict[str, Mean] = {name: Mean() for name in ("plain", "halves", "crowd")}
    with RunFile(file) as run_file:
        scored = {(group.task_id, group.visit) for group in run_file.groups() if group.scored}
        for row in run_file.rows(trained=None):
            if row.agent == "main" and (row.task_id, row.visit) in scored:
                expected[row.task_id.partition("/")[0]].add(row.reward, row.task_id)
    assert killed["environments"] == {name: mean.as_dict() for name, mean in expected.items()}
    assert sum(each["count"] for each in killed["environments"].values()) == killed["reward"]["count"] > 0
    shown = CliRunner().invoke(app, ["show", str(file)])
    assert set(expected) <= {line.split()[0] for line in shown.output.splitlines() if line.strip()}
    last = anyio.run(partial(played, mixture(), engine(), file, group_size=GROUP_SIZE, seed=9))
    assert set(killed) == set(last)
    assert_alike(summary_of(file), last)


async def test_summary_of_rows_without_the_launchs_is_as_complete(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    live = await played(mixture(), engine(), file, group_size=GROUP_SIZE)
    assert live["environments"]["halves"]["count"] == 6 * GROUP_SIZE
    assert_alike(summary_of(file), live)
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("UPDATE run SET complete = 0, summary = NULL")  # as a killed launch leaves it
        connection.commit()
    summary = summary_of(file)
    assert set(summary) == set(live)
    assert_alike(summary, live, without=OF_THE_LAUNCH)


FULL = """
import resource, signal, sys
from pathlib import Path
from tests.faults.crowd import announce
from runner.runs.event_loop import on_event_loop

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
size = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
on_event_loop(announce, Path(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="there is no quota here")
@pytest.mark.parametrize("size", [450_000, pytest.param(700_000, marks=pytest.mark.whole)])
def test_summary_follows_the_rows_after_a_full_disk(tmp_path: Path, size: int) -> None:
    file = tmp_path / "run.db"
    anyio.run(until_some_are_there, file)
    command = [sys.executable, "-c", FULL, str(file), str(size)]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, text=True, timeout=120, check=False)
    assert "run file" in done.stderr
    check(file)


# --- several launches, groups and files


async def test_summary_of_an_interrupted_run_counts_cut_episodes(tmp_path: Path) -> None:
    class FirstAlone(Crowd):
        async def rollout(self, conversation: Any) -> None:
            await super().rollout(conversation)
            if self.task.id != "task 0":
                await anyio.sleep_forever()

    file = tmp_path / "run.db"
    async with Run(FirstAlone(6), engine(), group_size=GROUP_SIZE, file=file) as run:
        async for _ in run:
            break
    summary = check(file)
    assert summary["outcomes"]["cancelled"] > 0
    assert summary["seconds"] is not None


async def test_summary_leaves_out_rewards_of_a_reopened_group(tmp_path: Path) -> None:
    class Compared(Plain):
        def tasks(self) -> list[Task]:
            return tasks(2)

        @reward
        def correct(self) -> Any:
            if broken and self.episode.id == "t0#1":
                raise ConnectionError("503")
            return 1.0

        @group_reward
        def share(self, group: Group) -> list[float]:
            return [1 / len(group.trajectories)] * len(group.trajectories)

    file, broken = tmp_path / "run.db", True
    first = await played(Compared, ScriptedEngine("Yes"), file, group_size=3)
    assert_alike(summary_of(file), first)
    assert (first["rewards"]["share"]["count"], first["pass_at"]["1"]) == (5, pytest.approx(5 / 6))
    broken = False
    # Opening the file supersedes the failed episode, so its group must be scored again.
    async with Run(Compared, ScriptedEngine("Yes"), file=file, breaker=1, group_size=3, retry_failed=True) as run:
        run.cancel()
    summary = summary_of(file)
    assert summary["rewards"]["share"]["count"] == 3
    assert summary["reward"]["tasks"] == 1
    last = await played(Compared, ScriptedEngine("Yes"), file, group_size=3, retry_failed=True)
    assert_alike(summary_of(file), last)
    assert last["rewards"]["share"] == {"mean": pytest.approx(1 / 3), "standard_error": 0, "count": 6, "tasks": 2}


async def test_summary_of_a_task_that_comes_again_has_one_task(tmp_path: Path) -> None:
    class Twice:
        def __iter__(self) -> Any:
            yield from tasks(3)
            yield from tasks(3)

        def finished(self, trajectory: Trajectory) -> None: ...

    class Alternating(Plain):
        @reward
        def correct(self) -> float:
            return float(self.task.id == "t0")

    file = tmp_path / "run.db"
    live = await played(Alternating, ScriptedEngine("Yes"), file, tasks=Twice(), group_size=2)
    assert (live["episodes"], live["reward"]["count"], live["reward"]["tasks"]) == (12, 12, 3)
    assert live["reward"]["standard_error"] == pytest.approx(1 / 3)
    assert_alike(summary_of(file), live)


async def test_summary_of_a_stale_row_of_the_run_is_not_believed(tmp_path: Path) -> None:
    # The state after a launch of an earlier version, which deleted the summary only if the run was complete.
    file = tmp_path / "run.db"
    await played(Plain, ScriptedEngine("Yes"), file, tasks=tasks(5))
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("""UPDATE run SET complete = 0, summary = '{"episodes": 2, "seconds": 9.0}'""")
        connection.commit()
    summary = summary_of(file)
    assert (summary["episodes"], summary["outcomes"], summary["seconds"]) == (5, {"completed": 5}, None)


async def test_summary_of_a_file_without_episodes_is_empty(tmp_path: Path) -> None:
    class Nothing(Environment):
        def tasks(self) -> list[Task]:
            return []

        @reward
        def correct(self) -> bool:
            return True

    file = tmp_path / "run.db"
    live = await played(Nothing, ScriptedEngine("Yes"), file)
    assert_alike(summary_of(file), live)
    assert live["episodes"] == 0


async def test_summary_of_a_playing_run_counts_committed_episodes(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    counts = []
    async with Run(Plain, ScriptedEngine("Yes"), file=file, tasks=tasks(5)) as run:
        async for _ in run:
            summary = summary_of(file)
            counts.append(summary["episodes"])
            # The run may end, and store its seconds, while the last trajectories are still unread.
            assert summary["seconds"] is None or summary["episodes"] == 5
    assert counts[-1] == 5
    assert all(math.isfinite(count) and count >= number for number, count in enumerate(counts, 1))


async def test_summary_of_damaged_rows_names_the_file_and_the_fix(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    await played(Plain, ScriptedEngine("Yes"), file)
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("UPDATE episodes SET metrics = 'no JSON'")
        connection.commit()
    with RunFile(file) as run_file, pytest.raises(RunFileError, match=r"run\.db: its rows are damaged.*verify"):
        run_file.summary()
