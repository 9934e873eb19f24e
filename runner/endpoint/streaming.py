"""Answers one request: as a stream of events while the turn is sampled, or whole at its end."""

from __future__ import annotations

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
from runner.turn_events import TurnProgress

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
        with door.answering_within(group.cancel_scope):
            group.start_soon(_until_gone, receive, line, group.cancel_scope)
            group.start_soon(line.leave_if_unread, group.cancel_scope)
            try:
                await answered(line, writer, request, door)
                error = None
            except Exception as raised:  # a task group would wrap it
                error = raised
        group.cancel_scope.cancel()
    if error is not None and not line.gone and not isinstance(error, ClientGone | Restarted):
        await _refuse(line, form, writer, door, error)


async def _until_gone(receive: Callable[[], Awaitable[Any]], line: Line, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    line.gone = True
    scope.cancel()


async def _whole(line: Line, writer: AnswerWriter, request: WireRequest, door: Door) -> None:
    async def give(turn: Turn, continued: Turn | None) -> None:
        body = writer.whole(Answered.of(turn, continued))
        await line.begin(_json_headers(body))
        await line.write(body, more=False)

    await door.answering.ask(request.asked, give=give)


async def _streamed(line: Line, writer: AnswerWriter, request: WireRequest, door: Door) -> None:
    told, drained = _Told(), anyio.Event()
    failed: list[Exception] = []

    async def pump() -> None:
        try:
            await _pump(line, writer, told)
        except Exception as error:
            failed.append(error)
            group.cancel_scope.cancel()
        finally:
            drained.set()

    async def give(turn: Turn, continued: Turn | None) -> None:
        told.close()
        await drained.wait()
        if not failed:
            await line.begin(STREAM)
            await line.write(writer.end(Answered.of(turn, continued)), more=False)

    async with anyio.create_task_group() as group:
        group.start_soon(pump)
        group.start_soon(_keep_alive, line, writer)
        try:
            await door.answering.ask(request.asked, progress=told.put, give=give)
        except Exception as error:
            failed.append(error)
        told.close()
        group.cancel_scope.cancel()
    if failed:
        raise failed[0]


class _Told:
    """What was told of a turn and is not written yet. The sampling never waits for whoever reads it."""

    def __init__(self) -> None:
        self._waiting: list[TurnProgress] = []
        self._there: anyio.Event | None = None
        self._closed = anyio.Event()

    def put(self, progress: TurnProgress) -> None:
        """Add what has come of the turn."""
        self._waiting.append(progress)
        if self._there is not None:
            self._there.set()

    def close(self) -> None:
        """Nothing more comes."""
        self._closed.set()
        if self._there is not None:
            self._there.set()

    async def gather(self, seconds: float) -> None:
        """Let more of it come for so long, or until there is no more."""
        if not self._closed.is_set():
            with anyio.move_on_after(seconds):
                await self._closed.wait()

    async def take(self) -> list[TurnProgress]:
        """What has come since the last time, at least something; nothing once there is no more."""
        if not self._waiting and not self._closed.is_set():
            self._there = anyio.Event()
            await self._there.wait()
            self._there = None
        return self.taken()

    def taken(self) -> list[TurnProgress]:
        """What has come since the last time, which may be nothing."""
        taken, self._waiting = self._waiting, []
        return taken


async def _pump(line: Line, writer: AnswerWriter, told: _Told) -> None:
    """Write what comes of a turn until there is no more."""
    while progress := await told.take():
        early = line.written + PACE - time.monotonic()
        if early > 0 and line.begun:
            await told.gather(early)
            progress += told.taken()
        written = writer.tell(progress)
        if written:
            await line.begin(STREAM)
            await line.write(written)


async def _keep_alive(line: Line, writer: AnswerWriter) -> None:
    """Say now and then that nothing is lost, while nothing else is said; leave a client that reads nothing."""
    began = time.monotonic()
    while True:
        patience = KEEP_ALIVE if line.begun else FIRST_BYTE
        silent = time.monotonic() - max(began, line.written)
        if silent >= patience:
            await line.begin(STREAM)
            await line.write(writer.keep_alive)
        else:
            await anyio.sleep(min(patience - silent, KEEP_ALIVE))


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
