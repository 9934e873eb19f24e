"""Runtime of a scripted engine: virtual time, requests in flight, and control by the trainer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

import anyio
from anyio.lowlevel import checkpoint

from runner.engines.adapters import Adapters
from runner.engines.gate import AdmissionGate
from runner.engines.proofs import ScoredPass, ScoresByPass
from runner.engines.runtime import ModelRuntime, OpenRequest
from runner.engines.scripted.delivery_plan import DeliveryPlanner
from runner.engines.state import NOT_RUNNING, PauseMode
from runner.engines.transfers import RelayedTransfer, TransferStep
from runner.errors import BadControl, EngineDead

__all__ = ["ScriptedRequest", "ScriptedRuntime"]


ItemT = TypeVar("ItemT")

BATCH_SIZE: Final = 128
"""Deliveries between two yields to the event loop, as many as in vLLM's own output loop."""


class TickClock(Generic[ItemT]):
    """Clock that delivers items at their tick, without a timer or task per item.

    Args:
        deliver: function that is called with each item that is due. It returns the ticks until the item is due again,
            at least 1, or None if the item is never due again.
        seconds: seconds of a tick. At 0 a tick is one yield to the event loop, without sleep. A tick whose deliveries
            take longer delays the next one; none is skipped.
    """

    def __init__(self, deliver: Callable[[ItemT], int | None], *, seconds: float = 0.0) -> None:
        self.now = 0
        """Number of the current tick. It stays the same while no item is scheduled, or while the clock is paused."""
        self._deliver = deliver
        self._seconds = seconds
        self._due: dict[int, list[ItemT]] = {}
        self._idle: anyio.Event | None = None
        self._held: anyio.Event | None = None

    def schedule(self, item: ItemT, ticks: int) -> None:
        """Deliver `item` after this number of ticks, at least 1."""
        tick = self.now + ticks
        due = self._due.get(tick)
        if due is None:
            self._due[tick] = [item]
        else:
            due.append(item)
        if self._idle is not None:
            self._idle.set()
            self._idle = None

    def hold(self) -> None:
        """Pause the clock until `release`."""
        self._held = self._held or anyio.Event()

    def release(self) -> None:
        """Resume the clock."""
        if self._held is not None:
            self._held.set()
            self._held = None

    async def run(self) -> None:
        """Deliver the scheduled items until cancelled."""
        next_tick = 0.0
        while True:
            while not self._due or self._held is not None:
                if self._held is not None:
                    await self._held.wait()
                else:
                    self._idle = anyio.Event()
                    await self._idle.wait()
                next_tick = anyio.current_time()
            if self._seconds:
                next_tick = max(next_tick + self._seconds, anyio.current_time())
                await anyio.sleep_until(next_tick)
            else:
                await checkpoint()
            self.now += 1
            await self._deliver_due(self._due.pop(self.now, ()))

    async def _deliver_due(self, items: list[ItemT] | tuple[()]) -> None:
        for count, item in enumerate(items, 1):
            ticks = self._deliver(item)
            if ticks is not None:
                self.schedule(item, ticks)
            if count % BATCH_SIZE == 0:
                await checkpoint()


class ScriptedRequest(OpenRequest, Protocol):
    """Methods of a request's stream that this runtime needs."""

    def advance(self) -> int | None: ...
    def cut(self) -> None: ...
    def fail(self, error: EngineDead) -> None: ...


class _DiscardingReceiver:
    """Receiver that discards all weights."""

    async def meet(self, init: Mapping[str, Any]) -> None: ...

    async def step(self, step: TransferStep, part: Any = None) -> None: ...


class ScriptedRuntime(ModelRuntime[ScriptedRequest]):
    """State of a scripted engine. A request is in `requests` until its last id was sent or it is cut.

    The engine has no weights: it accepts anything as new weights, and only changes the version.
    """

    def __init__(
        self,
        gate: AdmissionGate,
        planner: DeliveryPlanner,
        adapters: Adapters,
        *,
        context: int,
        tick: float,
        version: str,
    ) -> None:
        super().__init__(gate, adapters, context=context, version=version)
        self.planner = planner
        self.tick_clock: TickClock[ScriptedRequest] = TickClock(self._deliver, seconds=tick)
        """Virtual time of the engine."""
        self.admitted = 0
        """Number of requests that reached the model."""
        self._running = False
        self._death = ""
        self._cause: Exception | None = None
        self._all_sent: anyio.Event | None = None

    # --- one request

    def close(self, request: ScriptedRequest) -> None:
        """Remove a request whose last id was sent, or that ended early; idempotent."""
        super().close(request)
        if not self.requests and self._all_sent is not None:
            self._all_sent.set()
            self._all_sent = None

    def _deliver(self, request: ScriptedRequest) -> int | None:
        return request.advance() if request in self.requests else None

    # --- control by the trainer

    async def pause(self, mode: PauseMode) -> None:
        while mode is PauseMode.WAIT and self.requests:
            self._all_sent = self._all_sent or anyio.Event()
            await self._all_sent.wait()
        if mode is PauseMode.ABORT:
            self._cut_all()
        self.tick_clock.hold()

    async def resume(self) -> None:
        self.tick_clock.release()

    async def check_weights(self, given: Any) -> Any:
        """Return the weights unchecked."""
        return given

    async def load_weights(self, checked: Any, version: str) -> None:
        """Discard the weights; a relayed transfer is received to its end."""
        if isinstance(checked, RelayedTransfer):
            await checked.receive(_DiscardingReceiver())

    async def score_while_paused(self, ids: Sequence[int]) -> ScoresByPass:
        return {ScoredPass(): self.planner.scored(ids)}

    def ended_by(self, why: str) -> EngineDead:
        self.die(why)
        return self.dead()

    async def reset_prefix_cache(self) -> None:
        """Do nothing, since there is no prefix cache."""

    async def sleep(self, level: int) -> None:
        # No memory is released, but paused turns are cut, as in a real engine.
        self._cut_all()

    async def wake(self, tags: Collection[str]) -> None:
        """Do nothing, since no memory was released."""

    async def profile(self, *, on: bool) -> None:
        raise BadControl("a scripted engine has no profiler: profile a VllmEngine.")

    def _cut_all(self) -> None:
        for request in tuple(self.requests):  # a cut removes the request
            request.cut()

    # --- life cycle

    def start(self) -> None:
        self._running = True

    def stop(self) -> None:
        """Admit no more requests. Requests in the engine and at the gate fail."""
        self._running = False
        self._fail("The engine was closed.", None)

    def is_alive(self) -> bool:
        return self._running and not self._death

    def require_alive(self) -> None:
        if not self.is_alive():
            raise self.dead()

    def die(self, message: str) -> None:
        """Fail all requests in flight and at the gate, and all later ones, with one cause."""
        self._fail(f"The engine died: {message}", RuntimeError(message))

    def dead(self) -> EngineDead:
        """Return the error for one request of an engine that is not alive."""
        error = EngineDead(self._death or NOT_RUNNING)
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
