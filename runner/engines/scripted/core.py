"""A scripted engine while it runs: its gate, its virtual time, and the requests that are inside."""

from __future__ import annotations

from typing import Protocol

import anyio

from runner.engines.adapters import Adapters
from runner.engines.base import GenerationRequest
from runner.engines.core import EngineCore
from runner.engines.gate import AdmissionGate
from runner.engines.scripted.delivery import Planner
from runner.engines.scripted.ticker import Ticker
from runner.errors import EngineDead

__all__ = ["OpenRequest", "ScriptedCore"]


class OpenRequest(Protocol):
    """What the core asks of the stream of a request."""

    def advance(self) -> int | None: ...
    def stamp(self, version: str) -> None: ...
    def cut(self) -> None: ...
    def fail(self, error: EngineDead) -> None: ...


class ScriptedCore(EngineCore[OpenRequest]):
    """What a scripted engine, its streams and its driver share; a request is inside until it was sent its last id."""

    def __init__(
        self, gate: AdmissionGate, planner: Planner, adapters: Adapters, *, context: int, tick: float, version: str
    ) -> None:
        super().__init__(gate, adapters, context=context, versions=[version])
        self.planner = planner
        self.ticker: Ticker[OpenRequest] = Ticker(self._deliver, seconds=tick)
        """The engine's virtual time."""
        self.admitted = 0
        """How many requests were asked of the model."""
        self._running = False
        self._death = ""
        self._cause: Exception | None = None
        self._all_sent: anyio.Event | None = None

    # --- one request

    def check(self, request: GenerationRequest) -> None:
        """Refuse a request at once where the engine is not alive, or would refuse it."""
        if not self.is_alive():
            raise self.dead()
        super().check(request)

    def close(self, request: OpenRequest) -> None:
        """Take note that a request was sent its last id, or is over; twice is allowed."""
        super().close(request)
        if not self.requests and self._all_sent is not None:
            self._all_sent.set()
            self._all_sent = None

    def _deliver(self, request: OpenRequest) -> int | None:
        return request.advance() if request in self.requests else None

    # --- all requests

    async def until_sent(self) -> None:
        """Return when every request inside was sent its last id."""
        while self.requests:
            self._all_sent = self._all_sent or anyio.Event()
            await self._all_sent.wait()

    def cut(self) -> None:
        """End every request for the trainer."""
        for request in tuple(self.requests):
            request.cut()

    # --- its life

    def start(self) -> None:
        """Admit requests from now on."""
        self._running = True

    def stop(self) -> None:
        """Admit none any more, and fail those that are inside or wait."""
        self._running = False
        self._fail("The engine was closed.", None)

    def is_alive(self) -> bool:
        """Whether requests are admitted."""
        return self._running and not self._death

    def die(self, message: str) -> None:
        """Fail every request in flight and at the gate, and every later one, with one cause."""
        self._fail(f"The engine died: {message}", RuntimeError(message))

    def dead(self) -> EngineDead:
        """The error for one request of an engine that is not alive."""
        error = EngineDead(self._death or "The engine is not running: use it as `async with engine`.")
        error.__cause__ = self._cause
        return error

    def _fail(self, death: str, cause: Exception | None) -> None:
        if self._death:
            return
        self._death, self._cause = death, cause
        self.gate.fail(self.dead)
        for request in tuple(self.requests):
            request.fail(self.dead())
            self.close(request)
