"""Event loops whose clock is paused until a test moves it forward: a time limit fires when the test lets it."""

from __future__ import annotations

from typing import Any, Final

from runner.testing import VirtualClock

__all__ = ["ASYNCIO", "TRIO", "put_forward"]

CLOCK: Final = VirtualClock(autojump=False)
ASYNCIO: Final[Any] = CLOCK.asyncio_backend
TRIO: Final[Any] = CLOCK.trio_backend


def put_forward(seconds: float) -> None:
    """Let `seconds` pass at once, on any event loop."""
    CLOCK.jump(seconds)
