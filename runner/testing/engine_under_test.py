"""Helpers for the tests of the engine contract: the engine under test, decorators, and readers of streams.

The tests need nothing that only one kind of engine has. Greedy turns must have the same ids each time: tests compare a
disturbed turn with the same turn without a disturbance.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import anyio
import pytest
from anyio.lowlevel import checkpoint

from runner.engines.base import Delta, DeltaStream, Engine, Finish, GenerationRequest
from runner.engines.state import EngineState
from runner.errors import BadControl
from runner.options import Sampling

__all__ = [
    "ENDLESS_TOKENS",
    "LONG_TOKENS",
    "SHORT_TOKENS",
    "EngineUnderTest",
    "PartialAnswer",
    "RunContractTest",
    "complete",
    "contract_test",
    "control_test",
    "drain",
    "ids_of",
    "logprobs_of",
    "running_request",
    "wait_until",
]

WATCHDOG_SECONDS: Final = 120.0
"""Time limit of a test."""
SHORT_TOKENS: Final = 12
LONG_TOKENS: Final = 32
"""Length of turns that are long enough for a call to the engine before they end."""
ENDLESS_TOKENS: Final = 900
"""Length of turns whose end no test waits for."""


@dataclass
class EngineUnderTest:
    """An entered engine, with facts that the tests need."""

    engine: Engine
    """The engine. A greedy turn has the same ids each time; without a stop id it has at least 900."""
    weights: Any = None
    """New weights that fit and sample the same ids; needed unless the engine refuses them."""
    adapter: Any = None
    """A LoRA adapter that fits; needed unless the engine refuses it."""
    refused: frozenset[str] = field(default=frozenset(), kw_only=True)
    """Names of a trainer's calls that this engine refuses.

    Possible names: "pause", "keep" (a mode of pause), "sleep", "update_weights", "add_adapter" and "remove_adapter".
    """
    settled: Callable[[], Awaitable[object]] | None = field(default=None, kw_only=True)
    """A function that returns once the engine's statistics are current; None if they are always current."""
    round_trip: Callable[[], Awaitable[object]] | None = field(default=None, kw_only=True)
    """A function that sends a request to the engine and waits for the answer; if None, `health` is used."""
    prompt: Sequence[int] = field(default=range(60, 100), kw_only=True)
    """The ids of a prompt, from the engine's vocabulary."""
    asked: int = field(default=0, kw_only=True)
    """Number of requests so far."""

    def request(
        self,
        max_tokens: int = ENDLESS_TOKENS,
        *,
        prompt: Sequence[int] | None = None,
        adapter: str | None = None,
        **fields: Any,
    ) -> GenerationRequest:
        """A request for a greedy turn of `max_tokens` ids, one per delta, unless a stop id ends the turn."""
        self.asked += 1
        return GenerationRequest(
            name=f"episode/main/{self.asked}",
            prompt=list(self.prompt if prompt is None else prompt),
            sampling=replace(Sampling.defaults(), max_tokens=max_tokens, temperature=0.0, adapter=adapter),
            acts_on_deltas=True,
            **fields,
        )

    async def sample(self, max_tokens: int) -> list[int]:
        """The ids of an undisturbed turn."""
        return (await complete(self.engine, self.request(max_tokens)))[0]

    async def settle(self) -> None:
        """Return after the engine's output was read and the engine had time to sample more."""
        for _ in range(20):
            await (self.round_trip or self.engine.health)()
            await checkpoint()

    async def assert_nothing_open(self) -> None:
        """Assert that no request is open or waiting, and no session is live."""
        if self.settled is not None:
            with anyio.fail_after(WATCHDOG_SECONDS):
                await self.settled()
        stats = self.engine.stats()
        assert (stats.open, stats.waiting, stats.live_sessions) == (0, 0, 0)


ContractTest: TypeAlias = Callable[[Any, EngineUnderTest], Awaitable[None]]
RunContractTest: TypeAlias = Callable[[Callable[[EngineUnderTest], Awaitable[None]]], None]
"""A function that runs a test on the event loop of the engine under test."""


def contract_test(
    function: ContractTest, *, by: Mapping[str, Callable[[EngineUnderTest], Awaitable[object]]] | None = None
) -> Callable[[Any, RunContractTest], None]:
    """Decorate a test of the contract. After the test, no request or session may be open.

    Args:
        function: the test.
        by: the calls of a trainer that the test needs, by name. If the engine refuses one of these calls, the test
            checks the refusal instead.
    """

    async def main(test: Any, under_test: EngineUnderTest) -> None:
        refused = [call for name, call in (by or {}).items() if name in under_test.refused]
        with anyio.fail_after(WATCHDOG_SECONDS):
            for call in refused:
                await _assert_refused(under_test, call)
            if not refused:
                await function(test, under_test)
        await under_test.assert_nothing_open()

    def test(self: Any, run_test: RunContractTest) -> None:
        run_test(functools.partial(main, self))

    test.__name__, test.__qualname__, test.__doc__ = function.__name__, function.__qualname__, function.__doc__
    return test


def control_test(
    **calls: Callable[[EngineUnderTest], Awaitable[object]],
) -> Callable[[ContractTest], Callable[[Any, RunContractTest], None]]:
    """Decorate a test of the contract that needs these calls of a trainer."""
    return functools.partial(contract_test, by=calls)


async def _assert_refused(under_test: EngineUnderTest, call: Callable[[EngineUnderTest], Awaitable[object]]) -> None:
    engine = under_test.engine
    undisturbed = await under_test.sample(SHORT_TOKENS)
    with pytest.raises(BadControl):
        await call(under_test)
    assert engine.state is EngineState.RUNNING
    assert await under_test.sample(SHORT_TOKENS) == undisturbed


# --- reading


async def drain(stream: DeltaStream, read: list[Delta], at: int = 10**9) -> None:
    """Append the deltas of a stream to `read`, until `read` has at least `at` ids or the stream ends."""
    async for delta in stream:
        read.append(delta)
        if len(ids_of(read)) >= at:
            return


def ids_of(deltas: Sequence[Delta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def logprobs_of(deltas: Sequence[Delta]) -> list[float]:
    """The log-probabilities of all deltas."""
    return [logprob for delta in deltas for logprob in delta.logprobs or ()]


async def wait_until(true: Callable[[], bool]) -> None:
    """Return when the condition is true."""
    while not true():
        await checkpoint()


@dataclass
class PartialAnswer:
    """The answer to a request so far."""

    ids: list[int]
    """Ids read so far."""
    finish: Finish | None = None
    """The finish; None before the end."""


@asynccontextmanager
async def running_request(
    engine: Engine, wanted: GenerationRequest, *, at_least: int = 3
) -> AsyncIterator[PartialAnswer]:
    """Run a request during the block, which begins after `at_least` ids; then wait until the request ends."""
    said = PartialAnswer([])
    begun = anyio.Event()

    async def read() -> None:
        async with engine.stream(wanted) as stream:
            async for delta in stream:
                said.ids += delta.token_ids
                if len(said.ids) >= at_least:
                    begun.set()
        said.finish = stream.finish

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        await begun.wait()
        yield said


async def complete(engine: Engine, wanted: GenerationRequest) -> tuple[list[int], Finish]:
    """Return the ids and the finish of a request."""
    async with engine.stream(wanted) as stream:
        ids = [token_id async for delta in stream for token_id in delta.token_ids]
    assert stream.finish is not None
    return ids, stream.finish
