"""The way back to a client: what is written to it, whether it is still there, and whether it reads."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import anyio

__all__ = ["ClientGone", "Line", "Send"]

Send = Callable[[dict[str, Any]], Awaitable[None]]
"""Sends a message of ASGI."""

READ_SECONDS: Final = 60.0
"""Seconds in which a client has to read what was written; one that does not is left."""


class ClientGone(Exception):
    """The client has gone away."""


class Line:
    """The way back to a client, for one answer."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._ready = anyio.Event()
        self._sending: float | None = None
        self.gone = False
        """Whether the client has gone away."""
        self.begun = False
        """Whether the head of the answer was sent."""
        self.written = 0.0
        """When something was last written, by the monotonic clock; 0 before the first time."""

    async def begin(self, headers: Sequence[tuple[bytes, bytes]], status: int = 200) -> None:
        """Send the head of the answer, unless that was done."""
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": status, "headers": [*headers]})
            self._ready.set()

    async def write(self, body: bytes, *, more: bool = True) -> None:
        """Send a part of the answer, and with `more=False` its last one.

        Raises:
            ClientGone: the client has gone away.
        """
        if not self._ready.is_set():
            await self._ready.wait()
        self.written = self._sending = time.monotonic()
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._sending = None
        if self.gone:  # a server sends nothing to one who has gone, and says nothing
            raise ClientGone

    async def leave_if_unread(self, scope: anyio.CancelScope) -> None:
        """Cancel the answering of a client that does not read what was written to it."""
        # Looked at now and then: a timer for every write would cost more than the write.
        while self._sending is None or time.monotonic() - self._sending < READ_SECONDS:  # noqa: ASYNC110  # see above
            await anyio.sleep(READ_SECONDS / 4)
        self.gone = True
        scope.cancel()
