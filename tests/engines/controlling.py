"""What tests of engine control have in common: a slow engine, and requests that are being answered."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.from_thread
import pytest
from anyio.lowlevel import checkpoint

from runner.engines.base import Engine, Finish, GenerationRequest
from runner.engines.control import PauseMode
from runner.engines.scripted.script import Latency
from runner.options import Sampling
from runner.testing import ScriptedEngine

TEXT = "A long answer, a letter at a tick."
MODES = [pytest.param(mode, id=mode.value) for mode in PauseMode]


def slow(**settings: Any) -> ScriptedEngine:
    return ScriptedEngine(TEXT, chunks=1, latency=Latency(between=1), record=True, **settings)


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
