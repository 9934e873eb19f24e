"""What runs inside an actor of Ray: a worker or a host, whose methods are called from elsewhere."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from runner.cluster.engine_process import EngineProcess
from runner.cluster.hosting import EngineHost
from runner.cluster.ray_calls import AnsweringActor, leave_word
from runner.cluster.worker import Worker
from runner.engines.base import BaseEngine
from runner.errors import BadOption

__all__ = ["EngineActor", "HostActor", "Surroundings", "WorkerActor", "ray_module"]


def ray_module() -> Any:
    """Ray, loaded."""
    # Not at the top, since it takes a second; and as Any, since its types do not know its own options.
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise BadOption(
            f"Ray is installed here and does not load ({error}): pip install --force-reinstall 'deltarunner[ray]'."
        ) from error


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a process has of the one that drives it, where both see the same files."""

    search: tuple[str, ...]
    """Where modules are looked for."""
    folder: str
    """Where relative paths begin; "" where Ray has brought a folder."""

    def enter(self) -> None:
        """Have this process see what the other one sees, as far as it is here."""
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
        """The object whose methods are called."""


class WorkerActor(EngineActor):
    """A `Worker` in an actor."""

    tick = 0.01  # episodes take seconds, and short ones are many

    def make(self, engine: BaseEngine, *arguments: Any) -> EngineProcess:
        """A worker of this number, which asks this desk for leases."""
        number, desk = arguments
        worker = Worker(engine, number, RayDesk(desk))
        worker.leave_word = leave_word
        return worker


class HostActor(EngineActor):
    """An `EngineHost` in an actor."""

    tick = 0.0  # who asks waits for the first id; what comes while a call of Ray's is made goes with the next one

    def make(self, engine: BaseEngine, *arguments: Any) -> EngineProcess:
        """A host."""
        return EngineHost(engine)


class RayDesk:
    """The desk of limiters, as a worker reaches it."""

    def __init__(self, desk: Any) -> None:
        self._desk = desk

    async def acquire(self, run: int, name: str, limit: int, worker: int, lease: int) -> bool:
        """Wait for a lease."""
        granted: bool = await self._desk.acquire.remote(run, name, limit, worker, lease)
        return granted

    def release(self, worker: int, lease: int) -> None:
        """Give a lease back."""
        self._desk.release.remote(worker, lease)
