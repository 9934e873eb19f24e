"""Event loops whose clocks a test can put forward, so that a time limit fires when the test says so."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import trio
import trio.lowlevel
from trio.testing import MockClock


class AdjustableLoop(asyncio.SelectorEventLoop):
    """An event loop that can be told that time has passed."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead


ASYNCIO: Any = ("asyncio", {"loop_factory": AdjustableLoop})


def trio_backend() -> Any:
    """Trio on a clock that stands still until it is put forward."""
    return ("trio", {"clock": MockClock()})


def put_forward(seconds: float) -> None:
    """Let `seconds` pass at once, on whatever loop this is."""
    if anyio.get_cancelled_exc_class() is trio.Cancelled:
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, MockClock)
        clock.jump(seconds)
        return
    loop = asyncio.get_running_loop()
    assert isinstance(loop, AdjustableLoop)
    loop.ahead += seconds
