"""Weights that a trainer broadcasts during episodes to real engines of a real fleet, with all ranks in one group."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from runner import LocalTransfer, Outcome, RayEngines, Run, Trajectory, VllmEngine, WeightTransfer
from runner.models import demo_model
from tests.cluster.playing import played
from tests.cluster.ray_cluster import Standing
from tests.cluster.ray_games import Says, TalksLong
from tests.engines.small_model import small_model
from tests.repository import ROOT

pytestmark = [pytest.mark.anyio, pytest.mark.ray, pytest.mark.engine, pytest.mark.apart, pytest.mark.whole]

START_SECONDS = 1200.0
WATCHDOG_SECONDS = 600.0
LOUDER = "model.layers.5.mlp.down_proj.weight"


class Model:
    """A trainer's model, as vLLM's `WeightSource`."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.tensors = tensors
        self.before: Callable[[str], None] = lambda _: None
        """Called with each tensor's name, in the thread that sends the tensor."""

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in self.tensors.items():
            self.before(name)
            yield name, tensor


def announced(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Announcement of a remote trainer: the tensors in the order in which it sends them."""
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def versions(trajectory: Trajectory) -> list[str]:
    return [span.version for segment in trajectory.segments for span in segment.log.versions]


async def said(engine: RayEngines) -> dict[str, str]:
    return {trajectory.id: trajectory.text for trajectory in await played(Says, engine)}


async def workers_there(engine: RayEngines, count: int) -> None:
    while len(engine.workers()) < count:  # noqa: ASYNC110  # a worker joins when it is ready
        await anyio.sleep(0.2)


async def test_trainer_broadcasts_to_two_real_engines_and_survives_a_death(cluster: Standing, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    from vllm.utils.network_utils import get_open_port

    from tests.engines.broadcast_transfer import HOST, BroadcastTrainerInfo

    folder = tmp_path / "model"
    folder.mkdir()
    model = small_model(folder, demo_model())
    old = load_file(model / "model.safetensors")
    new = {name: tensor * 3 if name == LOUDER else tensor for name, tensor in old.items()}
    sent_elsewhere = tmp_path / "new.safetensors"
    save_file(new, sent_elsewhere)
    inner = VllmEngine(
        str(model),
        max_num_seqs=4,
        max_model_len=512,
        dtype="float32",  # greedy ids do not depend on how requests are batched
        weight_transfer_config={"backend": "broadcast"},
        worker_extension_cls="tests.engines.broadcast_transfer.BroadcastWorker",
    )
    on_cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    engine = RayEngines(inner, workers=(1, 2), gpus=0, runtime_env={"env_vars": on_cpu})
    with anyio.fail_after(START_SECONDS + WATCHDOG_SECONDS):
        async with engine:
            await workers_there(engine, 2)
            first = await said(engine)

            here = BroadcastTrainerInfo(HOST, get_open_port(), rank=0)
            source = Model(new)
            got = await talk(engine, LocalTransfer(here, source), version="sent")
            assert "sent" in versions(got[-1])
            other = await said(engine)
            assert other != first

            source.tensors = old
            await engine.update_weights(LocalTransfer(here, source), version="sent again")
            assert await said(engine) == first

            size = 1 + len(await engine.devices())
            assert size == 3
            port = get_open_port()
            meeting = {"master_address": HOST, "master_port": port, "rank_offset": 1, "world_size": size}
            transfer = WeightTransfer(announced(load_file(sent_elsewhere)), init=meeting)
            command = [
                sys.executable,
                "-m",
                "tests.engines.broadcast_transfer",
                str(port),
                str(size),
                str(sent_elsewhere),
            ]
            async with await anyio.open_process(command, cwd=ROOT, stdout=None, stderr=None) as trainer:
                await engine.update_weights(transfer, version="from elsewhere")
                assert trainer.stdin is not None
                await trainer.stdin.aclose()
                assert await trainer.wait() == 0
            assert {worker.version for worker in engine.workers()} == {"from elsewhere"}
            assert await said(engine) == other

            victim = engine.workers()[1]
            source.before = lambda name: os.kill(victim.pid, signal.SIGKILL) if name == LOUDER else None
            await engine.update_weights(LocalTransfer(here, source), version="last")
            assert [(worker.version, worker.number != victim.number) for worker in engine.workers()] == [("last", True)]
            assert await said(engine) == first
            assert any(f"worker {victim.number} on" in event and "is lost" in event for event in engine.events)


async def talk(engine: RayEngines, transfer: LocalTransfer, *, version: str) -> list[Trajectory]:
    """Play long episodes, and load new weights in the middle."""
    got: list[Trajectory] = []
    async with Run(TalksLong, engine, group_size=2) as run:
        async for trajectory in run:
            got.append(trajectory)
            if len(got) == 1:
                update = await engine.update_weights(transfer, mode="keep", version=version)
                assert update.version == version
                assert {worker.version for worker in engine.workers()} == {version}
    assert {trajectory.outcome for trajectory in got} == {Outcome.TOKEN_LIMIT}
    for trajectory in got:
        assert sorted(versions(trajectory), key=["default", version].index) == versions(trajectory)
    return got
