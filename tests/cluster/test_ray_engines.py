"""Workers with the real engine: weights change under episodes, and a worker that is killed leaves no process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from runner import Outcome, RayEngines, Run, Trajectory, VllmEngine
from tests.cluster.playing import until
from tests.cluster.ray_cluster import Standing, family, until_gone
from tests.cluster.ray_games import TalksLong

pytestmark = [pytest.mark.anyio, pytest.mark.ray, pytest.mark.engine, pytest.mark.apart, pytest.mark.whole]

START = 400.0
WATCHDOG = 200.0


def versions(trajectory: Trajectory) -> list[str]:
    return [span.version for segment in trajectory.segments for span in segment.log.versions]


async def test_two_real_engines_take_new_weights_under_episodes_and_one_that_is_killed_leaves_nothing(
    cluster: Standing, small_model_folder: Path
) -> None:
    from safetensors.torch import load_file

    weights = load_file(small_model_folder / "model.safetensors")
    inner = VllmEngine(str(small_model_folder), max_num_seqs=4, max_model_len=512)
    on_cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    engine = RayEngines(inner, workers=(1, 2), gpus=0, runtime_env={"env_vars": on_cpu})
    got: list[Trajectory] = []
    orphans: set[int] = set()
    left: list[Path] = []
    with anyio.fail_after(START + WATCHDOG):
        async with engine:
            while len(engine.workers()) < 2:  # noqa: ASYNC110  # the second one joins when it is ready
                await anyio.sleep(0.2)
            async with Run(TalksLong, engine, group_size=2) as run:
                async for trajectory in run:
                    got.append(trajectory)
                    if len(got) == 1:
                        update = await engine.update_weights(weights, mode="keep", version="new")
                        assert update.version == "new"
                        assert {worker.version for worker in engine.workers()} == {"new"}
                    if len(got) == 3:
                        victim = max(engine.workers(), key=lambda worker: worker.playing)
                        orphans = family(victim.pid)
                        (joined,) = (hand.joined for hand in engine.driver.hands if hand.number == victim.number)
                        assert joined is not None
                        left = [Path("/dev/shm", name) for name in joined.shared_memory] + [Path(joined.folder)]
                        assert len(left) > 1
                        assert all(path.exists() for path in left)
                        assert len(orphans) > 1, "vLLM has processes of its own"
                        os.kill(victim.pid, signal.SIGKILL)
            await anyio.to_thread.run_sync(until_gone, orphans)
            await until(lambda: not any(path.exists() for path in left))
    assert len({trajectory.id for trajectory in got}) == len(got) == 16
    assert {trajectory.outcome for trajectory in got} == {Outcome.TOKEN_LIMIT}
    for trajectory in got:
        assert sorted(versions(trajectory), key=["default", "new"].index) == versions(trajectory)
    assert "new" in versions(got[-1])
