"""A launcher's interface to Ray: its reactions to Ray's errors, its requests to Ray, and its end."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import anyio
import pytest

from runner import BadOption, EngineDead, RayEngine, RayEngines, RemoteEngine, Run, ScriptedEngine, VllmEngine
from runner.cluster.protocol import WorkerLost
from runner.cluster.ray import calls
from runner.cluster.ray import launcher as launching
from runner.testing import VirtualClock
from tests.cluster.in_process import Answer
from tests.cluster.playing import Dice
from tests.cluster.ray_double import has_machines, launcher

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone]


def test_a_worker_that_ray_ended_for_memory_is_lost_by_that_name() -> None:
    message = (
        "2 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: b2ce) "
        "was 8.07GB used / 23.54GB limit (0.342871)\nOOM kill reason: Memory usage 8647462912B exceeded threshold"
    )
    error: Any = pytest.importorskip("ray.exceptions").OutOfMemoryError
    short = "its machine was short of memory, and Ray ended it"
    assert calls._why(error(message)) == f"{short}: 8.07GB used / 23.54GB limit"
    assert calls._why(error("")) == short


async def test_own_cluster_has_room_for_later_processes(ray: Any) -> None:
    judge = RayEngine(ScriptedEngine("Fine."))
    await judge._launcher.open()
    assert ray.settings["num_cpus"] >= 1000
    await judge._launcher.close()


async def test_actors_beside_a_connection_have_the_given_runtime_env(ray: Any) -> None:
    pytest.importorskip("ray")
    ray.init()
    envs = []
    for number in range(2):
        each = launcher(runtime_env={"env_vars": {"A": str(number)}})
        await each.open()
        each.start(ScriptedEngine("hi"), 0)
        envs.append(ray.remote().options.call_args.kwargs["runtime_env"]["env_vars"])
        await each.close()
    assert envs == [{"A": "0"}, {"A": "1"}]
    with pytest.raises(BadOption, match=r"RayEngines\(runtime_env=...\): Ray refuses this value: .*no-such-folder"):
        await launcher(runtime_env={"working_dir": "no-such-folder"}).open()


async def test_cluster_of_another_ray_or_python_is_refused_with_the_fix(ray: Any, listener: str) -> None:
    def init(**_: Any) -> None:
        raise RuntimeError(
            "Version mismatch: The cluster was started with:\n    Ray: 2.60.0\n    Python: 3.12.1\n"
            "This process on node 10.0.0.1 was started with:\n    Ray: 2.50.0\n    Python: 3.11.7\n"
        )

    ray.init = init
    message = (
        f"has Ray 2.60.0 and Python 3.12.1, and this process, on {socket.gethostname()}, has Ray 2.50.0 and Python "
        "3.11.7: they have to be the same on every machine. Either pip install 'ray==2.60.0' on this machine and "
        "start the script with Python 3.12.1, or"
    )
    with pytest.raises(BadOption, match=re.escape(message)):
        await launcher(address=listener).open()


def test_a_machine_without_deltarunner_is_named_with_what_to_install() -> None:
    message = calls._not_made(
        "The actor died because of an error raised in its creation task, ray::WorkerActor.__init__() (pid=13253, "
        "ip=192.0.2.7, actor_id=3586a)\n  File ...\nModuleNotFoundError: No module named 'runner'\n"
    )
    assert message.startswith(
        "a worker cannot be created on 192.0.2.7: deltarunner is missing there, or has another version"
    )
    assert "pip install 'deltarunner[ray]" in message
    other = calls._not_made("(pid=1, ip=192.0.2.7)\nModuleNotFoundError: No module named 'mine'")
    assert other == "a worker cannot be created on 192.0.2.7: ModuleNotFoundError: No module named 'mine'"


@pytest.mark.parametrize("anyio_backend", ["trio"])
@pytest.mark.parametrize("kind", ["RayEngines", "RayEngine"])
async def test_trio_is_refused_by_name_before_ray_is_started(ray: Any, kind: str) -> None:
    inner = ScriptedEngine("hi")
    engine = RayEngines(inner, workers=1) if kind == "RayEngines" else RayEngine(inner)
    with pytest.raises(BadOption, match=rf"^{kind}: Ray works on asyncio alone, and this is trio"):
        async with engine:
            pass
    assert not ray.is_initialized()


async def test_engine_that_cannot_be_sent_is_refused_with_advice(ray: Any) -> None:
    only = launcher()
    await only.open()
    with pytest.raises(BadOption, match=r"ScriptedEngine cannot be pickled .*: give it values that can be sent"):
        only.start(ScriptedEngine(lambda _: "hi"), 0)
    await only.close()


async def test_remote_engine_is_refused_as_the_engine_of_workers(ray: Any) -> None:
    with pytest.raises(BadOption, match=r"RayEngines\(RemoteEngine\(...\)\): .* one process can use a server"):
        RayEngines(RemoteEngine("http://127.0.0.1:1", "a-model"), workers=2)


@pytest.mark.parametrize("brought", ["", "by the process", "by the launcher"])
async def test_workers_use_the_drivers_folder_unless_one_is_uploaded(
    ray: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, brought: str
) -> None:
    before = os.getcwd()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launching, "uploaded", lambda _, given: dict(given))
    package = {"working_dir": "gcs://package.zip"}
    ray.get_runtime_context().runtime_env = package if brought == "by the process" else {}
    only = launcher(runtime_env=package if brought == "by the launcher" else None)
    await only.open()
    only.start(ScriptedEngine("hi"), 0)
    _, surroundings, *_ = ray.remote().options().remote.call_args_list[-1].args
    await only.close()
    monkeypatch.chdir(before)
    monkeypatch.setattr(sys, "path", [*sys.path])
    surroundings.enter()
    assert os.getcwd() == (before if brought else str(tmp_path))


def test_cluster_without_a_head_is_dead_unless_it_returns_in_time(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ray.get_runtime_context().gcs_address = "10.0.0.1:6379"
    stream = AsyncMock()
    connect = AsyncMock(return_value=stream)
    monkeypatch.setattr(anyio, "connect_tcp", connect)
    engine = RayEngines(ScriptedEngine("hi"), workers=1)
    only: Any = engine.launcher

    async def seconds(until: float) -> None:
        while anyio.current_time() < until:
            await anyio.sleep(1)
            await only.require_head()

    async def run() -> None:
        await only.open()
        await seconds(20)
        connect.side_effect = OSError("refused")
        await seconds(50)
        connect.side_effect = None
        await seconds(60)
        assert connect.await_count <= 60 / launching.HEAD_SECONDS
        connect.side_effect = OSError("refused")
        with pytest.raises(EngineDead, match=r"the head of Ray's cluster, at 10.0.0.1:6379, has not answered for 40 s"):
            await seconds(200)
        assert 100 <= anyio.current_time() <= 110
        await only.close()

    VirtualClock().run(run)


@pytest.mark.parametrize("before", [None, "token"])
async def test_failed_start_of_an_own_cluster_restores_token_settings(
    ray: Any, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    pytest.importorskip("ray")
    name = "RAY_AUTH_MODE"
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
    with pytest.raises(BadOption, match=r"each worker needs 5 CPU, and the cluster has 4\. Give smaller cpus="):
        await launcher(cpus=5).open()
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "gpus", "reserved"),
    [
        pytest.param({"tensor_parallel_size": 4}, None, 4, id="tensor parallel"),
        pytest.param(
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2}, None, 8, id="all"
        ),
        pytest.param(
            {"tensor_parallel_size": 2, "prefill_context_parallel_size": 2}, None, 4, id="prefill context parallel"
        ),
        pytest.param({}, None, 1, id="no size"),
        pytest.param({"tensor_parallel_size": 4}, 0.5, 0.5, id="as given"),
        pytest.param({"tensor_parallel_size": 4}, 0, 0, id="none, as given"),
    ],
)
async def test_workers_take_the_clusters_gpus_whatever_the_driver_has(
    ray: Any, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], gpus: float | None, reserved: float
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # torch need not be installed either
    has_machines(ray, {"CPU": 4}, {"CPU": 8, "GPU": 8})
    engine = RayEngines(VllmEngine("a-model", **arguments), workers=1, gpus=gpus)
    assert await reserved_by(engine.launcher, ray) == reserved


async def test_workers_take_no_gpus_if_cluster_or_engine_has_none(ray: Any) -> None:
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
    others: dict[str, Any] = {
        "judge": judge,
        "jury": judge,
        "user": ScriptedEngine("hi"),
        "shared": RayEngine(ScriptedEngine("hi")),
    }
    engine = RayEngines(VllmEngine("a-model", tensor_parallel_size=2), workers=1, gpus=gpus)
    run = Run(Dice, engine, engines=others)
    engine.sent(run._setup)
    assert await reserved_by(engine.launcher, ray) == reserved


async def test_workers_with_too_few_gpus_for_other_engines_are_refused(ray: Any) -> None:
    has_machines(ray, {"CPU": 4, "GPU": 8})
    engine = RayEngines(VllmEngine("a-model"), workers=1)
    await engine.launcher.open()
    engine.sent(Run(Dice, engine, engines={"judge": ScriptedEngine("hi")})._setup)
    with pytest.raises(BadOption, match=r"would need 3 GPU with the engines of engines=, and was started with 1\."):
        engine.sent(Run(Dice, engine, engines={"judge": VllmEngine("a-judge", tensor_parallel_size=2)})._setup)
    await engine.launcher.close()


async def reserved_by(launcher: Any, ray: Any) -> float:
    """Number of GPUs that a worker of this launcher reserves."""
    await launcher.open()
    launcher.start(ScriptedEngine("hi"), 0)
    reserved: float = ray.remote().options.call_args.kwargs["num_gpus"]
    await launcher.close()
    return reserved


async def test_worker_without_a_large_enough_machine_is_refused(ray: Any) -> None:
    fours: list[dict[str, float]] = [{"CPU": 16, "GPU": 4}, {"CPU": 32, "GPU": 4}, {"CPU": 64}]
    has_machines(ray, *fours, dead=({"CPU": 16, "GPU": 8},))
    message = (
        "a worker needs 8 GPU and 1 CPU on one machine, and the largest one, node-1, has 4 GPU and 32 CPU. Give smaller"
    )
    with pytest.raises(BadOption, match=message):
        await launcher(gpus=8).open()
    assert not ray.is_initialized()
    fits = launcher(gpus=4)
    await fits.open()
    await fits.close()


async def test_worker_takes_cores_and_gpus_of_one_machine(ray: Any) -> None:
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


def test_engine_without_a_machine_ends_by_name(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    has_machines(ray, {"CPU": 4, "GPU": 4})
    nowhere = Nowhere()
    engine = RayEngine(VllmEngine("judge", tensor_parallel_size=4), stall_seconds=20)
    monkeypatch.setattr(engine._launcher, "start_host", lambda *_: nowhere)

    async def run() -> None:
        began = anyio.current_time()
        message = r"for 20 s no machine had room for the engine's process, which needs 4 GPU and 0 CPU"
        with pytest.raises(EngineDead, match=message):
            async with engine:
                pass
        assert anyio.current_time() - began == 20
        assert nowhere.killed
        assert not ray.is_initialized()

    VirtualClock().run(run)
