"""`RayEngine`: one engine in an actor of Ray, shared by a run and all its workers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any, Final
from uuid import uuid4

import anyio

from runner.cluster.engine_client import HostedEngine
from runner.cluster.engines import STALL_SECONDS
from runner.cluster.protocol import WorkerLost, WorkerProcess
from runner.cluster.ray_engines import gpus_of, require_ray
from runner.cluster.ray_launcher import RayLauncher, host_called
from runner.engines.base import Engine
from runner.errors import BadOption, DeltarunnerError, EngineDead

__all__ = ["RayEngine"]

END_SECONDS: Final = 30.0
"""Seconds that the engine may take to end by itself."""


class RayEngine(HostedEngine):
    """One engine in a process of its own, on this machine or another one, shared by all its clients.

        judge = RayEngine(VllmEngine("judge-70b", tensor_parallel_size=4))
        run(Game, RayEngines(VllmEngine("policy"), workers=8), engines={"judge": judge})

    For judges and simulated users that many workers share, or for the model of environments that cannot move. The
    process that enters it starts and ends it; the workers of a run use the same one. Requests go one by one, deltas of
    all streams come back in one batch per tick. Its weights cannot be updated from here.

    Args:
        engine: the engine of the process, not entered.
        address: of a running Ray cluster, or "auto"; by default the one that this process is connected to, RAY_ADDRESS,
            or a new one on this machine.
        cpus: number of CPUs that it takes from Ray's count.
        gpus: number of GPUs; by default as many as the engine's arguments need, and none if the cluster has none.
        runtime_env: passed to Ray, for a machine that does not see this one's files.
        stall_seconds: seconds that it may wait for a machine with room.

    Raises (when it is entered):
        BadOption: Ray is not installed, or the cluster is missing or too small.
        BadModel, EngineError: the engine does not start.
        EngineDead: no machine had room for it.
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
            EngineDead: it cannot, or the cluster's head is gone; with the cause.
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
            # The start of an engine is not limited; the caller of `join` waits for it.
            with anyio.move_on_after(self._stall_seconds):
                await process.send("hello")
                placed = True
        finally:
            if not placed:  # a process without a machine does not end by itself
                process.kill()
        if not placed:
            raise EngineDead(
                f"RayEngine: for {self._stall_seconds:g} s no machine had room for the engine's process, which needs "
                f"{self._launcher.needs} on one of them. Leave it some: give RayEngines fewer workers, or the cluster "
                "more machines."
            )


class _SharedRayEngine(HostedEngine):
    """The same engine in a process that did not start it."""

    def __init__(self, host: str) -> None:
        super().__init__()
        self._host = host

    def __reduce__(self) -> tuple[Any, ...]:
        return _SharedRayEngine, (self._host,)

    async def _reach(self, exit_stack: AsyncExitStack) -> WorkerProcess:
        process = host_called(self._host)
        exit_stack.callback(process.part)
        return process
