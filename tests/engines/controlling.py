"""Helpers for tests of engine control: a slow engine, and open requests."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import pytest
from anyio.lowlevel import checkpoint

from runner.engines.base import Engine, Finish, GenerationRequest
from runner.engines.scripted.runtime import ScriptedRuntime
from runner.engines.scripted.script import Latency
from runner.engines.state import PauseMode
from runner.engines.wrapped_engine import WrappedEngine
from runner.options import Sampling
from runner.testing import ScriptedEngine, engine_under_test
from runner.testing.engine_under_test import PartialAnswer

TEXT = "A long answer, a letter at a tick."
RuntimeT = TypeVar("RuntimeT", bound=ScriptedRuntime)
MODES = [pytest.param(mode, id=mode.value) for mode in PauseMode]


def slow(**settings: Any) -> ScriptedEngine:
    return ScriptedEngine(TEXT, chunks=1, latency=Latency(between=1), record=True, **settings)


def runs_as(engine: ScriptedEngine, kind: type[RuntimeT]) -> RuntimeT:
    """Give an entered engine a runtime of this class."""
    runtime = engine.runtime
    runtime.__class__ = kind
    assert isinstance(runtime, kind)
    return runtime


class NotOurs(WrappedEngine):
    """An engine whose weights are not ours, like one that is used over a network."""

    @property
    def runtime(self) -> None:  # type: ignore[override]  # there is no runtime in this process
        return None


def request(name: str = "episode/main/0", **fields: Any) -> GenerationRequest:
    return GenerationRequest(name=name, prompt=[72, 105], sampling=Sampling.defaults(), **fields)


def saying(engine: Engine, wanted: GenerationRequest | None = None) -> AbstractAsyncContextManager[PartialAnswer]:
    return engine_under_test.running_request(engine, wanted or request())


async def ask(engine: Engine, wanted: GenerationRequest | None = None) -> tuple[list[int], Finish]:
    return await engine_under_test.complete(engine, wanted or request())


async def a_while(steps: int = 20) -> None:
    for _ in range(steps):
        await checkpoint()
