"""Workers with the real engine: weights change during episodes, and a killed worker leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import anyio.to_thread
import psutil
import pytest

from runner import Outcome, RayEngines, Run, Trajectory, VllmEngine
from runner.engines.vllm.cleanup_process import FOLDER, shared_memory_of
from tests.cluster.ray_cluster import Standing, family, until_gone
from tests.cluster.ray_games import TalksLong
from tests.playing import until
from tests.repository import ROOT

pytestmark = [pytest.mark.anyio, pytest.mark.ray, pytest.mark.engine, pytest.mark.apart, pytest.mark.whole]

VERSIONS = ["default", "new", "from a folder"]
START_SECONDS = 1200.0
WATCHDOG_SECONDS = 600.0


def versions(trajectory: Trajectory) -> list[str]:
    return [span.version for segment in trajectory.segments for span in segment.log.versions]


def on_two_workers(model: Path) -> RayEngines:
    """Engines on two workers that share the cores of a test."""
    inner = VllmEngine(str(model), max_num_seqs=4, max_model_len=512)
    on_cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    return RayEngines(inner, workers=(1, 2), gpus=0, runtime_env={"env_vars": on_cpu})


def left_by(worker: int) -> list[Path]:
    """Memory and files that the processes of this worker's engine leave if all are killed."""
    named = {process.environ().get(FOLDER) for process in psutil.Process(worker).children(recursive=True)}
    (folder,) = (path for path in named if path is not None)
    # An engine in the process of its core, as on a CPU, needs no shared memory.
    left = [Path(folder), *(Path("/dev/shm", name) for name in shared_memory_of(worker))]
    assert all(path.exists() for path in left)
    return left


async def test_two_real_engines_take_weights_and_a_dead_one_leaves_nothing(
    cluster: Standing, small_model_folder: Path
) -> None:
    from safetensors.torch import load_file

    weights = load_file(small_model_folder / "model.safetensors")
    engine = on_two_workers(small_model_folder)
    got: list[Trajectory] = []
    orphans: set[int] = set()
    left: list[Path] = []
    with anyio.fail_after(START_SECONDS + WATCHDOG_SECONDS):
        async with engine:
            while len(engine.workers()) < 2:  # noqa: ASYNC110  # until the second worker joins
                await anyio.sleep(0.2)
            async with Run(TalksLong, engine, group_size=2) as run:
                async for trajectory in run:
                    got.append(trajectory)
                    if len(got) == 1:
                        update = await engine.update_weights(weights, mode="keep", version="new")
                        assert update.version == "new"
                        assert {worker.version for worker in engine.workers()} == {"new"}
                    if len(got) == 2:
                        update = await engine.update_weights(small_model_folder, version="from a folder")
                        assert {worker.version for worker in engine.workers()} == {"from a folder"}
                    if len(got) == 3:
                        victim = max(engine.workers(), key=lambda worker: worker.playing)
                        orphans = family(victim.pid)
                        left = left_by(victim.pid)
                        assert len(orphans) > 1, "vLLM has processes of its own"
                        os.kill(victim.pid, signal.SIGKILL)
            await anyio.to_thread.run_sync(until_gone, orphans)
            await until(lambda: not any(path.exists() for path in left))
    assert len({trajectory.id for trajectory in got}) == len(got) == 16
    assert {trajectory.outcome for trajectory in got} == {Outcome.TOKEN_LIMIT}
    for trajectory in got:
        assert sorted(versions(trajectory), key=VERSIONS.index) == versions(trajectory)
    assert "from a folder" in versions(got[-1])


TALKERS = """
import sys
from pathlib import Path
import anyio
from runner import Run
from runner.runs.event_loop import on_event_loop
from tests.cluster.ray_games import TalksLong
from tests.repository import ROOT
from tests.cluster.test_ray_engines import on_two_workers

async def talk():
    engine = on_two_workers(Path(sys.argv[1]))
    async with engine:
        while len(engine.workers()) < 2:
            await anyio.sleep(0.2)
        async with Run(TalksLong, engine, group_size=8) as run:
            print(*(worker.pid for worker in engine.workers()), flush=True)
            async for trajectory in run:
                print(trajectory.id, flush=True)

on_event_loop(talk)
"""


def talking(model: Path) -> subprocess.Popen[str]:
    """A driver in another process, which prints the processes of its workers."""
    command = [sys.executable, "-c", TALKERS, str(model)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True)


async def test_kill_9_with_real_engines_leaves_no_process_and_no_file(
    cluster: Standing, small_model_folder: Path
) -> None:
    with anyio.fail_after(START_SECONDS), talking(small_model_folder) as driver:
        assert driver.stdout is not None
        workers, first = [await anyio.to_thread.run_sync(driver.stdout.readline) for _ in range(2)]
        started = family(driver.pid).union(*(family(int(pid)) for pid in workers.split()))
        left = [path for pid in workers.split() for path in left_by(int(pid))]
        assert first, "the workers play"
        assert len(started) >= 5, "the driver, two workers, and vLLM's processes"
        os.kill(driver.pid, signal.SIGKILL)
        await anyio.to_thread.run_sync(until_gone, started)
        await until(lambda: not any(path.exists() for path in left))
