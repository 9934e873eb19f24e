"""The connection to a client for one answer: writes, and detects clients that disconnect or do not read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import anyio

__all__ = ["ClientConnection", "ClientGone", "Send"]

Send = Callable[[dict[str, Any]], Awaitable[None]]
"""Sends a message of ASGI."""

CLIENT_READ_SECONDS: Final = 60.0
"""Longest time for a client to read written data, before its answer is cut."""


class ClientGone(Exception):
    """The client has disconnected."""


class ClientConnection:
    """The connection to a client, for one answer. One task writes at a time."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._sending: float | None = None
        self._looking: asyncio.TimerHandle
        self.gone = False
        """True if the client has disconnected."""
        self.begun = False
        """True if the head of the answer was sent."""
        self.over = False
        """True if its last part was sent."""
        self.written = 0.0
        """Time of the last write, by the monotonic clock; 0 before the first."""

    async def begin(self, headers: Sequence[tuple[bytes, bytes]], status: int = 200) -> None:
        """Send the head of the answer, once."""
        if not self.begun:
            self.begun = True
            await self._sent({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, body: bytes, *, more: bool = True) -> None:
        """Send a part of the answer; with `more=False` the last one.

        Raises:
            ClientGone: the client has disconnected.
        """
        await self._sent({"type": "http.response.body", "body": body, "more_body": more})
        self.written, self.over = time.monotonic(), not more
        if self.gone:  # a server drops data for a client that has disconnected, without an error
            raise ClientGone

    @contextmanager
    def left_if_unread(self, scope: anyio.CancelScope) -> Iterator[None]:
        """Return a block that is cancelled once the client does not read what was written."""
        loop = asyncio.get_running_loop()

        def look() -> None:
            if self._sending is not None and time.monotonic() - self._sending >= CLIENT_READ_SECONDS:
                self.gone = True
                scope.cancel()
            # A timer that fires now and then, not a task or a timer for each write: these would cost more than the
            # writes.
            self._looking = loop.call_later(CLIENT_READ_SECONDS / 4, look)

        look()
        try:
            yield
        finally:
            self._looking.cancel()

    async def _sent(self, message: dict[str, Any]) -> None:
        self._sending = time.monotonic()
        await self._send(message)
        self._sending = None
