"""Faults of a request to a stand-in server, in any protocol."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
from aiohttp import web

__all__ = ["Trouble", "hangs_up", "hangs_up_after_the_head", "hangs_up_in_a_line", "never_begins"]

Trouble = Callable[[web.Request], Awaitable[web.StreamResponse | None]]
"""Fault before the answer; None for no fault."""


async def hangs_up(request: web.Request) -> web.StreamResponse:
    """Closes the connection without a word."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def hangs_up_after_the_head(request: web.Request) -> web.StreamResponse:
    """Closes the connection where the answer would begin."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    assert request.transport is not None
    request.transport.close()
    return response


async def hangs_up_in_a_line(request: web.Request) -> web.StreamResponse:
    """Closes the connection in the middle of the first event."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    await response.write(b'data: {"id"')
    assert request.transport is not None
    request.transport.close()
    return response


async def never_begins(_: web.Request) -> web.StreamResponse:
    """Keeps the connection, and answers nothing."""
    await anyio.sleep_forever()
    raise AssertionError("it woke up")
