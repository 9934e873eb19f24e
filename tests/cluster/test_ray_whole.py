"""Faults of workers on a real cluster of Ray, in full: machines that die and join, blocked event loops, poison."""

from __future__ import annotations

import importlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from runner import EngineDead, EngineError, Outcome, RayEngine, RayEngines, Run, RunFile, ScriptedEngine
from tests.cluster.ray_cluster import Standing, family, require_ray, send, standing, until_gone
from tests.cluster.ray_games import GROUP_SIZE, Crowd, Hangs, Poison, Reads, Slow, crowd, drinks
from tests.cluster.test_ray import ANNOUNCED, WATCHDOG_SECONDS, announcing, played
from tests.playing import until
from tests.sweeps import random_of

pytestmark = [pytest.mark.anyio, pytest.mark.ray, pytest.mark.whole]


async def test_late_machine_that_dies_at_a_random_moment_loses_nothing(small_cluster: Standing, tmp_path: Path) -> None:
    engine = RayEngines(ScriptedEngine("hi", places=4), workers=(1, 2))
    file = tmp_path / "run.db"
    with anyio.fail_after(2 * WATCHDOG_SECONDS):
        async with Run(Slow, engine, file=file) as run:
            assert len(engine.workers()) == 1
            await anyio.to_thread.run_sync(small_cluster.tell, "add")
            # Nothing is read before both workers exist, so only the episodes in flight are played.
            while len(engine.workers()) < 2:  # noqa: ASYNC110  # no event is set
                await anyio.sleep(0.1)
            moment = random_of("death of a late machine")
            got = [await anext(run) for _ in range(1 + moment.randrange(20))]
            await anyio.sleep(moment.uniform(0, 0.3))
            await anyio.to_thread.run_sync(small_cluster.tell, "kill")
            got += [trajectory async for trajectory in run]
            # All episodes may have ended before the machine died, so that Ray reports its loss only after the run.
            await until(lambda: any("is lost" in event for event in engine.events))
    assert len([event for event in engine.events if "is lost" in event]) == 1
    assert {trajectory.outcome for trajectory in got} == {Outcome.COMPLETED}
    assert len({trajectory.id for trajectory in got}) == len(got) == 40
    with RunFile(file) as run_file:
        assert run_file.complete


async def test_kill_9_of_a_driver_leaves_no_process_and_no_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_ray()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = set(os.listdir("/dev/shm"))
    file = tmp_path / "run.db"
    with announcing(file, 2) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline().startswith(b"workers")
        moment = random_of("kill of a driver with a cluster")
        for _ in range(1 + moment.randrange(ANNOUNCED // 2)):
            driver.stdout.readline()
        await anyio.sleep(moment.uniform(0, 0.3))
        started = family(driver.pid)
        assert len(started) > 5, "the driver, its workers, and Ray"
        os.kill(driver.pid, signal.SIGKILL)
        driver.stdout.read()
    await anyio.to_thread.run_sync(until_gone, started)
    assert not {name for name in set(os.listdir("/dev/shm")) - before if re.match("plasma|ray", name)}


async def test_a_cluster_of_ones_own_is_gone_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    require_ray()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = family(os.getpid())
    async with Run(Crowd(2), RayEngines(crowd(), workers=2), group_size=GROUP_SIZE) as run:
        started = family(os.getpid()) - before
        trajectories = [trajectory async for trajectory in run]
    assert len(trajectories) == 2 * GROUP_SIZE * 2
    assert len(started) > 4, "workers, and Ray"
    await anyio.to_thread.run_sync(until_gone, started)


async def test_shutdown_by_other_code_ends_the_run_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    require_ray()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before, started = family(os.getpid()), set[int]()
    engine = RayEngines(ScriptedEngine("hi", places=4), workers=2)

    async def play() -> None:
        async with Run(Slow, engine) as run:
            started.update(family(os.getpid()) - before)
            await anext(run)
            importlib.import_module("ray").shutdown()
            async for _ in run:
                pass

    with anyio.fail_after(WATCHDOG_SECONDS), pytest.raises(EngineDead, match=r"other code of this process called ray"):
        await play()
    assert len(started) > 4, "workers, and Ray"
    await anyio.to_thread.run_sync(until_gone, started)
    assert not importlib.import_module("ray").is_initialized(), "no call made Ray start another cluster"
    assert not [thread for thread in threading.enumerate() if thread.name == "deltarunner ray"]
    trajectories = await played(Crowd(1), RayEngines(crowd(), workers=1), group_size=GROUP_SIZE)
    assert len(trajectories) == GROUP_SIZE * 2


async def test_standing_cluster_works_before_and_after_an_own_one(
    cluster: Standing, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []
    for address in (cluster.address, None, cluster.address):
        if address is None:
            monkeypatch.delenv("RAY_ADDRESS")
        trajectories = await played(Crowd(2), RayEngines(crowd(), workers=2, address=address), group_size=GROUP_SIZE)
        assert len(trajectories) == 2 * GROUP_SIZE * 2
        modes.append(os.environ.get("RAY_AUTH_MODE"))
    assert len({*modes}) == 1


async def test_worker_with_a_hanging_loop_ends_and_its_episodes_replay(cluster: Standing, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    engine = RayEngines(ScriptedEngine("hi"), workers=2)
    trajectories = await played(Hangs(str(trace), os.getpid()), engine)
    assert {trajectory.outcome for trajectory in trajectories} == {Outcome.COMPLETED}
    assert len(trajectories) == 6
    pattern = r"worker \d on \S+ is lost: the event loop hangs in .*ray_games.py.* cannot be freed from outside"
    assert any(re.match(pattern, event) for event in engine.events), list(engine.events)
    await anyio.to_thread.run_sync(until_gone, [int(trace.read_text())])


async def test_machine_without_deltarunner_is_refused_with_the_fix(
    cluster: Standing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # Ray lets workers look for modules in the driver's folder first
    (tmp_path / "runner").mkdir()
    missing = "No module named 'runner'"
    (tmp_path / "runner" / "__init__.py").write_text(f'raise ModuleNotFoundError("{missing}")')
    engine = RayEngines(crowd(), workers=1, runtime_env={"env_vars": {"PYTHONPATH": str(tmp_path)}})
    with pytest.raises(
        EngineError, match=r"cannot be created on \d+\.\d+\.\d+\.\d+: deltarunner is missing there, .*pip install"
    ):
        await played(Crowd(1), engine)


async def test_workers_read_the_drivers_files_by_relative_paths(
    cluster: Standing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.txt").write_text("so it is")
    trajectories = await played(Reads("data.txt"), RayEngines(ScriptedEngine("hi"), workers=1))
    assert [trajectory.metrics["read"] for trajectory in trajectories] == [len("so it is")]


async def test_workers_have_the_uploaded_folder_and_their_own_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_ray()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "data.txt").write_text("brought")
    brought = {"working_dir": str(tmp_path / "package"), "env_vars": {"READ_ON": "workers"}}
    # The judge connects first, so its cluster is used: it has room for more workers than the machine has cores.
    judge = RayEngine(ScriptedEngine("fine"), runtime_env={"env_vars": {"READ_ON": "the judge"}})
    async with judge, RayEngines(ScriptedEngine("hi"), workers=4, runtime_env=brought) as engine:
        trajectories = await played(Reads("data.txt"), engine, engines={"judge": judge})
        assert len(engine.workers()) == 4
    assert [trajectory.metrics["read"] for trajectory in trajectories] == [len("brought workers")]


@pytest.fixture
def own_cluster(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Standing]:
    """A cluster for one test, which may kill its head."""
    require_ray()
    with standing(short_folder, cpus=1) as cluster:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        left = family(cluster.process.pid)
        send(signal.SIGKILL, left)  # without its head a cluster does not end by itself
        until_gone(left - {cluster.process.pid})


def test_death_of_the_head_ends_the_run_by_name_without_loss(own_cluster: Standing, tmp_path: Path) -> None:
    file, said = tmp_path / "run.db", tmp_path / "stderr"
    with said.open("w") as stderr, announcing(file, 1, 100_000, stderr=stderr) as driver:
        assert driver.stdout is not None
        lines = [driver.stdout.readline() for _ in range(10)]
        send(signal.SIGKILL, [pid for pid in family(own_cluster.process.pid) if _is_head(pid)])
        lines += driver.stdout.readlines()
        assert driver.wait(WATCHDOG_SECONDS) == 1
    pattern = rf"EngineDead: RayEngines: the head of Ray's cluster, at {own_cluster.address}, has not answered for 40 s"
    assert re.search(pattern, said.read_text())
    announced = {line.split(b"\t")[0].decode() for line in lines[1:]}
    with RunFile(file) as run_file:
        assert announced <= {row.id for row in run_file}


def _is_head(pid: int) -> bool:
    return "gcs_server" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]


async def test_episode_that_kills_its_workers_fails_alone(cluster: Standing) -> None:
    trajectories = await played(Poison(), RayEngines(ScriptedEngine(drinks), workers=2))
    by_task = {trajectory.task.id: trajectory for trajectory in trajectories}
    assert {name for name, each in by_task.items() if each.outcome is Outcome.COMPLETED} == {"a", "b", "c", "d"}
    poison = by_task["poison"]
    assert poison.outcome is Outcome.ENGINE_ERROR
    assert re.match(
        r"3 workers were lost while playing this episode, the last one worker \d+ on \S+: its process died",
        poison.error,
    )
