"""Further faults on a real cluster of Ray, in full: kills at random moments, silence, too few workers, memory."""

from __future__ import annotations

import os
import pickle
import random
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import psutil
import pytest

from runner import EngineDead, Outcome, RayEngines, Run, RunFile, ScriptedEngine, Trajectory
from runner.cluster import driver
from runner.cluster.protocol import AttemptResult
from runner.cluster.ray.calls import RayWorker
from runner.engines.vllm.cleanup_process import shared_memory_of
from tests.cluster.ray_cluster import Standing, actors, family, require_ray, send, standing, until_gone
from tests.cluster.ray_games import GROUP_SIZE, Crowd, Hungry, crowd, slow_crowd
from tests.cluster.test_ray import ANNOUNCED, WATCHDOG_SECONDS, announcing, played, without_attempts
from tests.faults.comparing import by_key, differing, stored
from tests.playing import until
from tests.sweeps import random_of

pytestmark = [pytest.mark.anyio, pytest.mark.ray, pytest.mark.whole]

OPTIONS: dict[str, Any] = {"group_size": GROUP_SIZE, "seed": 9}

KILL_COUNT = 6

ATTEMPT_COUNT = 5


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Assert after each test that no actor of its runs exists, and no shared memory without a process that uses it."""
    before = set(os.listdir("/dev/shm"))
    yield
    until_gone(actors())
    # Another program that runs engines at the same time can leave such memory too, until its cleanup process has run.
    deadline = time.monotonic() + WATCHDOG_SECONDS
    while left := _memory_without_a_process(before):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _memory_without_a_process(before: set[str]) -> set[str]:
    made = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith(("psm_", "vllm_"))}
    used = {name for process in Path("/proc").glob("[0-9]*") for name in shared_memory_of(int(process.name))}
    return {name for name in made - used if Path("/dev/shm", name).exists()}


async def assert_as_one_process(
    announced: list[Trajectory], file: Path, tasks: int, *, interrupted: bool = False
) -> None:
    """Assert that the announced episodes equal the committed ones and the episodes of one process, without duplicates.

    If the run ended before a group was compared, the announced episodes of this group lack the group's reward, and only
    the file has it.
    """
    one = file.with_name("one.db")
    expected = by_key(await played(Crowd(tasks), crowd(), file=one, **OPTIONS))
    got, committed = by_key(announced), stored(file)
    differences = {**differing(without_attempts(got), expected), **differing(got, {key: committed[key] for key in got})}
    for key, fields in differences.items():
        assert interrupted, (key, fields)
        assert fields.keys() == {"reward", "rewards"}, (key, fields)
        unranked, committed_rewards = fields["rewards"]
        assert {"rank": committed_rewards["rank"], **unranked} == committed_rewards, (key, fields)
        assert "rank" not in unranked
    assert not differing(without_attempts(committed), stored(one))
    with RunFile(file) as run_file:
        assert run_file.complete


@asynccontextmanager
async def killing(choose: random.Random, times: int) -> AsyncIterator[list[int]]:
    """Kill workers during the block, including starting workers and the limiter service. Yield their process ids."""
    killed: list[int] = []

    async def kill() -> None:
        while len(killed) < times:
            await anyio.sleep(choose.uniform(0.2, 2.0))
            if there := sorted(actors() - {*killed}):
                killed.append(choose.choice(there))
                send(signal.SIGKILL, killed[-1:])

    async with anyio.create_task_group() as group:
        group.start_soon(kill)
        yield killed
        group.cancel_scope.cancel()


async def test_random_kills_of_workers_lose_and_duplicate_nothing(cluster: Standing, tmp_path: Path) -> None:
    engine = RayEngines(slow_crowd(), workers=(1, 3))
    file = tmp_path / "run.db"
    announced: list[Trajectory] = []
    with anyio.fail_after(2 * WATCHDOG_SECONDS):
        async with (
            Run(Crowd(24), engine, file=file, retries=KILL_COUNT, **OPTIONS) as run,
            killing(random_of("kills of workers"), KILL_COUNT) as killed,
        ):
            async for trajectory in run:
                announced.append(trajectory)
                # The reader slows the workers down, so that the kills are spread over the whole run.
                await until(lambda: len(killed) >= len(announced) * KILL_COUNT // (24 * GROUP_SIZE * 2))
    assert len(killed) == KILL_COUNT
    assert any("is lost: its process died" in event for event in engine.events)
    await assert_as_one_process(announced, file, 24)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the limit for a silent worker from a minute and a half to four seconds."""
    monkeypatch.setattr(driver, "SILENT_SECONDS", 4.0)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[AttemptResult]:
    """Yield a list of answers that arrive after their worker was taken for dead."""
    on_answers = RayWorker._on_answers
    seen: list[AttemptResult] = []

    def note(worker: Any, future: Any) -> None:
        is_late = worker._lost is not None and future.exception() is None
        if is_late:
            answers = [pickle.loads(packed) for _, packed in future.result()]
            seen.extend(answer for answer in answers if isinstance(answer, AttemptResult))
        on_answers(worker, future)
        if is_late and not seen:
            worker._fetch_answers()  # as if results of its episodes had been under way with this answer

    monkeypatch.setattr(RayWorker, "_on_answers", note)
    return seen


@pytest.mark.usefixtures("impatient")
async def test_stopped_worker_is_dismissed_and_its_late_answer_dropped(
    cluster: Standing, tmp_path: Path, late: list[AttemptResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray: Any = pytest.importorskip("ray")
    end, spared = ray.kill, []
    # The order to end does not arrive, as in a cut network: otherwise the worker could never answer again.
    monkeypatch.setattr(ray, "kill", lambda actor: spared.append(actor))
    engine = RayEngines(slow_crowd(), workers=2)
    file = tmp_path / "run.db"
    announced: list[Trajectory] = []
    with anyio.fail_after(WATCHDOG_SECONDS):
        async with Run(Crowd(24), engine, file=file, **OPTIONS) as run:
            async for trajectory in run:
                announced.append(trajectory)
                if len(announced) == 5:
                    victim = max(engine.workers(), key=lambda worker: worker.playing)
                    send(signal.SIGSTOP, [victim.pid])
                    await until(lambda: any("is lost" in event for event in engine.events))
                    send(signal.SIGCONT, [victim.pid])
                    await until(lambda: late)
                    monkeypatch.setattr(ray, "kill", end)
                    end(spared[0])
    said = f"worker {victim.number} on {victim.node} is lost: it has not answered for 4 s; the (.*) episodes that it"
    (loss,) = (event for event in engine.events if "is lost" in event)
    assert (lost := re.match(said, loss)) is not None
    assert len(late) <= int(lost[1])
    await assert_as_one_process(announced, file, 24)


@pytest.mark.usefixtures("impatient")
async def test_a_stopped_worker_is_ended_though_it_cannot_hear(cluster: Standing, tmp_path: Path) -> None:
    engine = RayEngines(slow_crowd(), workers=2)
    file = tmp_path / "run.db"
    announced: list[Trajectory] = []
    with anyio.fail_after(2 * WATCHDOG_SECONDS):
        async with Run(Crowd(24), engine, file=file, **OPTIONS) as run:
            async for trajectory in run:
                announced.append(trajectory)
                if len(announced) == 5:
                    victim = max(engine.workers(), key=lambda worker: worker.playing)
                    send(signal.SIGSTOP, [victim.pid])
    try:
        await anyio.to_thread.run_sync(until_gone, [victim.pid])
    finally:
        send(signal.SIGKILL, {victim.pid} & actors())
    await assert_as_one_process(announced, file, 24)


@pytest.fixture
def at_the_head(small_cluster: Standing) -> Iterator[None]:
    """Let this process belong to the first machine and not to an added one, since it dies with its machine."""
    ray: Any = pytest.importorskip("ray")
    ray.init(address=small_cluster.address, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.mark.usefixtures("impatient", "at_the_head")
@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_silent_machine_is_taken_for_dead_and_nothing_is_lost(
    small_cluster: Standing, tmp_path: Path, *, comes_back: bool
) -> None:
    raylet = await anyio.to_thread.run_sync(small_cluster.tell, "add")
    engine = RayEngines(slow_crowd(), workers=(1, 2))
    file = tmp_path / "run.db"
    stopped: set[int] = set()
    announced: list[Trajectory] = []
    try:
        with anyio.fail_after(2 * WATCHDOG_SECONDS):
            async with Run(Crowd(24), engine, file=file, **OPTIONS) as run:
                await until(lambda: len(engine.workers()) == 2)
                async for trajectory in run:
                    announced.append(trajectory)
                    if len(announced) == 5:
                        stopped = family(raylet)
                        victims = [worker for worker in engine.workers() if worker.pid in stopped]
                        assert [worker.playing > 0 for worker in victims] == [True]
                        send(signal.SIGSTOP, stopped)
                        await until(lambda: any("is lost" in event for event in engine.events))
                        if comes_back:
                            send(signal.SIGCONT, stopped)
    finally:
        send(signal.SIGCONT if comes_back else signal.SIGKILL, stopped)
    assert [event for event in engine.events if "is lost" in event]
    await assert_as_one_process(announced, file, 24)


async def test_fewer_places_than_required_workers_ends_the_start_by_name(small_cluster: Standing) -> None:
    await anyio.to_thread.run_sync(small_cluster.tell, "add 3")
    # four cores, but no two of them on the first machine
    engine = RayEngines(crowd(), workers=2, cpus=2, stall_seconds=60)
    with pytest.raises(
        EngineDead, match="for 60 s there was room for 1 of at least 2 workers: the cluster has too few"
    ):
        await played(Crowd(2), engine, **OPTIONS)


@pytest.mark.usefixtures("at_the_head")
async def test_run_that_loses_a_machine_ends_by_name_and_resumes_smaller(
    small_cluster: Standing, tmp_path: Path
) -> None:
    await anyio.to_thread.run_sync(small_cluster.tell, "add")
    engine = RayEngines(slow_crowd(), workers=2)
    file = tmp_path / "run.db"
    announced: list[Trajectory] = []
    moment = 5 + random_of("death of a machine").randrange(60)

    async def play() -> None:
        async with Run(Crowd(500), engine, file=file, **OPTIONS) as run:
            async for trajectory in run:
                announced.append(trajectory)
                if len(announced) == moment:
                    engine.driver.stall_seconds = 10  # a shorter limit than the start has on a busy machine
                    await anyio.to_thread.run_sync(small_cluster.tell, "kill")

    words = "for 10 s there were fewer than 2 workers, 1 now. Latest events: .* is lost: "
    with anyio.fail_after(2 * WATCHDOG_SECONDS), pytest.raises(EngineDead, match=words):
        await play()
    before, committed = by_key(announced), stored(file)
    assert before == {key: committed[key] for key in before}
    # Episodes in flight are kept as partial, and played again.
    announced = [trajectory for trajectory in announced if not trajectory.outcome.cut_short]
    assert len(announced) >= moment
    with anyio.fail_after(2 * WATCHDOG_SECONDS):
        announced += await played(Crowd(500), RayEngines(crowd(), workers=1), file=file, **OPTIONS)
    await assert_as_one_process(announced, file, 500, interrupted=True)


async def test_two_drivers_on_one_cluster_do_not_disturb_one_another(cluster: Standing, tmp_path: Path) -> None:
    file, other, moment = tmp_path / "run.db", tmp_path / "other.db", random_of("kill of one of two drivers")
    with announcing(file, 2) as stays, announcing(other, 2) as dies:
        assert stays.stdout is not None
        assert dies.stdout is not None
        for _ in range(1 + moment.randrange(ANNOUNCED)):
            dies.stdout.readline()
        await anyio.sleep(moment.uniform(0, 0.3))
        os.kill(dies.pid, signal.SIGKILL)
        lines = stays.stdout.readlines()
        dies.stdout.readlines()
    assert stays.returncode == 0
    assert len({*lines}) == len(lines) == 1 + ANNOUNCED
    await played(Crowd(12), crowd(), file=tmp_path / "one.db", **OPTIONS)
    assert stored(file) == stored(tmp_path / "one.db")
    await played(Crowd(12), RayEngines(crowd(), workers=1), file=other, **OPTIONS)
    assert without_attempts(stored(other)) == stored(tmp_path / "one.db")


async def test_two_runs_of_one_process_on_workers_do_not_end_one_another(cluster: Standing, tmp_path: Path) -> None:
    long, short = tmp_path / "long.db", tmp_path / "short.db"
    async with anyio.create_task_group() as group:
        for file, tasks, engine in ((long, 12, slow_crowd()), (short, 1, crowd())):
            fleet = RayEngines(engine, workers=1)
            group.start_soon(partial(played, Crowd(tasks), fleet, file=file, **OPTIONS))
    for file, tasks in ((long, 12), (short, 1)):
        one = tmp_path / f"one {tasks}.db"
        await played(Crowd(tasks), crowd(), file=one, **OPTIONS)
        assert stored(file) == stored(one)


@contextmanager
def nearly_full_machine(folder: Path) -> Iterator[Standing]:
    """A cluster whose machine counts as full at 1.2 GB more than is used now. Ray itself soon uses half of these."""
    require_ray()
    threshold = 1 - (psutil.virtual_memory().available - 1.2e9) / psutil.virtual_memory().total
    settings = {"RAY_memory_usage_threshold": f"{threshold:.4f}", "RAY_memory_monitor_refresh_ms": "100"}
    folder.mkdir()
    with standing(folder, cpus=1, **settings) as cluster:
        yield cluster


async def played_undisturbed(engine: RayEngines, file: Path) -> list[Trajectory]:
    """Trajectories of `Hungry`; none if other processes took or freed memory during the play, which Ray counts."""
    before = used_by_others()
    got: list[Trajectory] = []

    async def watch() -> None:
        samples = [0.0]
        # For a moment the memory of a killed process is counted for no process, so ten samples in a row must differ by
        # 0.6 GB.
        while min(samples[-10:]) < 0.6e9:
            await anyio.sleep(0.2)
            samples.append(abs(used_by_others() - before))
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        got = await played(Hungry(), engine, file=file)
        group.cancel_scope.cancel()
    return got


def used_by_others() -> int:
    used = psutil.virtual_memory().total - psutil.virtual_memory().available
    for pid in family(os.getpid()):
        with suppress(psutil.NoSuchProcess):
            used -= psutil.Process(pid).memory_full_info().uss  # memory that the processes share is counted once
    return used


async def test_episode_that_exhausts_memory_fails_by_name_and_alone(
    short_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for attempt in range(ATTEMPT_COUNT):
        engine = RayEngines(ScriptedEngine("hi"), workers=1)
        file = tmp_path / f"{attempt}.db"
        with nearly_full_machine(short_folder / f"{attempt}") as cluster:
            monkeypatch.setenv("RAY_ADDRESS", cluster.address)
            if got := await played_undisturbed(engine, file):
                break
    else:
        pytest.skip(f"other processes took or freed 0.6 GB in each of {ATTEMPT_COUNT} attempts")
    by_task = {trajectory.task.id: trajectory for trajectory in got}
    assert {name for name, each in by_task.items() if each.outcome is Outcome.COMPLETED} == {"a", "b", "c", "d"}
    memory = r"its machine was short of memory, and Ray ended it: \S+ used / \S+ limit"
    assert by_task["hungry"].outcome is Outcome.ENGINE_ERROR
    lost_workers = rf"3 workers were lost while playing this episode, the last one .*: {memory}"
    assert re.match(lost_workers, by_task["hungry"].error)
    lost = [event for event in engine.events if "is lost" in event]
    assert len(lost) == 3
    assert all(re.search(memory, event) for event in lost)
    assert len(stored(file)) == 5
