"""`RayEngines`: engines and environments in actors of Ray, on this machine or on a cluster, as one engine of a run."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection, Mapping
from typing import Any

from runner.cluster.engines import STALL_SECONDS, FleetEngine
from runner.cluster.ray_launcher import RayLauncher
from runner.engines.base import BaseEngine, Engine
from runner.engines.remote.engine import RemoteEngine
from runner.engines.vllm.parallel import ParallelSizes
from runner.errors import BadOption

__all__ = ["RayEngines", "require_ray"]


class RayEngines(FleetEngine):
    """Engines on many machines, or several on this one; whole episodes are played where they are.

        run(Weather, RayEngines(VllmEngine("Qwen/Qwen3-8B"), workers=4))

    Each worker is a process with an engine and the environments of its episodes. What the run keeps stays here: tasks,
    the run file, groups, and what is announced. A worker that dies is replaced, and its episodes are played again.

    Args:
        engine: what every worker has; nobody has entered it.
        workers: how many; or the least to begin with and the most, which join as machines come: (8, 64).
        address: of a cluster of Ray that stands, or "auto"; by default the one that this process is connected to,
            RAY_ADDRESS, or one that is started here.
        cpus: what a worker takes of Ray's count of processor cores.
        gpus: the same for GPUs; by default as many as the arguments of the engine and of those that workers enter for
            other agents ask for, none where the cluster has none.
        runtime_env: passed to Ray, such as {"working_dir": "."} for machines that do not see this one's files.
        stall_seconds: how long there may be fewer workers than the least before the run ends; engines that start are
            waited for.

    Raises (when it is entered):
        BadOption: Ray is not installed, there is no cluster, or too little of it; a worker is unlike the others.
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
                "RayEngines(RemoteEngine(...)): workers have engines of their own, and a server is asked by one "
                "process; give the run the RemoteEngine itself."
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
        """Return when there are enough workers, or may be soon.

        Raises:
            EngineDead: there are not, or the cluster's head is gone; says why.
        """
        await super().health()
        await self._on_ray.require_head()

    def _enter_besides(self, engines: Collection[BaseEngine]) -> None:
        self._on_ray.take_more_gpus(sum(map(gpus_of, engines)))


def require_ray(who: str, address: str | None = None) -> None:
    """Refuse to go on without Ray, or with an address that it cannot be used by.

    Raises:
        BadOption: it is not installed, or the address is one of Ray Client.
    """
    if importlib.util.find_spec("ray") is None:
        raise BadOption(f"{who} needs Ray: pip install 'deltarunner[ray]'.")
    given = f"{who}(address={address!r})"
    if address is None:
        address = os.environ.get("RAY_ADDRESS", "")
        given = f"{who}: RAY_ADDRESS={address}"
    if address.startswith("ray://"):
        raise BadOption(
            f"{given}: through Ray Client every call would take a detour; start the script on a "
            "machine of the cluster, with address='auto'."
        )


def gpus_of(engine: Any) -> int:
    """How many GPUs this engine takes by its arguments, on a machine that has any; 0 where it has none to give."""
    given: Mapping[str, Any] | None = getattr(engine, "given", None)
    return 0 if given is None else ParallelSizes.of(given).workers
