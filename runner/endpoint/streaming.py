"""The answer to one request: a stream of events while the turn is sampled, or one piece at the turn's end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import anyio
import orjson

from runner.endpoint.episode_route import EpisodeRoute
from runner.endpoint.refusals import Reason, Refused, ended, refusal_of
from runner.endpoint.wire_form import Answered, AnswerWriter, Restarted, WireForm, WireRequest
from runner.logs import logger_for
from runner.trajectory import Turn
from runner.turn_events import IdsSampled, TurnProgress

__all__ = ["ClientConnection", "ClientGone", "Send", "answer", "send_json", "send_refusal", "until_gone"]

log = logger_for("endpoint")

Send = Callable[[dict[str, Any]], Awaitable[None]]
"""Function that sends a message of ASGI."""

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
        """True if the last part of the answer was sent."""
        self.written = 0.0
        """Time of the last write, by the monotonic clock; 0 before the first."""

    async def begin(self, headers: Sequence[tuple[bytes, bytes]], status: int = 200) -> None:
        """Send the head of the answer, once."""
        if not self.begun:
            self.begun = True
            await self._sent({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, body: bytes, *, more: bool = True) -> None:
        """Send a part of the answer. Give `more=False` with the last part.

        Raises:
            ClientGone: the client has disconnected.
        """
        await self._sent({"type": "http.response.body", "body": body, "more_body": more})
        self.written, self.over = time.monotonic(), not more
        if self.gone:  # a server silently drops data for a client that has disconnected
            raise ClientGone

    @contextmanager
    def left_if_unread(self, scope: anyio.CancelScope) -> Iterator[None]:
        """Cancel the scope if, while the block runs, the client does not read data for `CLIENT_READ_SECONDS`."""
        loop = asyncio.get_running_loop()

        def look() -> None:
            if self._sending is not None and time.monotonic() - self._sending >= CLIENT_READ_SECONDS:
                self.gone = True
                scope.cancel()
            # One timer repeats, since a task or a timer for each write would take longer than the write.
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


WRITE_INTERVAL_SECONDS: Final = 0.02
"""Interval between writes of a stream. The first and the last write are immediate."""

FIRST_BYTE_SECONDS: Final = 2.0
"""Time after which a waiting client receives the head of its answer. A refusal before that has its own status."""

KEEP_ALIVE_SECONDS: Final = 10.0
"""Time without data after which a stream sends a comment to keep the connection alive."""

STREAM_HEADERS: Final[Sequence[tuple[bytes, bytes]]] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
)


async def answer(
    form: WireForm, request: WireRequest, route: EpisodeRoute, receive: Callable[[], Awaitable[Any]], send: Send
) -> None:
    """Answer a request, or send a refusal. A client that disconnects cuts the turn.

    If a stream cannot continue, the server closes the connection, and the client retries.
    """
    connection = ClientConnection(send)
    writer = form.writer(request, route.model, route.handler.text_of)
    answered = _streamed if request.stream else _whole
    error: Exception | None = ended()  # the error if the answer is cut while the client is still connected
    async with anyio.create_task_group() as group:
        scope = group.cancel_scope
        with route.cutting(scope), connection.left_if_unread(scope):
            group.start_soon(until_gone, receive, connection, scope)
            try:
                await answered(connection, writer, request, route)
                error = None
            except Exception as raised:  # a task group would wrap the error
                error = raised
                scope.cancel()
    if connection.gone:
        log.info("a client disconnected before its answer was complete; its turn is cut")
    elif error is not None and not isinstance(error, ClientGone | Restarted):
        await _refuse(connection, form, writer, route, error)


async def until_gone(
    receive: Callable[[], Awaitable[Any]], connection: ClientConnection, scope: anyio.CancelScope
) -> None:
    """Wait until the client disconnects, and cancel the scope of an unfinished answer."""
    while (await receive())["type"] != "http.disconnect":
        pass
    # A server also sends this event after the answer, so this task ends by itself. Cancelling it would take longer.
    if not connection.over:
        connection.gone = True
        scope.cancel()


async def _whole(connection: ClientConnection, writer: AnswerWriter, request: WireRequest, route: EpisodeRoute) -> None:
    async def deliver(turn: Turn, continued: Turn | None) -> None:
        body = writer.whole(Answered.of(turn, continued))
        await connection.begin(_json_headers(body))
        await connection.write(body, more=False)

    await route.handler.ask(request.chat_call, deliver=deliver)


async def _streamed(
    connection: ClientConnection, writer: AnswerWriter, request: WireRequest, route: EpisodeRoute
) -> None:
    events = _Events(connection, writer)

    async def deliver(turn: Turn, continued: Turn | None) -> None:
        rest = events.taken() + writer.end(Answered.of(turn, continued))
        await connection.begin(STREAM_HEADERS)
        await connection.write(rest, more=False)

    try:
        await route.handler.ask(request.chat_call, sink=events, deliver=deliver)
    except Exception:
        if not connection.gone and (rest := events.taken()):
            await connection.begin(STREAM_HEADERS)
            await connection.write(rest)
        raise


class _Events:
    """A sink that sends the events of a turn in few writes, and comments during silence.

    Events that arrive at the end of the turn are written together with the end.
    """

    def __init__(self, connection: ClientConnection, writer: AnswerWriter) -> None:
        self._connection = connection
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._came: list[TurnProgress] = []
        self._changed = asyncio.Event()
        self._due: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._silent = False
        self._closed = False
        self._began = time.monotonic()

    def put(self, progress: TurnProgress, /) -> None:
        """Queue an event."""
        if isinstance(progress, IdsSampled) and not self._writer.sends_ids:
            return
        self._came.append(progress)
        if len(self._came) == 1:
            early = self._connection.written + WRITE_INTERVAL_SECONDS - time.monotonic()
            if early > 0:
                self._due = self._loop.call_later(early, self._changed.set)
            else:
                self._changed.set()

    def close(self) -> None:
        """Close the queue: no further events follow."""
        self._closed = True
        self._changed.set()

    async def forward(self) -> None:
        """Write events until the queue is closed."""
        connection, changed = self._connection, self._changed
        self._look()
        try:
            while True:
                await changed.wait()
                changed.clear()
                if self._closed:
                    return
                written = self.taken() or (self._writer.keep_alive if self._silent else b"")
                self._silent = False
                if written:
                    await connection.begin(STREAM_HEADERS)
                    await connection.write(written)
        finally:
            for timer in (self._due, self._looking):
                if timer is not None:
                    timer.cancel()

    def taken(self) -> bytes:
        """Return the bytes of the events that are not written yet; b"" without any."""
        came, self._came = self._came, []
        return self._writer.write(came) if came else b""

    def _look(self) -> None:
        """Check at intervals for a long silence. A timer for each write would be slower."""
        patience = KEEP_ALIVE_SECONDS if self._connection.begun else FIRST_BYTE_SECONDS
        silent = time.monotonic() - max(self._began, self._connection.written)
        if silent >= patience:
            self._silent = True
            self._changed.set()
        self._looking = self._loop.call_later(
            KEEP_ALIVE_SECONDS if self._silent else min(patience - silent, KEEP_ALIVE_SECONDS), self._look
        )


async def _refuse(
    connection: ClientConnection, form: WireForm, writer: AnswerWriter, route: EpisodeRoute, error: Exception
) -> None:
    refused = refusal_of(error)
    if refused.reason is Reason.OVER:
        route.on_over()
    try:
        if connection.begun:
            log.info("an answer was cut: %s", refused.reason)
            await connection.write(writer.write_refusal(refused), more=False)
        else:
            await send_refusal(connection.begin, connection.write, form, refused)
    except ClientGone:
        pass
    if refused.reason is Reason.FAILED:
        raise error


async def send_refusal(
    begin: Callable[..., Awaitable[None]], write: Callable[..., Awaitable[None]], form: WireForm, refused: Refused
) -> None:
    """Send a refusal. Only its reason is logged, since the message may quote the body."""
    level = logging.WARNING if refused.reason is Reason.FAILED else logging.INFO
    log.log(level, "a request was refused with %d: %s", refused.reason.status, refused.reason)
    body = orjson.dumps(form.refusal(refused))
    headers = [*_json_headers(body), (b"x-should-retry", b"true" if refused.reason.retry else b"false")]
    if refused.reason is Reason.BUSY:
        headers.append((b"retry-after", b"1"))
    await begin(headers, int(refused.reason.status))
    await write(body, more=False)


async def send_json(send: Send, body: bytes, status: int = 200) -> None:
    """Send an answer of JSON in one piece."""
    await send({"type": "http.response.start", "status": status, "headers": _json_headers(body)})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _json_headers(body: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
