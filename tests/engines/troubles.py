"""Faults of a request to a stand-in server, in any protocol."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
from aiohttp import web

__all__ = ["Trouble", "hangs_up", "hangs_up_after_the_head", "hangs_up_in_a_line", "never_begins"]

Trouble = Callable[[web.Request], Awaitable[web.StreamResponse | None]]
"""Fault before the answer. It returns None to continue with the answer."""


async def hangs_up(request: web.Request) -> web.StreamResponse:
    """Close the connection without an answer."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def hangs_up_after_the_head(request: web.Request) -> web.StreamResponse:
    """Close the connection after the head of the answer."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    assert request.transport is not None
    request.transport.close()
    return response


async def hangs_up_in_a_line(request: web.Request) -> web.StreamResponse:
    """Close the connection in the middle of the first event."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    await response.write(b'data: {"id"')
    assert request.transport is not None
    request.transport.close()
    return response


async def never_begins(_: web.Request) -> web.StreamResponse:
    """Keep the connection open, and send nothing."""
    await anyio.sleep_forever()
    raise AssertionError("it woke up")
