"""An MCP server for tests, built with `mcp`: over stdio, or over HTTP at a port that it prints."""

from __future__ import annotations

import socket
import sys

import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("arithmetic", log_level="CRITICAL")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("no such town")


def main() -> None:
    if sys.argv[1:] != ["http"]:
        server.run("stdio")
        return
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="error")).run(sockets=[listening])


if __name__ == "__main__":
    main()
