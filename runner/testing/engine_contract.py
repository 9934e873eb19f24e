"""The contract of engines as tests: whoever writes an engine subclasses a class, and pytest plays every promise."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import ClassVar

import anyio
import pytest

from runner.engines.base import Engine
from runner.testing.control_contract import ControlContract
from runner.testing.engine_under_test import EngineUnderTest, RunContractTest
from runner.testing.stream_contract import StreamContract

__all__ = ["EngineContract", "EngineUnderTest"]


class EngineContract(StreamContract, ControlContract):
    """Tests that an engine does what the runner expects of every engine.

    class TestMyEngine(EngineContract):
        @pytest.fixture
        def engine(self):
            return MyEngine(...)

    Some thirty tests are played, each on an engine of its own that the test enters: a turn's deltas and its finish,
    every way to leave a turn, cancellation at every point, requests that wait for a place, sessions, and what a trainer
    asks. The engine has a context of 1,000 ids at least, two places or more, and says one id at a time where somebody
    acts on single deltas. An engine that refuses what a trainer asks says so in `under_test`, and is tested to refuse
    it with `BadControl` and to go on.
    """

    backend: ClassVar[str] = "asyncio"
    """The event loop: "asyncio" or "trio"."""

    @pytest.fixture
    def engine(self) -> Engine:
        """The engine, not entered; a subclass gives it."""
        raise NotImplementedError(
            f"{type(self).__name__} needs a fixture `engine` that returns your engine, not entered"
        )

    def under_test(self, engine: Engine) -> EngineUnderTest:
        """What the promises must know of the engine, once it is entered; a subclass says what is different."""
        return EngineUnderTest(engine)

    def running(self, engine: Engine) -> AbstractAsyncContextManager[EngineUnderTest]:
        """The engine while it runs; a subclass starts here what its engine needs besides."""
        return self._entered(engine)

    @asynccontextmanager
    async def _entered(self, engine: Engine) -> AsyncIterator[EngineUnderTest]:
        async with engine:
            yield self.under_test(engine)

    @pytest.fixture
    def keep(self, engine: Engine) -> RunContractTest:
        """Plays a promise, on an event loop of its own."""

        async def main(promise: Callable[[EngineUnderTest], Awaitable[None]]) -> None:
            async with self.running(engine) as under_test:
                await promise(under_test)

        return lambda promise: anyio.run(main, promise, backend=self.backend)
