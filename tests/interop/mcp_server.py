"""An MCP server with every fault that tests need, built with the real SDK.

usage: python mcp_server.py [http [KEY]]

With a key, requests without it are refused.
"""

from __future__ import annotations

import os
import socket
import sys
from functools import partial
from typing import Any

import anyio
import uvicorn
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import Response

server = MCPServer("troubles", log_level="CRITICAL")
calls = 0


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def count() -> int:
    """Count the calls of this process."""
    global calls
    calls += 1
    return calls


@server.tool()
def variable(name: str) -> str:
    """Read a variable of this process."""
    return os.environ.get(name, "unset")


@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("no such town")


@server.tool()
def picture() -> Image:
    """Draw."""
    return Image(data=b"\x89PNG" * 99, format="png")


@server.tool()
def die() -> str:
    """End the process in the middle of the call."""
    print("the disk is on fire", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
async def hang() -> str:
    """Never answer."""
    await anyio.sleep_forever()
    return "late"


@server.tool()
async def slow() -> str:
    """Answer after half a second."""
    await anyio.sleep(0.5)
    return "late"


async def with_key(key: str, request: Request, answer: Any) -> Response:
    if request.headers.get("authorization") != f"Bearer {key}":
        return Response("no key", status_code=401)
    answered: Response = await answer(request)
    return answered


def main() -> None:
    if "http" in sys.argv:
        listening = socket.create_server(("127.0.0.1", 0))
        print(listening.getsockname()[1], flush=True)
        app = server.streamable_http_app()
        if key := "".join(sys.argv[2:]):
            app.add_middleware(BaseHTTPMiddleware, dispatch=partial(with_key, key))
        uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])
    else:
        server.run("stdio")


if __name__ == "__main__":
    main()
