"""`RayEngine`: one engine in an actor of Ray, which a run and all its workers ask."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any, Final
from uuid import uuid4

import anyio

from runner.cluster.engines import STALL_SECONDS
from runner.cluster.hosted import HostedEngine
from runner.cluster.ray_engines import gpus_of, require_ray
from runner.cluster.ray_launcher import RayLauncher, host_called
from runner.cluster.words import WorkerLost, WorkerProcess
from runner.engines.base import Engine
from runner.errors import BadOption, DeltarunnerError, EngineDead

__all__ = ["RayEngine"]

END_SECONDS: Final = 30.0
"""How long the engine may take to end by itself."""


class RayEngine(HostedEngine):
    """One engine in a process of its own, on this machine or another one, for all who are to ask the same.

        judge = RayEngine(VllmEngine("judge-70b", tensor_parallel_size=4))
        run(Game, RayEngines(VllmEngine("policy"), workers=8), engines={"judge": judge})

    Judges and simulated users that many workers share, or the model of environments that cannot move. Whoever enters
    it starts it and ends it; the workers of a run that it is given to ask the same one. Requests go there one by one,
    the deltas of all of them come back in one message a tick. Its weights are not exchanged from here.

    Args:
        engine: what the process has; nobody has entered it.
        address: of a cluster of Ray that stands, or "auto"; by default the one that this process is connected to,
            RAY_ADDRESS, or one that is started here.
        cpus: what it takes of Ray's count of processor cores.
        gpus: the same for GPUs; by default as many as the engine's arguments ask for, none where the cluster has none.
        runtime_env: passed to Ray, for a machine that does not see this one's files.
        stall_seconds: how long it may wait for a machine that has room.

    Raises (when it is entered):
        BadOption: Ray is not installed, there is no cluster, or too little of it.
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
                f"RayEngine({type(engine).__name__}(...)): give an engine of token ids that nobody has entered, such "
                "as VllmEngine('MODEL')."
            )
        self.engine = engine
        """What the process has."""
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
        return _Guest, (self._host,)

    async def health(self) -> None:
        """Return when the engine can answer.

        Raises:
            EngineDead: it cannot, or the cluster's head is gone, with the cause.
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
            # How long its engine takes to start is that one's affair, and waited for by whoever asks it to join.
            with anyio.move_on_after(self._stall_seconds):
                await process.send("hello")
                placed = True
        finally:
            if not placed:  # a process that is nowhere does not end by itself
                process.kill()
        if not placed:
            raise EngineDead(
                f"RayEngine: for {self._stall_seconds:g} s no machine had room for the engine's process, which needs "
                f"{self._launcher.needs} on one of them. Leave it some: give RayEngines fewer workers, or the cluster "
                "more machines."
            )


class _Guest(HostedEngine):
    """The same engine in a process that has not started it."""

    def __init__(self, host: str) -> None:
        super().__init__()
        self._host = host

    def __reduce__(self) -> tuple[Any, ...]:
        return _Guest, (self._host,)

    async def _reach(self, exit_stack: AsyncExitStack) -> WorkerProcess:
        process = host_called(self._host)
        exit_stack.callback(process.part)
        return process
