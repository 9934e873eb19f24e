"""Event loops whose clock is paused until a test puts it forward: a time limit fires when the test says so."""

from __future__ import annotations

from typing import Any, Final

from runner.testing import VirtualClock

__all__ = ["ASYNCIO", "TRIO", "put_forward"]

CLOCK: Final = VirtualClock(autojump=False)
ASYNCIO: Final[Any] = CLOCK.asyncio_backend
TRIO: Final[Any] = CLOCK.trio_backend


def put_forward(seconds: float) -> None:
    """Let `seconds` pass at once, on whatever loop this is."""
    CLOCK.jump(seconds)
