"""The contract of engines as tests: the author of an engine subclasses `EngineContract`."""

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
    """Tests that an engine keeps the contract of `Engine`.

    class TestMyEngine(EngineContract):
        @pytest.fixture
        def engine(self):
            return MyEngine(...)

    There are more than twenty tests, and each enters its own engine. They cover the deltas of a turn and its finish,
    every way to leave a turn, cancellation at every point, requests that wait for a place, sessions, and calls of a
    trainer.

    The engine must have a context of at least 1,000 ids and at least two places, and return one id per delta if a
    request acts on deltas. An engine that does not support a call of a trainer lists it in `under_test`; the tests then
    check that the call raises `BadControl` and changes nothing.
    """

    backend: ClassVar[str] = "asyncio"
    """The event loop: "asyncio" or "trio"."""

    @pytest.fixture
    def engine(self) -> Engine:
        """The engine, not entered; a subclass must override this fixture.

        Raises:
            NotImplementedError: the subclass does not override it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} needs a fixture `engine` that returns your engine, not entered"
        )

    def under_test(self, engine: Engine) -> EngineUnderTest:
        """Facts about the entered engine that the tests need. A subclass overrides this if the defaults are wrong."""
        return EngineUnderTest(engine)

    def running(self, engine: Engine) -> AbstractAsyncContextManager[EngineUnderTest]:
        """Run the engine. A subclass overrides this method if its engine needs something that must be started."""
        return self._entered(engine)

    @asynccontextmanager
    async def _entered(self, engine: Engine) -> AsyncIterator[EngineUnderTest]:
        async with engine:
            yield self.under_test(engine)

    @pytest.fixture
    def run_test(self, engine: Engine) -> RunContractTest:
        """A function that runs a test on a new event loop."""

        async def main(test: Callable[[EngineUnderTest], Awaitable[None]]) -> None:
            async with self.running(engine) as under_test:
                await test(under_test)

        return lambda test: anyio.run(main, test, backend=self.backend)
