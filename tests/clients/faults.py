"""Faults in the transport of a request: a proxy in front of a run's endpoints damages one request."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import anyio
import orjson

from runner.endpoint.application import Application, Receive
from runner.endpoint.streaming import Send

__all__ = ["Trouble", "Troubled", "troubled"]


class Trouble(enum.StrEnum):
    """The kind of fault."""

    FAILS = "a 500 before anything is sampled"
    BUSY = "a 429 that says when to come again"
    CUT = "a connection that is closed in the middle of an answer"
    LOST_END = "an answer whose end never comes"
    LOST = "an answer of which nothing comes"


class Troubled(Application):
    """Endpoints of a run that damage one request for a turn.

    Args: hosts: as for `Application`. trouble: the kind of fault. at: index of the damaged request for a turn, from 0.
    further: other arguments of the server for its endpoints.
    """

    seen: list[str]
    """The path of each request for a turn."""

    def __init__(self, hosts: Sequence[str], trouble: Trouble, at: int, **further: Any) -> None:
        super().__init__(hosts, **further)
        self._trouble = trouble
        self._at = at
        self._asked = 0
        self.happened = False

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        asks = scope["type"] == "http" and scope["method"] == "POST" and not scope["path"].endswith("count_tokens")
        number, self._asked = self._asked, self._asked + asks
        if not asks or number != self._at:
            await super().__call__(scope, receive, send)
            return
        self.happened = True
        match self._trouble:
            case Trouble.FAILS:
                await _answer(send, 500, {"error": {"message": "it failed", "type": "server_error", "code": "failed"}})
            case Trouble.BUSY:
                error = {"error": {"message": "slow down", "type": "rate_limit_error", "code": "rate_limit_exceeded"}}
                await _answer(send, 429, error, (b"retry-after", b"1"))
            case trouble:
                await self._cut(scope, receive, send, trouble)

    async def _cut(self, scope: Mapping[str, Any], receive: Receive, send: Send, trouble: Trouble) -> None:
        gone = anyio.Event()
        sent = 0

        async def receive_until_gone() -> dict[str, Any]:
            message: dict[str, Any] = {"type": "http.disconnect"}

            async def really() -> None:
                nonlocal message
                message = await receive()
                group.cancel_scope.cancel()

            async with anyio.create_task_group() as group:
                group.start_soon(really)
                await gone.wait()
                group.cancel_scope.cancel()
            return message

        async def send_until_cut(message: dict[str, Any]) -> None:
            nonlocal sent
            body = message["type"] == "http.response.body"
            last = body and not message.get("more_body")
            if trouble is Trouble.LOST or last or (trouble is Trouble.CUT and sent == 2):
                if trouble is Trouble.CUT or last:
                    gone.set()
                    await anyio.sleep_forever()  # until the application detects the lost connection
                return
            sent += body
            await send(message)

        await super().__call__(scope, receive_until_gone, send_until_cut)
        if trouble is Trouble.LOST:
            # The server would answer with status 500 if the answer has not begun.
            send.__self__.transport.abort()  # type: ignore[attr-defined]  # uvicorn's
            while (await receive())["type"] != "http.disconnect":
                pass
        raise _Cut  # the server closes the connection


class _Cut(Exception):
    """The connection is to be cut."""


async def _answer(send: Send, status: int, error: Mapping[str, Any], *headers: tuple[bytes, bytes]) -> None:
    body = orjson.dumps(error)
    own = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": own})
    await send({"type": "http.response.body", "body": body, "more_body": False})


@contextmanager
def troubled(trouble: Trouble, at: int) -> Iterator[list[Troubled]]:
    """Let runs inside the block serve these endpoints, and return the list of them."""
    made: list[Troubled] = []

    def make(hosts: Sequence[str], **further: Any) -> Troubled:
        made.append(Troubled(hosts, trouble, at, **further))
        return made[-1]

    with patch("runner.endpoint.server.Application", make):
        yield made
