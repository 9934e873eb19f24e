"""The HTTP server of a run, on the run's event loop. It listens once an episode is served."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import resource
import socket
import sys
from asyncio import TimerHandle, Transport
from collections.abc import AsyncIterator, Iterator
from contextvars import Context
from types import TracebackType
from typing import Any, Final, Self

import anyio
from anyio.abc import TaskGroup

from runner.concurrency.clocks import require_asyncio
from runner.endpoint.application import KEY_KNOWN_EXTENSION, Application
from runner.endpoint.episode_route import EpisodeRoute
from runner.errors import BadOption

__all__ = ["EndpointServer", "Listen", "parse_listen"]

Listen = tuple[str, int]
"""Host and port; port 0 takes any free one."""

MAX_CONNECTIONS: Final = 2_000
"""Maximum number of connections; half of the limit of open files, if this half is lower.

A further connection replaces the oldest connection without a valid key, or else the connection that has been idle
longest. If all connections are in use, the further connection is closed.
"""

HEADER_SECONDS: Final = 20.0
"""Longest time for the head of a request to arrive, and for the first request of a connection to begin."""

HEADER_BYTES: Final = 64 * 1024
"""Maximum size of the head of a request."""

STOP_SECONDS: Final = 3.0
"""Longest time for the server to stop. The remaining connections are then abandoned."""

IDLE_SECONDS: Final = 75
"""Time after which an idle connection is closed."""

ANSWER_DRAIN_SECONDS: Final = 0.2
"""Time for a client to read the end of its answer once the run is over."""


def parse_listen(text: str) -> Listen:
    """Parse `HOST:PORT`, `HOST` or `:PORT`.

    Raises:
        BadOption: the text has another form.
    """
    if not isinstance(text, str):
        raise BadOption(f"listen={text!r:.60}: give HOST:PORT, such as 127.0.0.1:8000 or 0.0.0.0:0.")
    host, _, port = text.rpartition(":") if text.rpartition(":")[2].isdigit() else (text, "", "0")
    if int(port) > 65535 or " " in host:
        raise BadOption(f"listen={text!r:.60}: give HOST:PORT, such as 127.0.0.1:8000 or 0.0.0.0:0.")
    return host.strip("[]") or "127.0.0.1", int(port)


class EndpointServer:
    """The HTTP server of the episodes of one run.

    Args:
        listen: the address. Anyone who can reach it and has a key can use the model.
    """

    def __init__(self, listen: str = "127.0.0.1:0") -> None:
        self._listen = parse_listen(listen)
        self._group: TaskGroup | None = None
        self._application: Application | None = None
        self._server: Any = None
        self._stopped = anyio.Event()
        self.draining = anyio.Event()
        """Set once the run begins no further episode."""
        self.url = ""
        """The URL of the server; "" before the first episode is served."""

    async def __aenter__(self) -> Self:
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        group, self._group = self._group, None
        assert group is not None
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True
            with anyio.move_on_after(STOP_SECONDS, shield=True):
                await self._stopped.wait()
        try:
            await group.__aexit__(kind, error, traceback)
        except BaseExceptionGroup as left:
            if left.exceptions != (error,):  # errors of the block pass unchanged
                raise

    @contextlib.contextmanager
    def serving(self, route: EpisodeRoute) -> Iterator[tuple[str, str]]:
        """Serve a route while the block runs. Yield its key, and the second key that ends the episode.

        Raises:
            BadOption: nothing can listen at the address, or a library of the server is not installed.
        """
        application = self._application or self._start()
        keys = application.open(route)
        try:
            yield keys
        finally:
            application.shut(*keys)

    @contextlib.asynccontextmanager
    async def accepting(self, listener: socket.socket) -> AsyncIterator[None]:
        """While the block runs, also accept connections from a socket that listens at 127.0.0.1 in a sandbox."""
        assert self._application is not None
        self._application.hosts |= {f"127.0.0.1:{listener.getsockname()[1]}"}
        config, state = self._server.config, self._server.server_state
        if not config.loaded:  # the server's task has not begun yet
            config.load()

        def protocol() -> Any:
            return config.http_protocol_class(config=config, server_state=state, app_state={})

        further = await asyncio.get_running_loop().create_server(protocol, sock=listener)
        try:
            yield
        finally:
            further.close()

    def _start(self) -> Application:
        if self._group is None:
            raise RuntimeError("the server of the run is not entered: serve an episode while its run plays it")
        require_asyncio("an endpoint")
        host, port = self._listen
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        both = host == "::" and socket.has_dualstack_ipv6()
        try:
            bound = socket.create_server((host, port), family=family, dualstack_ipv6=both)
        except OSError as error:
            raise BadOption(
                f"listen={host}:{port}: nothing can listen there ({error}): give another address."
            ) from None
        bound.setblocking(False)
        port = bound.getsockname()[1]
        names = (
            {host, "localhost", "127.0.0.1", "::1"}
            if host in ("127.0.0.1", "localhost", "0.0.0.0", "::", "::1")
            else {host}
        )
        if host in ("0.0.0.0", "::"):
            names |= {socket.gethostname(), socket.getfqdn()}
        shown = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1" if both else "::1"}.get(host, host)
        self.url = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}"
        hosts = [f"{f'[{name}]' if ':' in name else name}:{port}".lower() for name in names]
        application = Application(hosts, any_address=host in ("0.0.0.0", "::"))
        try:
            self._server = _server(application)
        except BadOption:
            bound.close()
            raise
        self._application = application
        # The server has a separate context, since it outlives the first episode, whose clocks must not apply to it.
        Context().run(self._group.start_soon, self._serve, bound)
        return application

    async def _serve(self, bound: socket.socket) -> None:
        try:
            await self._server.serve([bound])
        finally:
            self._stopped.set()


def _server(application: Application) -> Any:  # noqa: C901  # the function has a class, whose base is optional
    """Return the HTTP server.

    Raises:
        BadOption: uvicorn or httptools is not installed.
    """
    try:
        import uvicorn
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        raise BadOption("an endpoint needs uvicorn and httptools: pip install 'deltarunner[serve]'.") from None

    # Connections get half of the files. A quarter is for sockets that are accepted but not yet counted, and a quarter
    # is for the run itself.
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] % sys.maxsize  # the limit is -1 if there is none
    connections = min(MAX_CONNECTIONS, files // 2)
    # Connections that may be closed to make room for a new one. Connections without a key come first, the oldest first;
    # then come idle connections, the longest idle first.
    keyless, idle = dict["Protocol", None](), dict["Protocol", None]()

    class Protocol(HttpToolsProtocol):
        """A connection. It is closed if the head of a request is too late or too large; see also `MAX_CONNECTIONS`."""

        _unread = 0

        def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # as in uvicorn
            super().connection_made(transport)
            # An event loop sets TCP_NODELAY only on sockets that were created with a protocol number. Without it, a
            # request whose body is sent separately waits for 40 ms.
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._late: TimerHandle | None = None
            self._in_head = False
            self._hurry()
            if len(self.connections) > connections:
                oldest = next(itertools.chain(keyless, idle, [self]))
                oldest._forget()
                oldest.transport.abort()
                if oldest is self:
                    return
            keyless[self] = None

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            # The parser reports a URL or a header only when it is complete, so the bytes of an incomplete one are
            # counted here.
            self._unread = self._unread + len(data) if self._in_head else 0
            self._within(self._unread)

        def on_message_begin(self) -> None:
            self._head, self._in_head = 0, True
            self._hurry()
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            self._grow(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._grow(len(name) + len(value))
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._in_time()
            self.scope["extensions"] = {KEY_KNOWN_EXTENSION: {"callback": self._is_known}}
            super().on_headers_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self not in keyless and not self.transport.is_closing():
                idle[self] = None

        def connection_lost(self, exc: Exception | None) -> None:
            self._in_time()
            self._forget()
            super().connection_lost(exc)

        @property
        def is_answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _is_known(self) -> None:
            """Record that a request came with the key of an episode."""
            self._forget()

        def _forget(self) -> None:
            keyless.pop(self, None)
            idle.pop(self, None)

        def _grow(self, size: int) -> None:
            self._head += size
            self._within(self._head)

        def _within(self, size: int) -> None:
            if size > HEADER_BYTES:
                self.transport.abort()

        def _hurry(self) -> None:
            if self._late is None:
                self._late = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

        def _in_time(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    class Server(uvicorn.Server):
        """A server that leaves Ctrl-C to the run, and stops after all answers are cut."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            state = self.server_state
            with anyio.move_on_after(ANSWER_DRAIN_SECONDS):
                while state.tasks:
                    await asyncio.wait(list(state.tasks))
            # Clients have been notified by now that their episodes are over, except for clients that do not read.
            for connection in list(state.connections):
                if isinstance(connection, Protocol) and connection.is_answering:
                    connection.transport.abort()
            await super().shutdown(sockets)
            if state.tasks:
                await asyncio.wait(list(state.tasks))

    # The server's warnings, such as about a request that is not HTTP, would be printed into the run's display.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    return Server(
        uvicorn.Config(
            application,
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=min(MAX_CONNECTIONS, files // 4),
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=1,
        )
    )
