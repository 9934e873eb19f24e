"""A server that lists its tools in three pages, built with the SDK's low-level server.

usage: python mcp_pages.py [promising]

With `promising`, the tools have a schema of results that their results do not match.
"""

from __future__ import annotations

import sys
from typing import Any

import anyio
import mcp.types as types
from mcp.server import Server
from mcp.server.stdio import stdio_server


async def list_tools(context: Any, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
    page = int(params.cursor) if params is not None and params.cursor else 0
    schema = {"type": "object", "properties": {}}
    promised = {**schema, "required": ["answer"]} if "promising" in sys.argv else None
    tool = types.Tool(name=f"tool_{page}", description="", input_schema=schema, output_schema=promised)
    return types.ListToolsResult(tools=[tool], next_cursor=str(page + 1) if page < 2 else None)


async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=f"called {params.name}")])


async def main() -> None:
    server: Any = Server("pages", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


if __name__ == "__main__":
    anyio.run(main)
