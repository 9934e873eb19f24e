"""The code inside an actor of Ray: a worker or a host, whose methods are called from other processes."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from runner.cluster.engine_host import EngineHost
from runner.cluster.engine_process import EngineProcess
from runner.cluster.ray.calls import AnsweringActor, record_exit_reason
from runner.cluster.worker import Worker
from runner.engines.base import BaseEngine
from runner.errors import BadOption

__all__ = ["EngineActor", "HostActor", "Surroundings", "WorkerActor", "ray_module"]


def ray_module() -> Any:
    # Ray is imported here, since the import takes a second. The type is Any, since Ray's type stubs lack some options.
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise BadOption(
            f"Ray is installed here and does not load ({error}): pip install --force-reinstall 'deltarunner[ray]'."
        ) from error


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The module search path and folder of the driving process, for actors on machines with the same files."""

    search: tuple[str, ...]
    """The module search path."""
    folder: str
    """Base of relative paths; "" if Ray has provided a folder."""

    def enter(self) -> None:
        """Use the driving process's search path and folder in this process, as far as they exist on this machine."""
        sys.path.extend(folder for folder in self.search if folder not in sys.path and os.path.isdir(folder))
        if os.path.isdir(self.folder):
            os.chdir(self.folder)


class EngineActor(AnsweringActor):
    """An `EngineProcess` inside an actor."""

    def __init__(self, packed: bytes, surroundings: Surroundings, *arguments: Any) -> None:
        super().__init__()
        surroundings.enter()
        self.process = self.make(pickle.loads(packed), *arguments)

    @abstractmethod
    def make(self, engine: BaseEngine, *arguments: Any) -> EngineProcess:
        """Create the `EngineProcess` whose methods are called."""


class WorkerActor(EngineActor):
    """A `Worker` in an actor."""

    tick = 0.01  # the delay batches many short calls, and matters little to episodes, which take seconds

    def make(self, engine: BaseEngine, *arguments: Any) -> EngineProcess:
        """Return a worker. `arguments` are its number and the actor of the limiter service."""
        number, limiter_service = arguments
        worker = Worker(engine, number, RayLimiterService(limiter_service))
        worker.record_exit_reason = record_exit_reason
        return worker


class HostActor(EngineActor):
    tick = 0.0  # no delay, since the client waits for the first id; events during a call are sent with the next call

    def make(self, engine: BaseEngine, *arguments: Any) -> EngineProcess:
        return EngineHost(engine)


class RayLimiterService:
    """A worker's access to the `SharedLimiters` in another actor."""

    def __init__(self, limiter_service: Any) -> None:
        self._limiter_service = limiter_service

    async def acquire(self, run: int, name: str, limit: int, worker: int, lease: int) -> bool:
        granted: bool = await self._limiter_service.acquire.remote(run, name, limit, worker, lease)
        return granted

    def release(self, worker: int, lease: int) -> None:
        self._limiter_service.release.remote(worker, lease)
