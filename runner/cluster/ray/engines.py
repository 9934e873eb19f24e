"""`RayEngines`: engines and environments in actors of Ray, on this machine or a cluster, as one engine of a run."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any, Final
from uuid import uuid4

import anyio

from runner.cluster.engine_client import HostedEngine
from runner.cluster.engines import STALL_SECONDS, FleetEngine
from runner.cluster.protocol import WorkerLost, WorkerProcess
from runner.cluster.ray.launcher import RayLauncher, host_called
from runner.engines.base import BaseEngine, Engine
from runner.engines.remote.engine import RemoteEngine
from runner.engines.vllm.parallel import ParallelSizes
from runner.errors import BadOption, DeltarunnerError, EngineDead

__all__ = ["RayEngine", "RayEngines", "require_ray"]


class RayEngines(FleetEngine):
    """Engines on many machines, or several engines on this machine. Whole episodes are played next to each engine.

        run(Weather, RayEngines(VllmEngine("Qwen/Qwen3-8B"), workers=4))

    Each worker is a process with an engine and the environments of its episodes. Tasks, run file, groups and results
    stay in this process. A worker that dies is replaced, and its episodes are played again.

    Args:
        engine: the engine of each worker, not entered.
        workers: the number of workers; or the minimum to begin with and the maximum, such as (8, 64). Further workers
            start when machines are added.
        address: address of a running Ray cluster, or "auto"; by default the one that this process is connected to,
            RAY_ADDRESS, or a new one on this machine.
        cpus: number of CPUs that a worker takes from Ray's count.
        gpus: number of GPUs of a worker; by default as many as the arguments of its engine and of the engines of other
            agents need, and none if the cluster has none.
        runtime_env: passed to Ray, such as {"working_dir": "."} for machines that do not see this one's files.
        stall_seconds: seconds that there may be fewer workers than the minimum before the run ends, unless enough
            engines are starting.

    Raises (when it is entered):
        BadOption: Ray is not installed, the cluster is missing or too small, or a worker does not match the others.
        BadModel, EngineError: an engine does not start.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        workers: int | tuple[int, int],
        address: str | None = None,
        cpus: float = 1,
        gpus: float | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        require_ray("RayEngines", address)
        if isinstance(engine, RemoteEngine):
            raise BadOption(
                "RayEngines(RemoteEngine(...)): each worker has its own engine, but one process can use a server: "
                "give the run the RemoteEngine itself."
            )
        launcher = RayLauncher(
            "RayEngines",
            address=address,
            cpus=cpus,
            gpus=gpus,
            engine_gpus=gpus_of(engine),
            runtime_env=runtime_env,
        )
        super().__init__(engine, launcher, workers, stall_seconds=stall_seconds)
        self._on_ray = launcher
        launcher.least = self.least

    async def health(self) -> None:
        """Return if there are enough workers, or may soon be enough.

        Raises:
            EngineDead: there are not enough workers, or the cluster's head is gone; the message has the reason.
        """
        await super().health()
        await self._on_ray.require_head()

    def _enter_besides(self, engines: Collection[BaseEngine]) -> None:
        self._on_ray.take_more_gpus(sum(map(gpus_of, engines)))


def require_ray(who: str, address: str | None = None) -> None:
    """Check that Ray is installed and that an address can be used.

    Raises:
        BadOption: Ray is not installed, or the address is one of Ray Client.
    """
    if importlib.util.find_spec("ray") is None:
        raise BadOption(f"{who} needs Ray: pip install 'deltarunner[ray]'.")
    given = f"{who}(address={address!r})"
    if address is None:
        address = os.environ.get("RAY_ADDRESS", "")
        given = f"{who}: RAY_ADDRESS={address}"
    if address.startswith("ray://"):
        raise BadOption(
            f"{given}: Ray Client is not supported, since it would slow down every call: start the script on a "
            "machine of the cluster, with address='auto'."
        )


def gpus_of(engine: Any) -> int:
    """Return the number of GPUs that an engine needs in a cluster with GPUs, from its arguments (`given`).

    The number is 0 for an engine without `given`.
    """
    given: Mapping[str, Any] | None = getattr(engine, "given", None)
    return 0 if given is None else ParallelSizes.of(given).workers


END_SECONDS: Final = 30.0
"""Seconds that the engine may take to end by itself."""


class RayEngine(HostedEngine):
    """One engine in a process of its own, on this machine or another one, shared by all its clients.

        judge = RayEngine(VllmEngine("judge-70b", tensor_parallel_size=4))
        run(Game, RayEngines(VllmEngine("policy"), workers=8), engines={"judge": judge})

    Use it for judges and simulated users that many workers share, or as the model of environments that cannot be sent
    to workers. The process that enters the engine starts and ends it; the workers of a run share this engine. Requests
    are sent one by one, and deltas of all streams come back in batches. The weights of this engine cannot be updated.

    Args:
        engine: the engine of the process, not entered.
        address: address of a running Ray cluster, or "auto"; by default the one that this process is connected to,
            RAY_ADDRESS, or a new one on this machine.
        cpus: number of CPUs that the process takes from Ray's count.
        gpus: number of GPUs; by default as many as the engine's arguments need, and none if the cluster has none.
        runtime_env: passed to Ray, for a machine that does not see this one's files.
        stall_seconds: seconds that the process may wait for a machine with room.

    Raises (when it is entered):
        BadOption: Ray is not installed, or the cluster is missing or too small.
        BadModel, EngineError: the engine does not start.
        EngineDead: no machine had room for the process.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        address: str | None = None,
        cpus: float = 0,
        gpus: float | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        super().__init__()
        require_ray("RayEngine", address)
        if not isinstance(engine, Engine) or isinstance(engine, HostedEngine) or engine.running:
            raise BadOption(
                f"RayEngine({type(engine).__name__}(...)): pass an engine of token ids that was not entered, such "
                "as VllmEngine('MODEL')."
            )
        self.engine = engine
        """The engine of the process."""
        self._host = f"deltarunner-{uuid4().hex}"
        self._launcher = RayLauncher(
            "RayEngine",
            address=address,
            cpus=cpus,
            gpus=gpus,
            engine_gpus=gpus_of(engine),
            runtime_env=runtime_env,
        )
        self._stall_seconds = stall_seconds

    def __reduce__(self) -> tuple[Any, ...]:
        return _SharedRayEngine, (self._host,)

    async def health(self) -> None:
        """Return when the engine can answer.

        Raises:
            EngineDead: the engine cannot answer, or the cluster's head is gone; the message has the cause.
        """
        await super().health()
        await self._launcher.require_head()

    async def _reach(self, exit_stack: AsyncExitStack) -> WorkerProcess:
        await self._launcher.open()
        exit_stack.push_async_callback(self._launcher.close)
        process = self._launcher.start_host(self.engine, self._host)
        exit_stack.push_async_callback(self._end, process, process.send("live"))
        await self._until_placed(process)
        return process

    async def _end(self, process: WorkerProcess, lived: Any) -> None:
        with anyio.move_on_after(END_SECONDS, shield=True), suppress(WorkerLost, DeltarunnerError):
            await process.send("end")
            await lived
        process.kill()

    async def _until_placed(self, process: WorkerProcess) -> None:
        placed = False
        try:
            # Only the wait for a machine is limited. The call of `join` waits for the engine without a limit.
            with anyio.move_on_after(self._stall_seconds):
                await process.send("hello")
                placed = True
        finally:
            if not placed:  # a process without a machine does not end by itself
                process.kill()
        if not placed:
            raise EngineDead(
                f"RayEngine: for {self._stall_seconds:g} s no machine had room for the engine's process, which needs "
                f"{self._launcher.needs} on one machine. Give RayEngines fewer workers, or add machines to the cluster."
            )


class _SharedRayEngine(HostedEngine):
    """The client of a shared engine in a process that did not start the engine."""

    def __init__(self, host: str) -> None:
        super().__init__()
        self._host = host

    def __reduce__(self) -> tuple[Any, ...]:
        return _SharedRayEngine, (self._host,)

    async def _reach(self, exit_stack: AsyncExitStack) -> WorkerProcess:
        process = host_called(self._host)
        exit_stack.callback(process.part)
        return process
