"""Resources that one hook opens and another closes, the environments that use them, and their play."""

from __future__ import annotations

import asyncio
import functools
import os
import sqlite3
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import httpx
from mcp import Client, ClientSession, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from websockets.asyncio.client import connect
from websockets.asyncio.server import serve

from runner import Conversation, Environment, Outcome, Run, Task, Trajectory, Turn, reward, tool
from runner.testing import ScriptedEngine, call
from tests.playing import tasks

Use = Callable[[], Awaitable[object]]
"""Function that uses an open resource, and fails if the resource is dead."""

SERVER = str(Path(__file__).with_name("mcp_server.py"))
STDIO = StdioServerParameters(command=sys.executable, args=[SERVER])


# --- resources


@asynccontextmanager
async def asyncio_group() -> AsyncIterator[Use]:
    asked, answers = asyncio.Queue[int](), asyncio.Queue[int]()

    async def serve_() -> None:
        while True:
            answers.put_nowait(await asked.get() + 1)

    async def use() -> None:
        asked.put_nowait(1)
        assert await answers.get() == 2

    async with asyncio.TaskGroup() as group:
        task = group.create_task(serve_())
        yield use
        task.cancel()


@asynccontextmanager
async def anyio_group() -> AsyncIterator[Use]:
    send, receive = anyio.create_memory_object_stream[anyio.Event](0)

    async def serve_() -> None:
        async for answered in receive:
            answered.set()

    async def use() -> None:
        answered = anyio.Event()
        await send.send(answered)
        await answered.wait()

    async with send, receive, anyio.create_task_group() as group:
        group.start_soon(serve_)
        yield use
        group.cancel_scope.cancel()


@asynccontextmanager
async def anyio_scope() -> AsyncIterator[Use]:
    with anyio.move_on_after(1000):
        yield functools.partial(anyio.sleep, 0)


@asynccontextmanager
async def asyncio_timeout() -> AsyncIterator[Use]:
    async with asyncio.timeout(1000):
        yield functools.partial(asyncio.sleep, 0)


@asynccontextmanager
async def mcp_stdio() -> AsyncIterator[Use]:
    async with stdio_client(STDIO) as streams, ClientSession(*streams) as session:
        await session.initialize()

        async def use() -> None:
            assert (await session.call_tool("add", {"a": 1, "b": 2})).content[0].text == "3"  # type: ignore[union-attr]

        yield use


@asynccontextmanager
async def mcp_http() -> AsyncIterator[Use]:
    async with streamable_http_client(http_server()) as streams, ClientSession(*streams[:2]) as session:
        await session.initialize()

        async def use() -> None:
            assert (await session.call_tool("add", {"a": 1, "b": 2})).content[0].text == "3"  # type: ignore[union-attr]

        yield use


@asynccontextmanager
async def mcp_client() -> AsyncIterator[Use]:
    async with Client(STDIO) as client:

        async def use() -> None:
            assert [tool.name for tool in (await client.list_tools()).tools] == ["add", "fail"]

        yield use


@asynccontextmanager
async def http_client() -> AsyncIterator[Use]:
    async with httpx.AsyncClient() as client:

        async def use() -> None:
            assert (await client.get(http_server())).status_code == 400  # the server expects a session

        yield use


@asynccontextmanager
async def aiohttp_session() -> AsyncIterator[Use]:
    async with aiohttp.ClientSession() as session:

        async def use() -> None:
            async with session.get(http_server()) as answer:
                assert answer.status == 400

        yield use


@asynccontextmanager
async def websocket() -> AsyncIterator[Use]:
    async def echo(connection: Any) -> None:
        async for message in connection:
            await connection.send(message)

    async with serve(echo, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        async with connect(f"ws://127.0.0.1:{port}") as connection:

            async def use() -> None:
                await connection.send("there?")
                assert await connection.recv() == "there?"

            yield use


@asynccontextmanager
async def database_pool() -> AsyncIterator[Use]:
    """A pool like `asyncpg`'s: connections in a queue, and a task that keeps them alive."""
    free = asyncio.Queue[sqlite3.Connection]()
    for _ in range(2):
        free.put_nowait(sqlite3.connect(":memory:", check_same_thread=False))

    async def keep_alive() -> None:
        while True:  # noqa: ASYNC110  # as in real pools
            await asyncio.sleep(0.01)

    async def use() -> None:
        connection = await free.get()
        assert await asyncio.to_thread(lambda: connection.execute("select 1").fetchone()) == (1,)
        free.put_nowait(connection)

    renewal = asyncio.create_task(keep_alive())
    try:
        yield use
    finally:
        renewal.cancel()
        while not free.empty():
            free.get_nowait().close()


@asynccontextmanager
async def program() -> AsyncIterator[Use]:
    async with await anyio.open_process(["cat"]) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        async def use() -> None:
            await stdin.send(b"there?")
            assert await stdout.receive() == b"there?"

        yield use
        await stdin.aclose()


OPENED: dict[str, Callable[[], AbstractAsyncContextManager[Use]]] = {
    each.__name__: each
    for each in (
        asyncio_group,
        asyncio_timeout,
        anyio_group,
        anyio_scope,
        mcp_stdio,
        mcp_http,
        mcp_client,
        http_client,
        aiohttp_session,
        websocket,
        database_pool,
        program,
    )
}

ADDRESS: dict[str, Any] = {}


def http_server() -> str:
    """The address of a server that the tests of this file share."""
    return str(ADDRESS["url"])


# --- environments


class Opens(Environment):
    """Environment whose second of three episodes opens a resource in one hook, and uses and closes it in others."""

    def __init__(self, what: str, opens: str, closes: str, *, waits: bool = False) -> None:
        self.what, self.opens, self.closes, self.waits = what, opens, closes, waits
        self.stack = AsyncExitStack()
        self.use: Use | None = None

    def tasks(self) -> list[Task]:
        return tasks(3)

    async def at(self, hook: str) -> None:
        if self.task.id != "t1":
            return
        if self.opens == hook:
            self.use = await self.stack.enter_async_context(OPENED[self.what]())
        elif self.use is not None:
            await self.use()
        if self.closes == hook:
            await self.stack.aclose()
            self.use = None

    async def setup(self) -> None:
        await self.at("setup")

    async def prompt(self) -> str:
        await self.at("prompt")
        return "Go!"

    @tool
    async def first(self) -> str:
        """The first tool."""
        await self.at("first")
        return "done"

    @tool
    async def second(self) -> str:
        """The second tool."""
        await self.at("second")
        return "done"

    async def step(self, turn: Turn) -> None:
        await self.at("step")
        if self.waits and self.task.id == "t1":
            await anyio.sleep_forever()

    @reward
    async def right(self) -> bool:
        await self.at("reward")
        return True

    async def close(self) -> None:
        await self.at("close")


class Loops(Opens):
    """The same environment with an author's own loop."""

    async def rollout(self, conversation: Conversation) -> None:
        await self.at("rollout")
        await super().rollout(conversation)


REPLIES = [call("first"), call("second"), "Done"]


async def played(environment: Environment[Any], replies: Any = REPLIES, **options: Any) -> tuple[list[Trajectory], Run]:
    """Return the trajectories by task, and the run, after checking that no task and no process is left."""
    before = {task.id for task in anyio.get_running_tasks()}
    run = Run(environment, ScriptedEngine(lambda turn: replies[min(turn.turn, len(replies) - 1)]), **options)
    async with run:
        trajectories = [trajectory async for trajectory in run]
    with anyio.fail_after(10):
        while {task.id for task in anyio.get_running_tasks()} - before:  # noqa: ASYNC110  # cancelled tasks end soon
            await anyio.sleep(0.01)
    assert children() == []
    return sorted(trajectories, key=lambda each: each.id), run


SHARED = ("mcp_server.py\x00http", "multiprocessing.resource_tracker")
"""The programs that outlive a test: the server of all tests, and the process that Python starts once."""


def children() -> list[str]:
    """Return the running programs that this process has started, without the ones that all tests share."""
    me, found = os.getpid(), []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            line = (stat.parent / "cmdline").read_text()
        except OSError:
            continue
        if int(parent) == me and state != "Z" and not any(each in line for each in SHARED):
            found.append(line)
    return found


def assert_unharmed(trajectories: list[Trajectory], outcome: Outcome = Outcome.COMPLETED) -> None:
    """Assert the second episode's outcome, that the others are completed, and that all are scored."""
    ended = [(each.outcome, each.error, each.reward) for each in trajectories]
    assert ended == [(each, "", 1.0) for each in (Outcome.COMPLETED, outcome, Outcome.COMPLETED)]
