"""Answers one request: as a stream of events while the turn is sampled, or whole at its end."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import anyio
import orjson
from anyio.streams.memory import MemoryObjectReceiveStream

from runner.endpoint.answering import Door
from runner.endpoint.refusals import Reason, Refused, ended, refusal_of
from runner.endpoint.wire import Answered, AnswerWriter, Restarted, WireForm, WireRequest
from runner.trajectory import Turn
from runner.turn_events import TurnProgress

__all__ = ["Send", "answer", "send_json", "send_refusal"]

Send = Callable[[dict[str, Any]], Awaitable[None]]
"""Sends a message of ASGI."""

PACE: Final = 0.02
"""Seconds in which what is sampled is gathered into one write; the first and the last go at once."""

FIRST_BYTE: Final = 2.0
"""Seconds after which a client that waits hears that it is heard; until then an error has its own status."""

KEEP_ALIVE: Final = 10.0
"""Seconds of silence after which a stream is kept alive."""

READ_SECONDS: Final = 60.0
"""Seconds in which a client has to read what was written; one that does not is left."""

STREAM: Final[Sequence[tuple[bytes, bytes]]] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
)


class _Gone(Exception):
    """The client has gone away."""


class _Line:
    """The way back to a client."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.gone = False
        """Whether the client has gone away."""
        self.begun = False
        """Whether the head of the answer was sent."""

    async def begin(self, headers: Sequence[tuple[bytes, bytes]], status: int = 200) -> None:
        self.begun = True
        await self._pass({"type": "http.response.start", "status": status, "headers": [*headers]})

    async def write(self, body: bytes, *, more: bool = True) -> None:
        await self._pass({"type": "http.response.body", "body": body, "more_body": more})
        if self.gone:  # a server sends nothing to one who has gone, and says nothing
            raise _Gone

    async def _pass(self, message: dict[str, Any]) -> None:
        with anyio.move_on_after(READ_SECONDS) as reading:
            await self._send(message)
        if reading.cancelled_caught:
            raise _Gone


async def answer(
    form: WireForm, request: WireRequest, door: Door, receive: Callable[[], Awaitable[Any]], send: Send
) -> None:
    """Have a request answered and send the answer, or why there is none; a client that goes away cuts it.

    Where nothing more is sent of a stream that was begun, the server closes the connection: the client asks again.
    """
    line = _Line(send)
    writer = form.writer(request, door.model, door.answering.text_of)
    answered = _streamed if request.stream else _whole
    error: Exception | None = ended()  # where it is cut, and the client is still there
    async with anyio.create_task_group() as group:
        with door.answering_within(group.cancel_scope):
            group.start_soon(_until_gone, receive, line, group.cancel_scope)
            try:
                await answered(line, writer, request, door)
                error = None
            except Exception as raised:  # a task group would wrap it
                error = raised
        group.cancel_scope.cancel()
    if error is not None and not line.gone and not isinstance(error, _Gone | Restarted):
        await _refuse(line, form, writer, door, error)


async def _until_gone(receive: Callable[[], Awaitable[Any]], line: _Line, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    line.gone = True
    scope.cancel()


async def _whole(line: _Line, writer: AnswerWriter, request: WireRequest, door: Door) -> None:
    async def give(turn: Turn, continued: Turn | None) -> None:
        body = writer.whole(Answered.of(turn, continued))
        await line.begin(_json_headers(body))
        await line.write(body, more=False)

    await door.answering.ask(request.asked, give=give)


async def _streamed(line: _Line, writer: AnswerWriter, request: WireRequest, door: Door) -> None:
    # It holds no more than the turn does, and the sampling never waits for whoever listens.
    tell, progress = anyio.create_memory_object_stream[TurnProgress](math.inf)
    failed: list[Exception] = []
    ending, drained = anyio.Event(), anyio.Event()

    def hear(each: TurnProgress) -> None:
        # What is sampled before the cut arrives has nobody left to hear it.
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            tell.send_nowait(each)

    async def pump() -> None:
        try:
            with progress:
                await _pump(line, writer, progress, ending)
        except Exception as error:
            failed.append(error)
            group.cancel_scope.cancel()
        finally:
            drained.set()

    async def give(turn: Turn, continued: Turn | None) -> None:
        ending.set()
        tell.close()
        await drained.wait()
        if not failed:
            if not line.begun:
                await line.begin(STREAM)
            await line.write(writer.end(Answered.of(turn, continued)), more=False)

    async with anyio.create_task_group() as group:
        group.start_soon(pump)
        try:
            await door.answering.ask(request.asked, progress=hear, give=give)
        except Exception as error:
            failed.append(error)
        finally:
            tell.close()
        ending.set()
        group.cancel_scope.cancel()
    if failed:
        raise failed[0]


async def _pump(
    line: _Line, writer: AnswerWriter, progress: MemoryObjectReceiveStream[TurnProgress], ending: anyio.Event
) -> None:
    """Write what comes of a turn until there is no more."""
    heard = anyio.current_time()
    while True:
        told: list[TurnProgress] = []
        # Not from what came last: of a call nothing can be written for as long as it is sampled.
        with anyio.CancelScope(deadline=heard + (KEEP_ALIVE if line.begun else FIRST_BYTE)):
            try:
                told = [await progress.receive(), *_waiting(progress)]
            except anyio.EndOfStream:
                return
        written = writer.tell(told)
        if not written and anyio.current_time() >= heard + (KEEP_ALIVE if line.begun else FIRST_BYTE):
            written = writer.keep_alive
        if written:
            if not line.begun:
                await line.begin(STREAM)
            await line.write(written)
            heard = anyio.current_time()
        if told:
            with anyio.move_on_after(PACE):
                await ending.wait()


def _waiting(progress: MemoryObjectReceiveStream[TurnProgress]) -> list[TurnProgress]:
    """What has come and was not read."""
    told: list[TurnProgress] = []
    try:
        while True:
            told.append(progress.receive_nowait())
    except (anyio.WouldBlock, anyio.EndOfStream):
        return told


async def _refuse(line: _Line, form: WireForm, writer: AnswerWriter, door: Door, error: Exception) -> None:
    refused = refusal_of(error)
    if refused.reason is Reason.OVER:
        door.told_over()
    try:
        if line.begun:
            await line.write(writer.write_refusal(refused), more=False)
        else:
            await send_refusal(line.begin, line.write, form, refused)
    except _Gone:
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
