"""What tests of engine control have in common: a slow engine, and requests that are being answered."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
import anyio.from_thread
import pytest
from anyio.lowlevel import checkpoint

from runner.engines.base import Engine, Finish, GenerationRequest
from runner.engines.scripted.runtime import ScriptedRuntime
from runner.engines.scripted.script import Latency
from runner.engines.state import PauseMode
from runner.engines.wrapping import WrappedEngine
from runner.options import Sampling
from runner.testing import ScriptedEngine

TEXT = "A long answer, a letter at a tick."
RuntimeT = TypeVar("RuntimeT", bound=ScriptedRuntime)
MODES = [pytest.param(mode, id=mode.value) for mode in PauseMode]


def slow(**settings: Any) -> ScriptedEngine:
    return ScriptedEngine(TEXT, chunks=1, latency=Latency(between=1), record=True, **settings)


def runs_as(engine: ScriptedEngine, kind: type[RuntimeT]) -> RuntimeT:
    """The runtime of an engine that was entered, which from now on does what this kind does."""
    runtime = engine.runtime
    runtime.__class__ = kind
    assert isinstance(runtime, kind)
    return runtime


class NotOurs(WrappedEngine):
    """An engine whose weights are not ours, as one that is asked over a network."""

    @property
    def runtime(self) -> None:  # type: ignore[override]  # there is none in this process
        return None


def request(name: str = "episode/main/0", **fields: Any) -> GenerationRequest:
    return GenerationRequest(name=name, prompt=[72, 105], sampling=Sampling.defaults(), **fields)


@dataclass
class Said:
    """What one request was answered so far."""

    ids: list[int]
    finish: Finish | None = None


@asynccontextmanager
async def saying(engine: Engine, wanted: GenerationRequest | None = None, *, at_least: int = 3) -> AsyncIterator[Said]:
    """A request of which so many ids were read; it goes on beside the block, and has ended after it."""
    said = Said([])
    begun = anyio.Event()

    async def read() -> None:
        async with engine.stream(wanted or request()) as stream:
            async for delta in stream:
                said.ids += delta.token_ids
                if len(said.ids) >= at_least:
                    begun.set()
        said.finish = stream.finish

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        await begun.wait()
        yield said


async def ask(engine: Engine, wanted: GenerationRequest | None = None) -> tuple[list[int], Finish]:
    async with engine.stream(wanted or request()) as stream:
        ids = [token_id async for delta in stream for token_id in delta.token_ids]
    assert stream.finish is not None
    return ids, stream.finish


async def a_while(steps: int = 20) -> None:
    for _ in range(steps):
        await checkpoint()
