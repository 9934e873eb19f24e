"""Tools of MCP servers (Model Context Protocol) for environments, and a data set whose questions use them."""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TextIO, TypeAlias

from runner.errors import BadEnvironment, ServerFailed, ToolError, first_line, unwrapped
from runner.interop.dataset import Dataset, ScoreOption
from runner.interop.packages import optional_package
from runner.interop.variables import filled
from runner.options import Limits
from runner.tools.tool import Tool

__all__ = ["McpDataset", "McpServers", "ServerOption"]

ServerOption: TypeAlias = str | Sequence[Any] | Mapping[str, Any]
"""A server, a list of servers, or a dict of servers by name. A server is a command, a URL, or a dict as in the
configuration files of MCP clients. The path of such a file stands for all its servers. In Python, a server may also be
any object that `mcp.Client` takes.
"""

MAX_PAGES_COUNT = 1000
"""Maximum number of pages of tools that are read from one server."""
LAST_CHARS = 400
"""Maximum number of characters from the end of a server's standard error in an error message."""
MAX_PROCESSES_COUNT = 32
"""Default maximum number of episodes that have server processes of their own at the same time."""


class McpServers:
    """One or several servers, each a command (`"python server.py"`) or a URL (`"http://localhost:8000/mcp"`).

        class Weather(Environment):
            servers = McpServers("python weather_server.py")

            async def setup(self):
                self.tools += await self.servers.connect(self.episode.exit_stack)

    A call that the server refuses, or answers with `isError`, raises `ToolError`; the model reads this error. If the
    connection to a server is lost, the call raises `ServerFailed`, and the episode fails. A call that takes longer than
    `Limits.tool_seconds` is cut, and its late answer is dropped.

    Args:
        servers: a command or a URL, a list of them, or a dict of them by name. Each may also be a dict with `command`,
            `args`, `env` and `cwd`, or with `url` and `headers`. The configuration of an MCP client, a dict with
            `mcpServers` or the path of its .json file, stands for all its servers. `${NAME}` in `env` and `headers` is
            an environment variable.
        prefix: begin each tool's name with the server's name and an underscore. Without prefixes, two tools of the
            same name are refused. Servers of a list have the names "1", "2", ...

    Raises:
        BadEnvironment: the package mcp is missing, a server is invalid, or a command is not on PATH.
    """

    def __init__(self, servers: ServerOption, *, prefix: bool = False) -> None:
        self._mcp = optional_package("mcp", extra="mcp", least="2.2")
        self._prefix = prefix
        self._servers = {name: self._checked(name, each) for name, each in _named(servers).items()}
        if not self._servers:
            raise BadEnvironment("McpServers: give a command or a URL.")

    @property
    def has_processes(self) -> bool:
        """True if a server is a command, so that each connection to it starts a process."""
        return any(isinstance(each, self._mcp.StdioServerParameters) for each in self._servers.values())

    async def connect(self, exit_stack: AsyncExitStack) -> list[Tool]:
        """Connect to all servers, and return their tools, sorted by name. Closing the exit stack disconnects.

        Raises:
            ServerFailed: a server does not start, cannot be reached, or does not list its tools.
            BadEnvironment: two tools have the same name.
        """
        tools: dict[str, Tool] = {}
        owners: dict[str, str] = {}
        for name, server in self._servers.items():
            connection = _McpConnection(self._mcp, name, server)
            await exit_stack.enter_async_context(connection.opened())
            for tool in await connection.tools(f"{name}_" if self._prefix else ""):
                if tool.name in tools:
                    raise BadEnvironment(
                        f"the MCP servers {owners[tool.name]!r} and {name!r} both have a tool {tool.name!r}: give "
                        "prefix=True, or leave one out."
                    )
                tools[tool.name], owners[tool.name] = tool, name
        return [tools[name] for name in sorted(tools)]

    def _checked(self, name: str, server: Any) -> Any:
        """Return a server in a form that `_McpConnection` takes.

        A command, or a dict with `command`, becomes `StdioServerParameters`. A dict with `url` becomes `_HttpServer`. A
        URL, and an object that `mcp.Client` takes, are unchanged.

        Raises:
            BadEnvironment: the server is invalid.
        """
        try:
            if isinstance(server, Mapping):
                return self._configured(server)
            if isinstance(server, str) and not server.startswith(_SCHEMES):
                argv = _split(server)
                return self._process({"command": argv[0], "args": argv[1:]})
        except ValueError as error:
            # A dict is not shown, since it may contain secrets.
            shown = "" if isinstance(server, Mapping) else f"{server!r:.80}: "
            raise BadEnvironment(f"MCP server {name!r}: {shown}{error}.") from None
        if server is None or isinstance(server, bool | int | float | list | tuple):
            raise BadEnvironment(f"MCP server {name!r}: {server!r:.80}: give a command or a URL.")
        return server

    def _configured(self, given: Mapping[str, Any]) -> Any:
        """Return the server for an entry of a configuration file; raise ValueError if the entry is invalid."""
        allowed = _PROCESS_FIELDS if "command" in given else _HTTP_FIELDS
        if unknown := [key for key in given if key not in allowed]:
            raise ValueError(f"{unknown[0]!r} is unknown: give {', '.join(_PROCESS_FIELDS)}, or url and headers")
        for key, kind in allowed.items():
            if key in given and not isinstance(given[key], kind):
                # The value is not shown, since it may contain secrets.
                raise ValueError(f"{key} is of type {type(given[key]).__name__}; it must be {_KINDS[kind]}")
        if "command" in given:
            return self._process(given)
        if given.get("type", "http") not in _HTTP_TYPES or not str(given.get("url", "")).startswith(_SCHEMES):
            raise ValueError("give a command, or the url of a server of streamable HTTP")
        return _HttpServer(given["url"], filled(given.get("headers", {}), "headers"))

    def _process(self, given: Mapping[str, Any]) -> Any:
        command = given["command"]
        if shutil.which(command) is None:
            raise ValueError(f"the program {command!r:.80} is not on PATH: install it")
        return self._mcp.StdioServerParameters(
            command=command,
            args=[str(each) for each in given.get("args", ())],
            env=filled(given["env"], "env") if given.get("env") else None,
            cwd=given.get("cwd") or str(Path.cwd()),
        )


@dataclass(frozen=True, slots=True)
class _HttpServer:
    """A server over HTTP, with the headers of each request."""

    url: str
    headers: Mapping[str, str] = field(repr=False)


_SCHEMES: Final = ("http://", "https://")
_HTTP_TYPES: Final = ("http", "streamable-http", "streamable_http", "streamableHttp")
_PROCESS_FIELDS: Final[Mapping[str, type]] = {"command": str, "args": list, "env": Mapping, "cwd": str, "type": str}
_HTTP_FIELDS: Final[Mapping[str, type]] = {"url": str, "headers": Mapping, "type": str}
_KINDS: Final[Mapping[type, str]] = {str: "a string", list: "a list", Mapping: "an object"}


def _split(command: str) -> list[str]:
    try:
        argv = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"invalid shell syntax ({error})") from None
    if not argv:
        raise ValueError("give a command or a URL")
    return argv


def _named(servers: ServerOption) -> dict[str, Any]:
    if isinstance(servers, str):
        servers = _parsed(servers)
    if isinstance(servers, Mapping):
        servers = servers.get("mcpServers", servers)
    if isinstance(servers, Mapping) and not servers.keys() & {"command", "url"}:
        return dict(servers)
    several = servers if isinstance(servers, list | tuple) else [servers]
    return {str(number): each for number, each in enumerate(several, 1)}


def _parsed(servers: str) -> Any:
    """Return the JSON value of a text or of a .json file; other text is returned unchanged.

    Raises:
        BadEnvironment: the file, or a text that begins with a brace or a bracket, is not JSON.
    """
    text = servers
    if servers.endswith(".json") and Path(servers).is_file():
        text = Path(servers).read_text(encoding="utf-8")
    if text is servers and not servers.lstrip().startswith(("{", "[")):
        return servers
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadEnvironment(f"servers={servers!r:.80}: not JSON ({error}): correct it.") from None


class _McpConnection:
    """A connection to one server."""

    def __init__(self, mcp: Any, name: str, server: Any) -> None:
        self._mcp, self._name, self._server = mcp, name, server
        self._client: Any = None
        self._errors: TextIO | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Connect, and disconnect when the block is left. The standard error of a process goes to a temporary file.

        Raises:
            ServerFailed: the server cannot be reached, or the connection to it is lost.
        """
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as self._errors:
            passing: BaseException | None = None
            try:
                async with AsyncExitStack() as stack:
                    try:
                        transport = await self._transport(stack)
                        self._client = await stack.enter_async_context(self._mcp.Client(transport))
                    except Exception as error:
                        raise self._failed("cannot be reached", error) from error
                    try:
                        yield
                    except BaseException as error:
                        passing = error
                        raise
            except Exception as error:
                # If an HTTP connection is lost, the block is cancelled, and the error is raised here, at its end.
                if isinstance(passing, Exception) or isinstance(error, ServerFailed):
                    raise
                raise self._failed("cannot be reached any more", error) from error

    async def _transport(self, stack: AsyncExitStack) -> Any:
        if isinstance(self._server, self._mcp.StdioServerParameters):
            from mcp.client.stdio import stdio_client

            assert self._errors is not None
            return stdio_client(self._server, errlog=self._errors)
        if isinstance(self._server, _HttpServer):
            from mcp.client.streamable_http import streamable_http_client
            from mcp.shared._httpx_utils import create_mcp_http_client

            client = await stack.enter_async_context(create_mcp_http_client(dict(self._server.headers)))
            return streamable_http_client(self._server.url, http_client=client)
        return self._server

    async def tools(self, prefix: str) -> list[Tool]:
        """Return the tools of the server, from all pages of its list.

        Raises:
            ServerFailed: the server does not list its tools, or has more than `MAX_PAGES_COUNT` pages of them.
        """
        listed: list[Any] = []
        cursor = None
        for _ in range(MAX_PAGES_COUNT):
            try:
                page = await self._client.list_tools(cursor=cursor)
            except Exception as error:
                raise self._failed("does not list its tools", error) from error
            listed += page.tools
            cursor = page.next_cursor
            if not cursor:
                return [self._tool(each, prefix) for each in listed]
        raise ServerFailed(f"MCP server {self._name!r} has more than {MAX_PAGES_COUNT} pages of tools.")

    def _tool(self, tool: Any, prefix: str) -> Tool:
        return Tool(
            partial(self._call, tool.name),
            name=f"{prefix}{tool.name}",
            description=tool.description or tool.title or f"The tool {tool.name}.",
            parameters=tool.input_schema,
            returns=tool.output_schema,
            raw=True,
        )

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        try:
            return await self._client.call_tool(name, dict(arguments))
        except self._mcp.MCPError as error:
            if error.code in _gone():
                raise self._failed("cannot be reached any more", error) from error
            raise ToolError(str(error)) from error
        except (OSError, RuntimeError) as error:
            if str(error).startswith(_BROKEN_PROMISES):
                raise ToolError(str(error)) from error
            raise self._failed("cannot be reached any more", error) from error

    def _failed(self, what: str, error: BaseException) -> ServerFailed:
        said = ""
        if self._errors is not None:
            self._errors.seek(0)
            said = " ".join(self._errors.read()[-LAST_CHARS:].split())
        cause = f"{type(unwrapped(error)).__name__}: {first_line(unwrapped(error))}"
        wrote = f"; it wrote: {said}" if said else ""
        return ServerFailed(f"MCP server {self._name!r} {what} ({cause:.300}){wrote}")


# Beginnings of the texts of errors about results that violate the output schema of their tool. Such results are
# frequent, and the SDK has no error class for them.
_BROKEN_PROMISES: Final = ("Tool ", "Invalid schema for tool ", "Invalid structured content ")


def _gone() -> tuple[int, ...]:
    from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

    return CONNECTION_CLOSED, REQUEST_TIMEOUT


class McpDataset(Dataset):
    """Questions of a data set (`--tasks FILE`), answered with tools of MCP servers (`--set servers='python x.py'`)."""

    limits = Limits(turns=16)
    package = ("mcp", "mcp")

    def __init__(
        self,
        servers: str | Sequence[str] | Mapping[str, str],
        tasks: str | Path | Iterable[Mapping[str, Any]],
        prompt: str = "prompt",
        answer: str = "",
        score: ScoreOption = "exact",
        id: str = "",
        system: str = "",
        info: Sequence[str] = (),
        where: Sequence[str] = (),
        shuffle: int | None = None,
        skip: int = 0,
        take: int | None = None,
        cache: str = "",
        prefix: bool = False,
        one_connection: bool = False,
        processes: int = MAX_PROCESSES_COUNT,
    ) -> None:
        """Choose the servers and the questions.

        Args:
            servers: as in `McpServers`. A string may also be JSON, or the path of a .json file.
            tasks: the data set. This and all arguments up to `cache` are those of `Dataset`.
            prompt: the prompt.
            answer: the reference answer.
            score: the scorer.
            id: the id of a task.
            system: the system message.
            info: further fields for the scorer.
            where: conditions of rows.
            shuffle: the seed of a shuffled order.
            skip: rows to leave out.
            take: rows to keep.
            cache: the file of a judge's scores.
            prefix: begin the names of tools with the name of their server.
            one_connection: all episodes share one connection to each server; by default each episode has its own.
            processes: maximum number of episodes that have server processes of their own at the same time.
        """
        super().__init__(tasks, prompt, answer, score, id, system, info, where, shuffle, skip, take, cache)
        self._connections = McpServers(servers, prefix=prefix)
        self._is_shared = one_connection
        self._processes = processes

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[list[Tool]]:
        """The tools of the shared connections; an empty list if each episode has its own connections.

        All servers are connected in both cases, so that errors of servers appear before the first episode.
        """
        async with AsyncExitStack() as stack:
            tools = await self._connections.connect(stack)
            if not self._is_shared:
                await stack.aclose()
            yield tools if self._is_shared else []

    async def setup(self) -> None:
        if self._is_shared:
            self.tools += self.shared
            return
        stack = self.episode.exit_stack
        if self._connections.has_processes:
            await stack.enter_async_context(self.episode.limiter("mcp", self._processes))
        self.tools += await self._connections.connect(stack)
