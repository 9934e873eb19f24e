"""The way back to a client: what is written to it, whether it is still there, and whether it reads."""

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
"""Seconds in which a client has to read what was written; one that does not is left."""


class ClientGone(Exception):
    """The client has gone away."""


class ClientConnection:
    """The way back to a client, for one answer; one task writes at a time."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._sending: float | None = None
        self._looking: asyncio.TimerHandle
        self.gone = False
        """Whether the client has gone away."""
        self.begun = False
        """Whether the head of the answer was sent."""
        self.over = False
        """Whether its last part was."""
        self.written = 0.0
        """When something was last written, by the monotonic clock; 0 before the first time."""

    async def begin(self, headers: Sequence[tuple[bytes, bytes]], status: int = 200) -> None:
        """Send the head of the answer, unless that was done."""
        if not self.begun:
            self.begun = True
            await self._sent({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, body: bytes, *, more: bool = True) -> None:
        """Send a part of the answer, and with `more=False` its last one.

        Raises:
            ClientGone: the client has gone away.
        """
        await self._sent({"type": "http.response.body", "body": body, "more_body": more})
        self.written, self.over = time.monotonic(), not more
        if self.gone:  # a server sends nothing to one who has gone, and says nothing
            raise ClientGone

    @contextmanager
    def left_if_unread(self, scope: anyio.CancelScope) -> Iterator[None]:
        """A block in which a scope is cancelled once the client does not read what was written to it."""
        loop = asyncio.get_running_loop()

        def look() -> None:
            if self._sending is not None and time.monotonic() - self._sending >= CLIENT_READ_SECONDS:
                self.gone = True
                scope.cancel()
            # Looked at now and then, by no task: either would cost more than the writes.
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
