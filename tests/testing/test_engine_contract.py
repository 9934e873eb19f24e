"""The contract as an engine's author uses it: an engine that keeps it passes, and one that breaks a promise fails."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import anyio
import pytest

from runner.engines.base import Delta, DeltaStream, Engine, EngineStats, GenerationRequest
from runner.engines.wrapped_engine import WrappedEngine
from runner.errors import EngineError
from runner.testing import Latency, ScriptedEngine
from runner.testing.engine_contract import EngineContract, EngineUnderTest
from tests.engines.contract import TEXT


class TestScripted(EngineContract):
    """An author's engine with the methods that a trainer calls."""

    backend = "trio"

    @pytest.fixture
    def engine(self) -> Engine:
        return ScriptedEngine(TEXT, places=2, latency=Latency(between=1))

    def under_test(self, engine: Engine) -> EngineUnderTest:
        return EngineUnderTest(engine, "any folder", "any folder")


def test_the_suite_has_the_promises_of_streams_and_of_control() -> None:
    promises = [name for name in dir(EngineContract) if name.startswith("test_")]
    assert len(promises) > 20
    assert {name for name in promises if "adapter" in name or "pause" in name}


# --- engines that break a promise


class Changed(WrappedEngine):
    """An engine whose streams are changed by `change`."""

    def __init__(self, inner: Engine, change: Callable[[Any], None]) -> None:
        super().__init__(inner)
        self._change = change

    def stream(self, request: GenerationRequest) -> DeltaStream:
        stream = super().stream(request)
        self._change(stream)
        return stream


def forgets_what_was_drained(stream: Any) -> None:
    leave = stream.__class__.__aexit__

    class Forgetful(stream.__class__):  # type: ignore[misc]  # a stream of any class
        async def __aexit__(self, *raised: Any) -> None:
            await leave(self, *raised)
            self.rest: list[Delta] = []

    stream.__class__ = Forgetful


def never_leaves(stream: Any) -> None:
    class Stuck(stream.__class__):  # type: ignore[misc]  # a stream of any class
        async def __aexit__(self, *raised: Any) -> None:
            self.finish = None

    stream.__class__ = Stuck


def says_no_probabilities(stream: Any) -> None:
    read = stream.__class__.__anext__

    class Silent(stream.__class__):  # type: ignore[misc]  # a stream of any class
        async def __anext__(self) -> Delta:
            delta: Delta = await read(self)
            return replace(delta, logprobs=None)

    stream.__class__ = Silent


class Miscounting(WrappedEngine):
    """An engine that returns a finish for every request at once."""

    def stats(self) -> EngineStats:
        return replace(super().stats(), sampled_tokens=0)


BROKEN: dict[str, tuple[Callable[[Engine], Engine], str]] = {
    "forgets what was drained": (
        lambda engine: Changed(engine, forgets_what_was_drained),
        "test_every_exit_closes_the_request_and_keeps_all_ids",
    ),
    "leaves requests open": (
        lambda engine: Changed(engine, never_leaves),
        "test_exit_before_reading_ends_the_request",
    ),
    "returns no log-probabilities": (
        lambda engine: Changed(engine, says_no_probabilities),
        "test_last_delta_has_the_finish",
    ),
    "counts no ids": (
        Miscounting,
        "test_every_exit_closes_the_request_and_keeps_all_ids",
    ),
}


def plays(engine: Engine) -> Callable[[Callable[[EngineUnderTest], Awaitable[None]]], None]:
    async def main(promise: Callable[[EngineUnderTest], Awaitable[None]]) -> None:
        async with engine:
            await promise(EngineUnderTest(engine, "any folder", "any folder"))

    return lambda promise: anyio.run(main, promise)


@pytest.mark.parametrize(("breaks", "promise"), BROKEN.values(), ids=BROKEN)
def test_a_promise_that_is_broken_fails_by_its_name(breaks: Callable[[Engine], Engine], promise: str) -> None:
    kept, broken = (ScriptedEngine(TEXT, places=2, latency=Latency(between=1)) for _ in range(2))
    test = getattr(EngineContract(), promise)
    test(plays(kept))
    with pytest.raises((AssertionError, EngineError)):
        test(plays(breaks(broken)))


def test_contract_class_without_an_engine_fixture_names_the_fix() -> None:
    with pytest.raises(NotImplementedError, match="needs a fixture `engine` that returns your engine"):
        EngineContract.engine.__wrapped__(EngineContract())  # type: ignore[attr-defined]  # pytest sets this attribute
