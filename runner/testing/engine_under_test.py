"""How a promise of the contract of engines is played: on what, with which turns, and with nothing open afterwards.

A promise asks for nothing that only one kind of engine could do: greedy turns say the same each time they are asked,
and that is what they are compared with.
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

WATCHDOG_SECONDS: Final = 120.0  # seconds after which an engine that keeps a promise waiting has broken it
SHORT_TOKENS: Final = 12  # ids
LONG_TOKENS: Final = 32  # ids: what is asked of the engine meanwhile comes before the last of them
ENDLESS_TOKENS: Final = 900  # ids: nobody waits for the last of them


@dataclass
class EngineUnderTest:
    """An engine, entered, and what the promises must know of it."""

    engine: Engine
    """The engine. Greedy, it says the same each time, and goes on for 900 ids where no stop id ends its turn."""
    weights: Any = None
    """New weights that fit, with which the engine says the same; needed unless it refuses them."""
    adapter: Any = None
    """A LoRA adapter that fits; needed unless the engine refuses it."""
    refused: frozenset[str] = field(default=frozenset(), kw_only=True)
    """The calls of a trainer that this engine refuses, by name.

    Some of "pause", "keep" (that mode of it), "sleep", "update_weights", "add_adapter" and "remove_adapter".
    """
    settled: Callable[[], Awaitable[object]] | None = field(default=None, kw_only=True)
    """Returns when the engine's statistics know of all that was left; None where they are those of this moment."""
    round_trip: Callable[[], Awaitable[object]] | None = field(default=None, kw_only=True)
    """Asks the engine something and returns with its answer; None for its `health`."""
    prompt: Sequence[int] = field(default=range(60, 100), kw_only=True)
    """Ids that the engine's vocabulary has."""
    asked: int = field(default=0, kw_only=True)
    """How many requests were made."""

    def request(
        self,
        max_tokens: int = ENDLESS_TOKENS,
        *,
        prompt: Sequence[int] | None = None,
        adapter: str | None = None,
        **fields: Any,
    ) -> GenerationRequest:
        """A greedy turn of so many ids that come one at a time, unless a stop id ends it."""
        self.asked += 1
        return GenerationRequest(
            name=f"episode/main/{self.asked}",
            prompt=list(self.prompt if prompt is None else prompt),
            sampling=replace(Sampling.defaults(), max_tokens=max_tokens, temperature=0.0, adapter=adapter),
            acts_on_deltas=True,
            **fields,
        )

    async def sample(self, max_tokens: int) -> list[int]:
        """What a turn that nobody disturbs says."""
        return (await complete(self.engine, self.request(max_tokens)))[0]

    async def settle(self) -> None:
        """Return when what had left the engine was read, and it could have sampled more."""
        for _ in range(20):
            await (self.round_trip or self.engine.health)()
            await checkpoint()

    async def assert_nothing_open(self) -> None:
        """Nobody is inside the engine, nobody waits, and no conversation keeps room."""
        if self.settled is not None:
            with anyio.fail_after(WATCHDOG_SECONDS):
                await self.settled()
        stats = self.engine.stats()
        assert (stats.open, stats.waiting, stats.live_sessions) == (0, 0, 0)


ContractTest: TypeAlias = Callable[[Any, EngineUnderTest], Awaitable[None]]
RunContractTest: TypeAlias = Callable[[Callable[[EngineUnderTest], Awaitable[None]]], None]
"""Plays a function of the engine under test, on the event loop that the engine belongs to."""


def contract_test(
    promise: ContractTest, *, by: Mapping[str, Callable[[EngineUnderTest], Awaitable[object]]] | None = None
) -> Callable[[Any, RunContractTest], None]:
    """A test that an engine keeps a promise, and has nothing open afterwards.

    Args:
        promise: what is contract_test.
        by: the calls of a trainer that it takes; an engine that refuses one of them refuses it by its name instead, and
            goes on as it was.
    """

    async def main(test: Any, under_test: EngineUnderTest) -> None:
        refused = [call for name, call in (by or {}).items() if name in under_test.refused]
        with anyio.fail_after(WATCHDOG_SECONDS):
            for call in refused:
                await _assert_refused(under_test, call)
            if not refused:
                await promise(test, under_test)
        await under_test.assert_nothing_open()

    def test(self: Any, keep: RunContractTest) -> None:
        keep(functools.partial(main, self))

    test.__name__, test.__qualname__, test.__doc__ = promise.__name__, promise.__qualname__, promise.__doc__
    return test


def control_test(
    **calls: Callable[[EngineUnderTest], Awaitable[object]],
) -> Callable[[ContractTest], Callable[[Any, RunContractTest], None]]:
    """The same of a promise that takes these calls of a trainer."""
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
    """Read until `at` ids have come."""
    async for delta in stream:
        read.append(delta)
        if len(ids_of(read)) >= at:
            return


def ids_of(deltas: Sequence[Delta]) -> list[int]:
    """The ids of all of them."""
    return [token_id for delta in deltas for token_id in delta.token_ids]


def logprobs_of(deltas: Sequence[Delta]) -> list[float]:
    """The log-probabilities of all of them."""
    return [logprob for delta in deltas for logprob in delta.logprobs or ()]


async def wait_until(true: Callable[[], bool]) -> None:
    """Return when it is true."""
    while not true():
        await checkpoint()


@dataclass
class PartialAnswer:
    """What one request was answered so far."""

    ids: list[int]
    """The ids that were read."""
    finish: Finish | None = None
    """The end of the answer; None while it goes on."""


@asynccontextmanager
async def running_request(
    engine: Engine, wanted: GenerationRequest, *, at_least: int = 3
) -> AsyncIterator[PartialAnswer]:
    """A request of which so many ids were read; it goes on beside the block, and has ended after it."""
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
    """All that a request is answered, and how it ends."""
    async with engine.stream(wanted) as stream:
        ids = [token_id async for delta in stream for token_id in delta.token_ids]
    assert stream.finish is not None
    return ids, stream.finish
