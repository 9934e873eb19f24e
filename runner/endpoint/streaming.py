"""Answers one request: as a stream of events while the turn is sampled, or whole at its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import anyio
import orjson

from runner.endpoint.answering import Door
from runner.endpoint.line import ClientGone, Line, Send
from runner.endpoint.refusals import Reason, Refused, ended, refusal_of
from runner.endpoint.wire import Answered, AnswerWriter, Restarted, WireForm, WireRequest
from runner.trajectory import Turn
from runner.turn_events import IdsSampled, TurnProgress

__all__ = ["answer", "send_json", "send_refusal"]

PACE: Final = 0.02
"""Seconds in which what is sampled is gathered into one write; the first and the last go at once."""

FIRST_BYTE: Final = 2.0
"""Seconds after which a client that waits hears that it is heard; until then an error has its own status."""

KEEP_ALIVE: Final = 10.0
"""Seconds of silence after which a stream is kept alive."""

STREAM: Final[Sequence[tuple[bytes, bytes]]] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
)


async def answer(
    form: WireForm, request: WireRequest, door: Door, receive: Callable[[], Awaitable[Any]], send: Send
) -> None:
    """Have a request answered and send the answer, or why there is none; a client that goes away cuts it.

    Where nothing more is sent of a stream that was begun, the server closes the connection: the client asks again.
    """
    line = Line(send)
    writer = form.writer(request, door.model, door.answering.text_of)
    answered = _streamed if request.stream else _whole
    error: Exception | None = ended()  # where it is cut, and the client is still there
    async with anyio.create_task_group() as group:
        scope = group.cancel_scope
        with door.cutting(scope), line.left_if_unread(scope):
            group.start_soon(_until_gone, receive, line, scope)
            try:
                await answered(line, writer, request, door)
                error = None
            except Exception as raised:  # a task group would wrap it
                error = raised
                scope.cancel()
    if error is not None and not line.gone and not isinstance(error, ClientGone | Restarted):
        await _refuse(line, form, writer, door, error)


async def _until_gone(receive: Callable[[], Awaitable[Any]], line: Line, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    # A server says that also once the answer was sent, so that nobody has to cancel this, which costs more than it.
    if not line.over:
        line.gone = True
        scope.cancel()


async def _whole(line: Line, writer: AnswerWriter, request: WireRequest, door: Door) -> None:
    async def give(turn: Turn, continued: Turn | None) -> None:
        body = writer.whole(Answered.of(turn, continued))
        await line.begin(_json_headers(body))
        await line.write(body, more=False)

    await door.answering.ask(request.asked, give=give)


async def _streamed(line: Line, writer: AnswerWriter, request: WireRequest, door: Door) -> None:
    events = _Events(line, writer)

    async def give(turn: Turn, continued: Turn | None) -> None:
        rest = events.taken() + writer.end(Answered.of(turn, continued))
        await line.begin(STREAM)
        await line.write(rest, more=False)

    try:
        await door.answering.ask(request.asked, relay=events, give=give)
    except Exception:
        if not line.gone and (rest := events.taken()):
            await line.begin(STREAM)
            await line.write(rest)
        raise


class _Events:
    """Passes a turn on as events, in as few writes as may be; says now and then that nothing is lost.

    What came when the turn is over waits for its end, and goes with it.
    """

    def __init__(self, line: Line, writer: AnswerWriter) -> None:
        self._line = line
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._came: list[TurnProgress] = []
        self._news = asyncio.Event()
        self._due: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._silent = False
        self._closed = False
        self._began = time.monotonic()

    def put(self, progress: TurnProgress, /) -> None:
        """Take what has come of the turn."""
        if isinstance(progress, IdsSampled) and not self._writer.tells_ids:
            return
        self._came.append(progress)
        if len(self._came) == 1:
            early = self._line.written + PACE - time.monotonic()
            if early > 0:
                self._due = self._loop.call_later(early, self._news.set)
            else:
                self._news.set()

    def close(self) -> None:
        """Take note that nothing more comes."""
        self._closed = True
        self._news.set()

    async def pass_on(self) -> None:
        """Write what comes until nothing more does."""
        line, news = self._line, self._news
        self._look()
        try:
            while True:
                await news.wait()
                news.clear()
                if self._closed:
                    return
                written = self.taken() or (self._writer.keep_alive if self._silent else b"")
                self._silent = False
                if written:
                    await line.begin(STREAM)
                    await line.write(written)
        finally:
            for timer in (self._due, self._looking):
                if timer is not None:
                    timer.cancel()

    def taken(self) -> bytes:
        """What has come and is not written yet, which may be nothing."""
        came, self._came = self._came, []
        return self._writer.tell(came) if came else b""

    def _look(self) -> None:
        """Look from time to time whether nothing was said for long, which costs less than a timer of each write."""
        patience = KEEP_ALIVE if self._line.begun else FIRST_BYTE
        silent = time.monotonic() - max(self._began, self._line.written)
        if silent >= patience:
            self._silent = True
            self._news.set()
        self._looking = self._loop.call_later(
            KEEP_ALIVE if self._silent else min(patience - silent, KEEP_ALIVE), self._look
        )


async def _refuse(line: Line, form: WireForm, writer: AnswerWriter, door: Door, error: Exception) -> None:
    refused = refusal_of(error)
    if refused.reason is Reason.OVER:
        door.told_over()
    try:
        if line.begun:
            await line.write(writer.write_refusal(refused), more=False)
        else:
            await send_refusal(line.begin, line.write, form, refused)
    except ClientGone:
        pass
    if refused.reason is Reason.FAILED:
        raise error


async def send_refusal(
    begin: Callable[..., Awaitable[None]], write: Callable[..., Awaitable[None]], form: WireForm, refused: Refused
) -> None:
    """Send why a request gets no answer."""
    body = orjson.dumps(form.refusal(refused))
    headers = [*_json_headers(body), (b"x-should-retry", b"true" if refused.reason.retry else b"false")]
    if refused.reason is Reason.BUSY:
        headers.append((b"retry-after", b"1"))
    await begin(headers, int(refused.reason.status))
    await write(body, more=False)


async def send_json(send: Send, body: bytes, status: int = 200) -> None:
    """Send a whole answer."""
    await send({"type": "http.response.start", "status": status, "headers": _json_headers(body)})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _json_headers(body: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
