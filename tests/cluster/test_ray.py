"""Runs on a real cluster of Ray: the results are the same as in one process, also if processes die."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from anyio._backends._asyncio import WorkerThread as PoolThread
from typer.testing import CliRunner

from runner import (
    BadEnvironment,
    BadOption,
    DeltarunnerError,
    Environment,
    Outcome,
    RayEngine,
    RayEngines,
    Run,
    RunFile,
    ScriptedEngine,
    Task,
    Trajectory,
    reward,
)
from runner.cli.app import app
from runner.cli.run import run_command
from runner.cli.settings import RunSettings
from runner.cluster.ray.launcher import RayLauncher
from tests.cluster.playing import Dice
from tests.cluster.ray_cluster import Standing, children, family, require_ray, until_gone
from tests.cluster.ray_games import GROUP_SIZE, Crowd, Leased, Sworn, crowd, slow_crowd
from tests.faults.comparing import by_key, stored
from tests.playing import until
from tests.repository import ROOT
from tests.sweeps import random_of

pytestmark = [pytest.mark.anyio, pytest.mark.ray]

WATCHDOG_SECONDS = 600.0

ANNOUNCED = 12 * GROUP_SIZE * 2
"""Number of trajectories that `announcing` announces."""


async def played(environment: Any, engine: Any, **options: Any) -> list[Trajectory]:
    with anyio.fail_after(WATCHDOG_SECONDS):
        async with Run(environment, engine, **options) as run:
            return [trajectory async for trajectory in run]


def without_attempts(rows: dict[Any, Any]) -> Any:
    """Return all values that must not depend on how often an episode was played."""
    return {key: (kind, {**fields, "attempt": 0}) for key, (kind, fields) in rows.items()}


async def test_two_workers_give_the_trajectories_of_one_process_bit_for_bit(cluster: Standing, tmp_path: Path) -> None:
    options: dict[str, Any] = {"group_size": GROUP_SIZE, "seed": 9}
    file, one = tmp_path / "run.db", tmp_path / "one.db"
    alone = await played(Crowd(6), crowd(), file=one, **options)
    many = await played(Crowd(6), RayEngines(crowd(), workers=2), file=file, **options)
    assert by_key(many) == by_key(alone)
    assert stored(file) == stored(one)
    verified = CliRunner().invoke(app, ["verify", str(file)])
    assert verified.exit_code == 0, verified.output


async def test_kill_9_of_a_worker_loses_nothing_and_nothing_comes_twice(cluster: Standing, tmp_path: Path) -> None:
    options: dict[str, Any] = {"group_size": GROUP_SIZE, "seed": 9}
    file = tmp_path / "run.db"
    engine = RayEngines(slow_crowd(), workers=2)
    announced: list[Trajectory] = []
    with anyio.fail_after(WATCHDOG_SECONDS):
        async with Run(Crowd(8), engine, file=file, **options) as run:
            async for trajectory in run:
                announced.append(trajectory)
                if len(announced) == 5:
                    victim = max(engine.workers(), key=lambda worker: worker.playing)
                    assert victim.playing
                    os.kill(victim.pid, signal.SIGKILL)
    assert any("is lost: its process died" in event for event in engine.events)
    assert any("is lost" in fault for fault in run.summary.faults)
    assert run.summary.retried > 0
    one = tmp_path / "one.db"
    alone = await played(Crowd(8), crowd(), file=one, **options)
    assert without_attempts(by_key(announced)) == by_key(alone)
    assert without_attempts(stored(file)) == stored(one)
    with RunFile(file) as run_file:
        assert run_file.complete


def announcing(file: Path, workers: int, tasks: int = 12, *, stderr: Any = None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.cluster.ray_games", str(file), str(workers), str(tasks)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, cwd=ROOT)


@pytest.mark.sample_units("on Ray")
async def test_kill_9_of_the_driver_ends_workers_and_the_run_resumes(cluster: Standing, tmp_path: Path) -> None:
    file, moment = tmp_path / "run.db", random_of("kill of a driver")
    with announcing(file, 2) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()[1:]]
        assert len(pids) == 2
        lines = [driver.stdout.readline() for _ in range(moment.randrange(ANNOUNCED))]
        await anyio.sleep(moment.uniform(0, 0.3))
        started = family(driver.pid) | {*pids}
        os.kill(driver.pid, signal.SIGKILL)
        lines += driver.stdout.readlines()
    before = {line.split(b"\t")[0].decode() for line in lines if line.endswith(b"\n")}
    with RunFile(file) as run_file:
        assert before <= {row.id for row in run_file if not row.outcome.cut_short}
    await anyio.to_thread.run_sync(until_gone, started)
    with anyio.fail_after(WATCHDOG_SECONDS):
        rest = await played(Crowd(12), RayEngines(crowd(), workers=3), group_size=GROUP_SIZE, file=file, seed=9)
    assert before.isdisjoint(trajectory.id for trajectory in rest)
    one = tmp_path / "one.db"
    await played(Crowd(12), crowd(), group_size=GROUP_SIZE, seed=9, file=one)
    assert without_attempts(stored(file)) == stored(one)


def workers() -> RayEngines:
    return RayEngines(ScriptedEngine("hi"), workers=1)


def one_engine() -> RayEngine:
    return RayEngine(ScriptedEngine("hi"))


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize("kind", [workers, one_engine])
async def test_a_cluster_outlives_the_threads_that_are_idle(
    monkeypatch: pytest.MonkeyPatch, kind: Callable[[], Any]
) -> None:
    require_ray()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(PoolThread, "MAX_IDLE_TIME", 0)  # ten seconds in a run
    before = family(os.getpid())
    first = RayLauncher("RayEngines", address=None, cpus=1, gpus=0, runtime_env=None)
    await first.open()
    async with kind() as engine:
        await first.close()  # another user of the connection follows the one that opened it
        started = family(os.getpid()) - before
        of_ray = children(os.getpid()) & started
        assert len(of_ray) >= 3, "the head, the raylet and the reader of logs"
        await until_idle_threads_end()
        trajectories = await played(Dice, engine)
        assert {trajectory.outcome for trajectory in trajectories} == {Outcome.COMPLETED}
        assert of_ray <= children(os.getpid())
    await anyio.to_thread.run_sync(until_gone, started)


async def until_idle_threads_end() -> None:
    """Wait until each current thread of anyio's pool has ended: the pool ends idle threads when it starts a call."""
    before = {thread for thread in threading.enumerate() if isinstance(thread, PoolThread)}
    assert before, "the engine was started in one of these threads"
    with anyio.fail_after(WATCHDOG_SECONDS):
        while any(thread.is_alive() for thread in before):
            async with anyio.create_task_group() as group:
                # at the same time, so that one thread is new and may be the last idle one
                for _ in range(len(before) + 1):
                    group.start_soon(anyio.to_thread.run_sync, time.sleep, 0.02)
            await anyio.sleep(0.01)
            await anyio.to_thread.run_sync(time.sleep, 0)


SCRIPT = """
from runner import Environment, RayEngines, ScriptedEngine, Task, reward, run

class Mine(Environment):
    def tasks(self):
        return [Task(id=str(number), prompt="hello") for number in range(6)]

    @reward
    def polite(self):
        return helper(self.episode.text)

def helper(text):
    return text == "hi"

if __name__ == "__main__":
    summary = run(Mine, RayEngines(ScriptedEngine("hi"), workers=2), quiet=True)
    print(summary.reward.mean, summary.episodes)
"""


@pytest.mark.sample_units("on Ray")
async def test_an_environment_of_the_script_itself_is_played(cluster: Standing, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    with anyio.fail_after(WATCHDOG_SECONDS):
        done = await anyio.run_process([sys.executable, str(script)], env=environ, check=False)
    assert done.stdout == b"1.0 6\n", done.stderr.decode()


ENDLESS = """
import sys
from runner import Concurrency, RayEngines, ScriptedEngine, run
from tests.cluster.ray_games import Endless

if __name__ == "__main__":
    engine = RayEngines(ScriptedEngine("hi"), workers=2)
    run(Endless(sys.argv[1]), engine, file=sys.argv[2], concurrency=Concurrency(episodes=4))
"""


@contextmanager
def endless(script: Path, diary: Path, file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program that plays until it is interrupted. It is killed after the block, and after `WATCHDOG_SECONDS`."""
    script.write_text(ENDLESS)
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, str(script), str(diary), str(file)]
    with subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.PIPE) as process:
        late = threading.Timer(WATCHDOG_SECONDS, process.kill)  # the wait for a missing line would not end
        late.start()
        try:
            yield process
        finally:
            late.cancel()
            process.kill()


@pytest.mark.sample_units("on Ray")
async def test_first_ctrl_c_drains_the_workers_and_a_second_one_cuts(cluster: Standing, tmp_path: Path) -> None:
    diary, file = tmp_path / "diary", tmp_path / "run.db"
    diary.touch()
    with endless(tmp_path / "endless.py", diary, file) as process:
        assert process.stderr is not None
        await until(lambda: len(diary.read_text().splitlines()) >= 4 or process.poll() is not None)
        pids = {int(line.split()[1]) for line in diary.read_text().splitlines()}
        process.send_signal(signal.SIGINT)
        while b"finishing 4 episodes; press Ctrl-C again" not in (line := process.stderr.readline()):
            assert line, "it ended at the first one"
        process.send_signal(signal.SIGINT)
        # Python ends by the signal itself, which a shell reports as 130.
        _, errors = await anyio.to_thread.run_sync(process.communicate, None, WATCHDOG_SECONDS)
    assert process.returncode in (130, -signal.SIGINT), errors.decode()
    assert b"stopping 4 episodes, kept as partial" in errors
    assert len(pids) == 2
    await anyio.to_thread.run_sync(until_gone, pids)
    with RunFile(file) as run_file:
        assert run_file.outcomes() == {Outcome.CANCELLED: 4}
        assert {trajectory.text for trajectory in run_file.trajectories()} == {"hi"}
        assert not run_file.complete


AUTHOR = """
from runner import Environment, Task, reward

class Greeting(Environment):
    def tasks(self):
        return [Task(id=f"t-{n}", prompt="hello") for n in range(6)]
    @reward
    def polite(self):
        return self.episode.text == "hi"
"""


def command(**options: Any) -> int:
    return run_command(RunSettings(**options), lambda settings: ScriptedEngine("hi"))


@pytest.mark.sample_units("on Ray")
@pytest.mark.parametrize("kind", ["class", "program"])
def test_run_with_workers_plays_files_and_agent_programs(
    cluster: Standing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    if kind == "class":
        Path("greeting_of_a_file.py").write_text(AUTHOR)
        asked: dict[str, Any] = {"environment": "greeting_of_a_file.py:Greeting"}
        assert command(**asked, workers="2", file=Path("w.db"), episodes=4) == 0
        monkeypatch.delenv("RAY_ADDRESS")
        assert command(**asked, workers="1-3", cluster=cluster.address, file=Path("w.db"), json=True) == 0
        assert ": resuming, 4 episodes done" in capfd.readouterr().err
    else:
        Path("tasks.jsonl").write_text("".join(f'{{"id": "{n}", "prompt": "make it"}}\n' for n in range(6)))
        Path("template").mkdir()
        Path("template/agent.py").write_text(PROGRAM)
        asked = {"agent": f"{sys.executable} agent.py {{prompt}}", "check": "grep -q 'make it' made"}
        program = RunSettings(
            **asked,
            copy=Path("template"),
            tasks=Path("tasks.jsonl"),
            workers="2",
            file=Path("w.db"),
        )
        assert run_command(program.with_program(), lambda settings: ScriptedEngine("hi")) == 0
    with RunFile("w.db") as run_file:
        rows = [row for row in run_file.rows(trained=None) if row.agent == "main"]
        assert [row.outcome for row in rows] == [Outcome.COMPLETED] * 6
        assert kind == "program" or [row.reward for row in rows] == [1.0] * 6
        assert run_file.complete


PROGRAM = """
import json, os, pathlib, sys, urllib.request

body = {"model": "any", "messages": [{"role": "user", "content": sys.argv[1]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
urllib.request.urlopen(request).read()
pathlib.Path("made").write_text(sys.argv[1])
"""


class Holds(Environment):
    def __init__(self, what: object) -> None:
        self.what = what

    def tasks(self) -> list[Task]:
        return [Task(id="1", prompt="hello")]

    @reward
    def spoke(self) -> bool:
        return True


def ghost() -> type[Environment]:
    """A class of a module that exists only in this process."""
    module = types.ModuleType("a_module_of_this_process")
    sys.modules[module.__name__] = module
    exec(AUTHOR, module.__dict__)
    made: type[Environment] = module.__dict__["Greeting"]
    return made


async def refused(
    environment: Any, kind: type[DeltarunnerError], text: str, engine: Any = None, *, workers: int = 2, **options: Any
) -> None:
    with pytest.raises(kind, match=text):
        await played(environment, RayEngines(engine or ScriptedEngine("hi"), workers=workers, **options))


async def test_arguments_that_do_not_pickle_are_refused_by_name(cluster: Standing) -> None:
    await refused(Holds(threading.Lock()), BadOption, r"Holds\(what=\) cannot be pickled.*make it in lifespan\(\)")


async def test_an_engine_that_does_not_pickle_is_refused(cluster: Standing) -> None:
    lock = threading.Lock()
    engine = ScriptedEngine(lambda asked: str(lock))
    await refused(Holds(1), BadOption, r"ScriptedEngine cannot be pickled", engine)


async def test_class_that_workers_cannot_import_is_refused_with_the_fix(
    cluster: Standing, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = r"worker \d on \S+ cannot import .*a_module_of_this_process.*runtime_env"
    await refused(ghost(), BadEnvironment, message, workers=1)
    monkeypatch.delitem(sys.modules, "a_module_of_this_process")


async def test_ray_client_is_refused(cluster: Standing) -> None:
    with pytest.raises(BadOption, match=re.escape("address='ray://127.0.0.1:1'")):
        RayEngines(ScriptedEngine("hi"), workers=1, address="ray://127.0.0.1:1")


async def test_an_address_where_nothing_answers_is_refused(cluster: Standing) -> None:
    with pytest.raises(BadOption, match=r"no cluster of Ray at '127.0.0.1:1'"):
        await played(Crowd(1), RayEngines(crowd(), workers=1, address="127.0.0.1:1"))


async def test_too_many_processors_or_gpus_are_refused_with_both_numbers(cluster: Standing) -> None:
    await refused(Holds(1), BadOption, "2 workers of 9 CPU each need 18, and the cluster has 16", cpus=9)
    await refused(Holds(1), BadOption, "2 workers of 1 GPU each need 2, and the cluster has 0", gpus=1)


@pytest.mark.sample_units("on Ray")
async def test_a_limiter_holds_across_workers(cluster: Standing, tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    trajectories = await played(Leased(str(diary)), RayEngines(ScriptedEngine("hi"), workers=2))
    assert {trajectory.outcome for trajectory in trajectories} == {Outcome.COMPLETED}
    lines = [line.split() for line in diary.read_text().splitlines()]
    assert [what for what, _ in lines] == ["in", "out"] * 12
    assert all(came == left for (_, came), (_, left) in zip(lines[::2], lines[1::2], strict=True))
    assert len({pid for _, pid in lines}) == 2, "both workers had episodes to play"


@pytest.mark.sample_units("on Ray")
async def test_lifespan_is_entered_once_per_worker_and_on_the_driver(cluster: Standing, tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    trajectories = await played(Sworn(str(diary)), RayEngines(ScriptedEngine("hi"), workers=2))
    assert [trajectory.reward for trajectory in trajectories] == [1.0] * 8
    lines = [line.split() for line in diary.read_text().splitlines()]
    entered = [pid for what, pid in lines if what == "enter"]
    assert len(entered) == len(set(entered)) == 3
    assert str(os.getpid()) in entered
    assert sorted(entered) == sorted(pid for what, pid in lines if what == "leave")
