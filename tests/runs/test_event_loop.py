"""The synchronous entry point: event loop, garbage collector, signals, and the end of the process."""

import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from runner import (
    BadOption,
    BadTask,
    Concurrency,
    ConfigurationChanged,
    Conversation,
    Environment,
    Group,
    Outcome,
    RunFile,
    ScriptedEngine,
    Task,
    group_reward,
    reward,
    run,
)
from runner.runs.event_loop import on_event_loop, supervise
from runner.runs.reporter import Reporter
from runner.runs.run import Run

pytestmark = [pytest.mark.slow, pytest.mark.sample_functions(2)]

WATCHDOG_SECONDS = 600.0


class Greeting(Environment):
    """Environment with one turn."""

    def __init__(self, episodes: int = 8) -> None:
        self.episodes = episodes

    def tasks(self) -> Iterator[Task]:
        for number in range(self.episodes):
            yield Task(id=str(number), prompt="hello")

    @reward
    def spoke(self) -> bool:
        return self.episode.text == "hi"


class Interrupting(Greeting):
    """Environment whose fourth episode sends Ctrl-C while four are in flight."""

    def setup(self) -> None:
        if self.task.id == "3":
            os.kill(os.getpid(), signal.SIGINT)


class Waiting(Greeting):
    """Environment with one turn, which then waits for ever. The fourth episode sends `signals`."""

    signals = (signal.SIGINT, signal.SIGINT)

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate()
        if self.task.id == "3":
            for number in self.signals:
                os.kill(os.getpid(), number)
        await anyio.sleep_forever()


class Terminated(Waiting):
    signals = (signal.SIGTERM,)  # type: ignore[assignment]


def outcomes(path: Path) -> dict[Outcome, int]:
    with RunFile(path) as run_file:
        return run_file.outcomes()


def test_run_plays_to_the_end_and_returns_the_summary(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    summary = run(Greeting(), ScriptedEngine("hi"), file=file)
    assert (summary.episodes, summary.reward.mean) == (8, 1.0)
    assert outcomes(file) == {Outcome.COMPLETED: 8}


def test_run_on_a_running_event_loop_names_the_other_way() -> None:
    async def notebook() -> None:
        with pytest.raises(BadOption, match=r"an event loop already runs.*async with Run"):
            run(Greeting(), ScriptedEngine("yes"))

    anyio.run(notebook)


def test_faults_outside_episodes_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    class Ranked(Greeting):
        @group_reward
        def rank(self, group: Group) -> list[float]:
            return [1.0 for trajectory in group]  # type: ignore[attr-defined]  # wrong on purpose

    summary = run(Ranked(), ScriptedEngine("hi"))
    assert summary.reward.count == 0
    said = capsys.readouterr().err
    assert re.search(r"fault: group_reward rank\(\) of task '\d': TypeError: a Group", said)


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """Unfreeze the objects of the test process, and freeze them again afterwards."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.mark.whole
@pytest.mark.usefixtures("nothing_frozen")
def test_collector_is_tuned_while_playing_and_restored() -> None:
    seen = set()

    class Looking(Greeting):
        def setup(self) -> None:
            seen.add(gc.get_threshold())

    before = gc.get_threshold()
    run(Looking(64), ScriptedEngine("hi"), concurrency=Concurrency(episodes=1))
    assert (50_000, 20, 20) in seen
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_frozen")
def test_objects_frozen_by_the_program_stay_frozen() -> None:
    kept: list[list[int]] = [[]]
    gc.freeze()
    run(Greeting(), ScriptedEngine("hi"))
    assert gc.get_freeze_count() > 0
    assert not any(each is kept for each in gc.get_objects())


def test_an_error_comes_out_as_itself(tmp_path: Path) -> None:
    class Nameless(Greeting):
        def tasks(self) -> Iterator[Task]:
            yield Task(id="")

    with pytest.raises(BadTask, match="no id"):
        run(Nameless(), ScriptedEngine("hi"))
    run(Greeting(1), ScriptedEngine("hi"), file=tmp_path / "run.db")
    with pytest.raises(ConfigurationChanged, match="seed: 0 -> 1"):
        run(Greeting(1), ScriptedEngine("hi"), file=tmp_path / "run.db", seed=1)


def test_run_works_outside_the_main_thread() -> None:
    summaries = []
    thread = threading.Thread(target=lambda: summaries.append(run(Greeting(), ScriptedEngine("hi"))))
    thread.start()
    thread.join()
    assert summaries[0].episodes == 8


def test_the_first_interrupt_lets_episodes_in_flight_finish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    file = tmp_path / "run.db"
    with pytest.raises(KeyboardInterrupt):
        run(Interrupting(1000), ScriptedEngine("hi"), file=file, concurrency=Concurrency(episodes=4))
    assert signal.getsignal(signal.SIGINT) is before
    counts = outcomes(file)
    assert set(counts) == {Outcome.COMPLETED}
    assert 4 <= counts[Outcome.COMPLETED] < 1000
    assert "press Ctrl-C again to stop them now" in capsys.readouterr().err
    with RunFile(file) as run_file:
        assert not run_file.complete


def test_the_same_command_after_an_interrupt_plays_the_rest(tmp_path: Path) -> None:
    class Once(Greeting):
        pressed = False

        def setup(self) -> None:
            if self.task.id == "3" and not Once.pressed:
                Once.pressed = True
                os.kill(os.getpid(), signal.SIGINT)

    file = tmp_path / "run.db"
    with pytest.raises(KeyboardInterrupt):
        run(Once(200), ScriptedEngine("hi"), file=file, concurrency=Concurrency(episodes=4))
    before = outcomes(file)[Outcome.COMPLETED]
    summary = run(Once(200), ScriptedEngine("hi"), file=file, concurrency=Concurrency(episodes=4))
    assert summary.episodes == 200
    with RunFile(file) as run_file:
        assert run_file.complete
        assert sum(row.launch == 2 for row in run_file) == 200 - before
        assert len({row.task_id for row in run_file}) == len(run_file) == 200


@pytest.mark.parametrize(("environment", "received"), [(Waiting, signal.SIGINT), (Terminated, signal.SIGTERM)])
def test_second_interrupt_or_termination_keeps_partial_episodes(
    tmp_path: Path, environment: type[Waiting], received: signal.Signals
) -> None:
    file = tmp_path / "run.db"

    async def play() -> signal.Signals | None:
        made = Run(environment(100), ScriptedEngine("hi"), file=file, concurrency=Concurrency(episodes=4))
        return await supervise(made, Reporter())

    assert on_event_loop(play) is received
    with RunFile(file) as run_file:
        assert run_file.outcomes() == {Outcome.CANCELLED: 4}
        assert {trajectory.text for trajectory in run_file.trajectories()} == {"hi"}
        assert not run_file.complete


def test_termination_ends_a_script_with_its_exit_code(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    with pytest.raises(SystemExit) as ending:
        run(Terminated(100), ScriptedEngine("hi"), file=file, concurrency=Concurrency(episodes=4))
    assert ending.value.code == 143
    assert outcomes(file) == {Outcome.CANCELLED: 4}


# --- tests that need a separate process

PREAMBLE = """
import os, signal, sys, threading, time
import anyio
from runner import Concurrency, Environment, Limits, ScriptedEngine, Task, reward, run
from runner.runs.event_loop import end_process, on_event_loop, supervise
from runner.runs.reporter import Reporter
from runner.runs.run import Run

class Base(Environment):
    def tasks(self):
        return [Task(id=str(n), prompt="hello") for n in range(8)]
    @reward
    def spoke(self):
        return True
"""


def in_a_process(script: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PREAMBLE + textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG_SECONDS + 10, check=False)


def test_third_interrupt_ends_a_process_with_a_blocked_loop(tmp_path: Path) -> None:
    script = """
    class Blocking(Base):
        async def rollout(self, conversation):
            threading.Timer(0.2, press).start()
            while True:
                pass

    def press():
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)

    run(Blocking(), ScriptedEngine("hi"))
    """
    assert in_a_process(script).returncode == 130


def test_blocked_loop_is_named_and_finished_episodes_committed(tmp_path: Path) -> None:
    environment = tmp_path / "busy_environment.py"
    environment.write_text(
        textwrap.dedent("""
        from runner import Environment, Task, reward

        class Busy(Environment):
            def tasks(self):
                return [Task(id=str(n), prompt="hello") for n in range(8)]

            async def spin(self):
                while True:
                    pass

            async def rollout(self, conversation):
                await conversation.generate()
                if self.task.id == "7":
                    await self.spin()

            @reward
            def spoke(self):
                return True
        """)
    )
    script = """
    sys.path.insert(0, sys.argv[1])
    from busy_environment import Busy

    async def play():
        made = Run(Busy(), ScriptedEngine("hi"), file=sys.argv[2], concurrency=Concurrency(episodes=1))
        made.lag.stuck_seconds = 0.5
        await supervise(made, Reporter())

    on_event_loop(play)
    """
    file = tmp_path / "run.db"
    done = in_a_process(script, tmp_path, file)
    assert done.returncode == 11, done.stderr
    assert f"Busy.spin ({environment}:8)" in done.stderr
    assert f"finished episodes are in {file}" in done.stderr
    assert outcomes(file) == {Outcome.COMPLETED: 7}


HANGING = """
    class Hanging(Base):
        limits = Limits(setup_seconds=0.1)
        def tasks(self):
            return super().tasks()[:1]  # the limit would strike others too on a machine that is busy
        def setup(self):
            while True:
                time.sleep(3600)
"""


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("run(Hanging(), ScriptedEngine('hi')); sys.exit(7)", 7),
        ("on_event_loop(a_run); sys.exit(7)", 7),
        ("anyio.run(a_run, backend='trio'); sys.exit(7)", 7),
        ("on_event_loop(a_run); end_process(7)", 7),
        ("on_event_loop(a_run); raise ValueError('what the script does after it')", 1),
    ],
    ids=["run", "asyncio", "trio", "command", "error"],
)
def test_hanging_thread_does_not_keep_the_process(script: str, code: int) -> None:
    a_run = """
    async def a_run():
        async with Run(Hanging(), ScriptedEngine("hi")) as run:
            print([t.outcome.value async for t in run].count("env_error"))
    """
    done = in_a_process("".join(map(textwrap.dedent, (HANGING, a_run, script))))
    assert done.returncode == code, done.stderr
    assert done.stdout in ("1\n", "")


def test_a_thread_that_never_comes_back_does_not_keep_pytest(tmp_path: Path) -> None:
    test = """
    from runner.testing import play

    def test_it():
        assert play(Hanging, "hi").outcome == "env_error"
    """
    file = tmp_path / "test_hanging.py"
    file.write_text(PREAMBLE + "".join(map(textwrap.dedent, (HANGING, test))))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=WATCHDOG_SECONDS + 10, check=False, cwd=tmp_path
    )
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout
