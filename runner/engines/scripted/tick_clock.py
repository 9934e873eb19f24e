"""Virtual time of a scripted engine: one task delivers the items of each tick."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

import anyio
from anyio.lowlevel import checkpoint

__all__ = ["BATCH_SIZE", "TickClock"]

ItemT = TypeVar("ItemT")

BATCH_SIZE: Final = 128
"""Deliveries between two yields to the event loop, as many as in vLLM's own output loop."""


class TickClock(Generic[ItemT]):
    """Clock that delivers items at their tick, without a timer or task per item.

    Args:
        deliver: called with each item that is due; returns the ticks until it is due again, at least 1, or None.
        seconds: seconds of a tick. At 0 a tick is one yield to the event loop, without sleep. A tick whose deliveries
            take longer delays the next one; none is skipped.
    """

    def __init__(self, deliver: Callable[[ItemT], int | None], *, seconds: float = 0.0) -> None:
        self.now = 0
        """Current tick; paused while no item is scheduled."""
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
        """Deliver until cancelled."""
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
