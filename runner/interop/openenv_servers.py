"""Environments on OpenEnv servers, over OpenEnv's network protocol; the package openenv is not imported."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

from runner.concurrency.clocks import require_asyncio
from runner.environment.environment import Environment
from runner.errors import BadOption, ServerFailed, ToolError, first_line, unwrapped
from runner.interop.packages import optional_package
from runner.options import Limits
from runner.scoring import metric, reward
from runner.tasks import Task
from runner.tools.tool import Tool

__all__ = ["OpenEnv"]

CONNECT_SECONDS = 30.0
"""Time limit for opening a connection, and for reading the schema."""

_TOOL_CALL: Final = "call_tool"
"""The value of the field `type` in an action that calls an MCP tool."""

_REFUSED: Final = "VALIDATION_ERROR"
"""The server's error code for a message that does not fit the schema."""


class OpenEnv(Environment):
    """An environment on an OpenEnv server (`--set url=http://localhost:8000`).

    The model acts with one tool, whose arguments are the action. If the actions are calls of MCP tools, the model has
    these tools instead. Each episode has its own session. The reward is the sum of the rewards that the server sends.
    """

    package = ("websockets", "openenv")
    limits = Limits(turns=100)
    tool_choice = "required"

    def __init__(
        self,
        url: str,
        tool: str = "act",
        description: str = "Take an action.",
        instructions: str = "",
        episodes: int = 100,
        reset: Mapping[str, Any] | None = None,
    ) -> None:
        """Choose the server.

        Args:
            url: the server's URL.
            tool: the name of the tool.
            description: the description of the tool for the model.
            instructions: the beginning of the prompt.
            episodes: the number of tasks; each has its own seed.
            reset: arguments of the environment's reset, in addition to the seed.

        Raises:
            BadOption: the URL is invalid.
            BadEnvironment: a package is missing.
        """
        if not url.startswith(("http://", "https://")):
            raise BadOption(f"url={url!r:.80}: give the server's URL, such as http://localhost:8000.")
        self._websockets = optional_package("websockets", extra="openenv", least="13")
        self._httpx = optional_package("httpx", extra="openenv", least="0.27")
        self._url = url.rstrip("/")
        self._tool, self._description, self._instructions = tool, description, instructions
        self._episodes, self._reset = episodes, dict(reset or {})
        self._socket: Any = None
        self._first = ""
        self._total: float | None = None
        self._steps = 0
        self._done = self._is_cut = False

    def tasks(self) -> Iterator[Task]:
        """Return `episodes` tasks. Each has its own seed."""
        return (Task(id=f"openenv-{number}") for number in range(self._episodes))

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[dict[str, Any]]:
        """The JSON schema of an action, read from the server. If the server does not answer, the run ends at once.

        Raises:
            BadOption: the event loop is trio's.
            ServerFailed: the server does not send the schema.
        """
        require_asyncio("OpenEnv")
        try:
            async with self._httpx.AsyncClient(timeout=CONNECT_SECONDS) as client:
                answer = await client.get(f"{self._url}/schema")
                answer.raise_for_status()
                schema = dict(answer.json()["action"])
        except (self._httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise self._failed("does not send its schema", error) from error
        properties = {name: each for name, each in schema.get("properties", {}).items() if name != "metadata"}
        yield {**schema, "properties": properties}

    async def setup(self) -> None:
        """Open a session, reset it with the seed of the task, and make the tools.

        Raises:
            ServerFailed: the server cannot be reached, or does not answer as expected.
            ToolError: the arguments of `reset` do not fit the server's schema.
        """
        address = f"ws{self._url.removeprefix('http')}/ws"
        connecting = self._websockets.connect(address, open_timeout=CONNECT_SECONDS, max_size=None)
        try:
            self._socket = await self.episode.exit_stack.enter_async_context(connecting)
        except (OSError, TimeoutError, self._websockets.WebSocketException) as error:
            raise self._failed("cannot be reached", error) from error
        self._first = await self._ask("reset", {"seed": self.episode.rng.getrandbits(31), **self._reset})
        if self.shared["properties"].get("type", {}).get("const") == _TOOL_CALL:
            listed = (await self._exchange("step", {"type": "list_tools"}))["observation"].get("tools") or []
            shown = [(each["name"], each["description"] or each["name"], each["input_schema"]) for each in listed]
        else:
            shown = [(self._tool, self._description, self.shared)]
        for name, description, parameters in shown:
            call = self._act if parameters is self.shared else partial(self._call_tool, name)
            # The tools are not parallel, since a socket answers one message at a time.
            made = Tool(call, name=name, description=description, parameters=parameters, raw=True, parallel=False)
            self.tools.append(made)

    def prompt(self) -> str:
        """Instructions and the first observation; "Begin." if both are empty."""
        return "\n\n".join(filter(None, [self._instructions, self._first])) or "Begin."

    @reward
    def total(self) -> float | None:
        """The sum of the server's rewards; None if the server sent no reward."""
        return self._total

    @metric
    def steps(self) -> int:
        """The number of actions that were taken."""
        return self._steps

    async def _act(self, action: Mapping[str, Any]) -> str:
        if self._done:
            raise ToolError("The episode is over.")
        data = await self._exchange("step", action)
        try:
            observation = self._observed(data)
            self._steps += 1
            return observation
        finally:  # a failed call may also end the episode
            self._end_if_done()

    async def _call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        return await self._act({"type": _TOOL_CALL, "tool_name": name, "arguments": dict(arguments)})

    def _end_if_done(self) -> None:
        if self._done:
            self.episode.end("done")

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> str:
        """Send a message and return the observation of the answer as text."""
        return self._observed(await self._exchange(kind, data))

    async def _exchange(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a message and return the answer.

        Answers have no request id. Therefore no message can be sent after a call that was cut, since the next answer
        may belong to that call.

        Raises:
            ServerFailed: the server is gone or failed, or an earlier call was cut.
            ToolError: the message does not fit the server's schema.
        """
        if self._is_cut:
            raise ServerFailed(f"OpenEnv server {self._url}: an earlier call was cut: raise tool_seconds.")
        self._is_cut = True
        try:
            # A server that refuses the session sends a reason and closes the connection. The reason is read below.
            with suppress(self._websockets.ConnectionClosed):
                await self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
            answer = json.loads(await self._socket.recv())
        except (OSError, self._websockets.WebSocketException) as error:
            raise self._failed("cannot be reached any more", error) from error
        except ValueError as error:
            raise self._failed("sent an answer that is not JSON", error) from error
        self._is_cut = False
        if answer.get("type") == "error":
            raise self._error(answer.get("data") or {})
        if answer.get("type") != "observation":
            raise ServerFailed(f"OpenEnv server {self._url} answered {kind!r} with {answer!r:.200}.")
        return dict(answer["data"])

    def _observed(self, data: Mapping[str, Any]) -> str:
        gained = data.get("reward")
        if gained is not None:
            self._total = (self._total or 0.0) + float(gained)
        self._done = bool(data.get("done"))
        observation = {name: each for name, each in data.get("observation", {}).items() if name != "metadata"}
        if "tool_name" in observation:
            return _tool_result(observation)
        if len(observation) == 1 and isinstance(only := next(iter(observation.values())), str):
            return only
        return json.dumps(observation, ensure_ascii=False)

    def _error(self, data: Mapping[str, Any]) -> ServerFailed | ToolError:
        text = f"{data.get('message', 'no message')} {data.get('errors', '')}".strip()
        if data.get("code") == _REFUSED:
            return ToolError(text)
        return ServerFailed(f"OpenEnv server {self._url} failed ({data.get('code')}): {text:.300}")

    def _failed(self, what: str, error: BaseException) -> ServerFailed:
        cause = unwrapped(error)
        return ServerFailed(f"OpenEnv server {self._url} {what} ({type(cause).__name__}: {first_line(cause):.200})")


def _tool_result(observation: Mapping[str, Any]) -> str:
    """Return the text of a tool's result.

    Raises:
        ToolError: the call failed.
    """
    error, result = observation.get("error"), observation.get("result") or {}
    if error:
        raise ToolError(str(error.get("message", error)))
    content = result.get("content", []) if isinstance(result, Mapping) else [{"text": str(result)}]
    text = "\n".join(part.get("text") or f"[{part.get('type', 'content')}]" for part in content)
    if isinstance(result, Mapping) and result.get("is_error"):
        raise ToolError(text)
    return text
