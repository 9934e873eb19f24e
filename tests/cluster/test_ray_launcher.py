"""What a launcher makes of Ray's words, what it asks of a cluster, and when it leaves one."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import anyio
import pytest

from runner import BadOption, EngineDead, RayEngine, RayEngines, Run, ScriptedEngine, VllmEngine
from runner.cluster import ray_calls, ray_engine, ray_engines, ray_launcher
from runner.cluster.ray_launcher import RayLauncher
from runner.cluster.words import WorkerLost
from runner.testing import VirtualClock
from tests.cluster.in_process import Answer
from tests.cluster.playing import Dice

pytestmark = pytest.mark.anyio


def test_a_worker_that_ray_ended_for_memory_is_lost_by_that_name() -> None:
    told = (
        "2 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: b2ce) "
        "was 8.07GB used / 23.54GB limit (0.342871)\nOOM kill reason: Memory usage 8647462912B exceeded threshold"
    )
    error: Any = pytest.importorskip("ray.exceptions").OutOfMemoryError
    short = "its machine was short of memory, and Ray ended it"
    assert ray_calls._why(error(told)) == f"{short}: 8.07GB used / 23.54GB limit"
    assert ray_calls._why(error("")) == short


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As much of Ray as a launcher asks, with a cluster of four cores on one machine."""
    state = SimpleNamespace(on=False)
    fake = MagicMock()
    has_machines(fake, {"CPU": 4})
    fake.is_initialized = lambda: state.on
    fake.init = lambda **_: setattr(state, "on", True)
    fake.shutdown = lambda: setattr(state, "on", False)
    monkeypatch.setattr(ray_engines, "require_ray", lambda *_: None)
    monkeypatch.setattr(ray_engine, "require_ray", lambda *_: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_launcher, "ray_module", lambda: fake)
    monkeypatch.setattr(ray_launcher, "_on_node", lambda place, soft: None)
    return fake


def has_machines(fake: Any, *machines: dict[str, float], dead: tuple[dict[str, float], ...] = ()) -> None:
    """Let the cluster be of these machines: node-0, node-1, and so on; it remembers those that are dead."""
    fake.cluster_resources = lambda: {
        name: sum(machine.get(name, 0) for machine in machines) for machine in machines for name in machine
    }
    fake.nodes = lambda: [
        {"Alive": machine in machines, "NodeManagerHostname": f"node-{number}", "Resources": machine}
        for number, machine in enumerate((*machines, *dead))
    ]


def launcher(cpus: float = 1, gpus: float = 0) -> RayLauncher:
    return RayLauncher("RayEngines", address=None, cpus=cpus, gpus=gpus, runtime_env=None)


async def test_who_leaves_a_cluster_last_ends_the_connection(ray: Any) -> None:
    first, second = launcher(), launcher()
    await first.open()
    await second.open()
    await first.close()
    assert ray.is_initialized()
    await second.close()
    assert not ray.is_initialized()


@pytest.mark.parametrize("before", [None, "token"])
async def test_a_cluster_of_ones_own_that_does_not_start_leaves_the_way_of_tokens_as_it_was(
    ray: Any, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    pytest.importorskip("ray")
    name = ray_launcher._AUTH_MODE
    monkeypatch.setenv(name, before or "")
    if before is None:
        monkeypatch.delenv(name)

    def fail(**_: Any) -> None:
        monkeypatch.setenv(name, "as Ray has it for its own")
        raise RuntimeError("no room for its store")

    ray.init = fail
    with pytest.raises(BadOption, match="could be started on this machine: no room for its store"):
        await launcher().open()
    assert os.environ.get(name) == before


async def test_a_connection_that_was_there_before_stays(ray: Any) -> None:
    ray.init()
    only = launcher()
    await only.open()
    await only.close()
    assert ray.is_initialized()


async def test_a_cluster_that_is_too_small_is_left_again(ray: Any) -> None:
    with pytest.raises(BadOption, match="1 workers of 5 CPU each need 5, and the cluster has 4"):
        await launcher(cpus=5).open()
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "gpus", "reserved"),
    [
        pytest.param({"tensor_parallel_size": 4}, None, 4, id="tensor parallel"),
        pytest.param(
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2}, None, 8, id="all"
        ),
        pytest.param({}, None, 1, id="no size"),
        pytest.param({"tensor_parallel_size": 4}, 0.5, 0.5, id="as given"),
        pytest.param({"tensor_parallel_size": 4}, 0, 0, id="none, as given"),
    ],
)
async def test_workers_take_the_gpus_of_the_cluster_whatever_the_machine_has_that_drives(
    ray: Any, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], gpus: float | None, reserved: float
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # nor has that to be installed there
    has_machines(ray, {"CPU": 4}, {"CPU": 8, "GPU": 8})
    engine = RayEngines(VllmEngine("a-model", **arguments), workers=1, gpus=gpus)
    assert await reserved_by(engine.launcher, ray) == reserved


async def test_workers_take_no_gpus_where_the_cluster_or_the_engine_has_none(ray: Any) -> None:
    on_cpus = RayEngines(VllmEngine("a-model", tensor_parallel_size=4), workers=1)
    assert await reserved_by(on_cpus.launcher, ray) == 0
    has_machines(ray, {"CPU": 4, "GPU": 1})
    assert await reserved_by(RayEngines(ScriptedEngine("hi"), workers=1).launcher, ray) == 0


@pytest.mark.parametrize(("gpus", "reserved"), [(None, 4), (2.5, 2.5)])
async def test_workers_take_gpus_for_the_engines_of_other_agents_too(
    ray: Any, gpus: float | None, reserved: float
) -> None:
    has_machines(ray, {"CPU": 4, "GPU": 8})
    judge = VllmEngine("a-judge", tensor_parallel_size=2)
    others = {"judge": judge, "jury": judge, "user": ScriptedEngine("hi"), "shared": RayEngine(ScriptedEngine("hi"))}
    engine = RayEngines(VllmEngine("a-model", tensor_parallel_size=2), workers=1, gpus=gpus)
    run = Run(Dice, engine, engines=others)
    engine.sent(run._stage)
    assert await reserved_by(engine.launcher, ray) == reserved


async def test_workers_that_were_started_with_fewer_gpus_than_a_runs_other_engines_take_are_refused(ray: Any) -> None:
    has_machines(ray, {"CPU": 4, "GPU": 8})
    engine = RayEngines(VllmEngine("a-model"), workers=1)
    await engine.launcher.open()
    engine.sent(Run(Dice, engine, engines={"judge": ScriptedEngine("hi")})._stage)
    with pytest.raises(BadOption, match=r"would need 3 GPU with the engines of engines=, and was started with 1\."):
        engine.sent(Run(Dice, engine, engines={"judge": VllmEngine("a-judge", tensor_parallel_size=2)})._stage)
    await engine.launcher.close()


async def reserved_by(launcher: Any, ray: Any) -> float:
    """How many GPUs a worker of this launcher reserves."""
    await launcher.open()
    launcher.start(ScriptedEngine("hi"), 0)
    reserved: float = ray.remote().options.call_args.kwargs["num_gpus"]
    await launcher.close()
    return reserved


async def test_a_worker_that_no_machine_has_room_for_is_refused_with_the_largest_one(ray: Any) -> None:
    fours: list[dict[str, float]] = [{"CPU": 16, "GPU": 4}, {"CPU": 32, "GPU": 4}, {"CPU": 64}]
    has_machines(ray, *fours, dead=({"CPU": 16, "GPU": 8},))
    told = (
        "a worker needs 8 GPU and 1 CPU on one machine, and the largest one, node-1, has 4 GPU and 32 CPU. Give smaller"
    )
    with pytest.raises(BadOption, match=told):
        await launcher(gpus=8).open()
    assert not ray.is_initialized()
    fits = launcher(gpus=4)
    await fits.open()
    await fits.close()


async def test_a_worker_does_not_take_its_cores_of_one_machine_and_its_gpus_of_another(ray: Any) -> None:
    has_machines(ray, {"CPU": 64}, {"CPU": 2, "GPU": 4})
    with pytest.raises(BadOption, match="needs 1 GPU and 3 CPU on one machine, and the largest one, node-1, has 4 GPU"):
        await launcher(cpus=3, gpus=1).open()
    only_cores = launcher(cpus=3)
    await only_cores.open()
    await only_cores.close()


class Nowhere:
    """A process that waits for a machine."""

    def __init__(self) -> None:
        self.killed = False
        self._asked: list[Answer] = []

    def send(self, call: str, *_: Any) -> Awaitable[Any]:
        answer = Answer()
        if self.killed:
            answer.fail(WorkerLost("it was ended"))
        self._asked.append(answer)
        return answer

    def kill(self) -> None:
        self.killed = True
        for answer in self._asked:
            answer.fail(WorkerLost("it was ended"))


def test_an_engine_that_no_machine_has_room_for_ends_by_name_and_waits_no_longer(
    ray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_machines(ray, {"CPU": 4, "GPU": 4})
    nowhere = Nowhere()
    engine = RayEngine(VllmEngine("judge", tensor_parallel_size=4), stall_seconds=20)
    monkeypatch.setattr(engine._launcher, "start_host", lambda *_: nowhere)

    async def run() -> None:
        began = anyio.current_time()
        told = r"for 20 s no machine had room for the engine's process, which needs 4 GPU and 0 CPU"
        with pytest.raises(EngineDead, match=told):
            async with engine:
                pass
        assert anyio.current_time() - began == 20
        assert nowhere.killed
        assert not ray.is_initialized()

    VirtualClock().run(run)
