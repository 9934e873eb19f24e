"""A server of the Model Context Protocol with every trouble that a test asks for, by the real SDK.

usage: python mcp_server.py [http] [NAME]
"""

from __future__ import annotations

import os
import socket
import sys

import anyio
import uvicorn
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

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


def main() -> None:
    if "http" in sys.argv:
        listening = socket.create_server(("127.0.0.1", 0))
        print(listening.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="error")).run(sockets=[listening])
    else:
        server.run("stdio")


if __name__ == "__main__":
    main()
