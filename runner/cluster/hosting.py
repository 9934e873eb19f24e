"""An engine that many processes ask: what each of its streams says goes to who asked in one message a tick."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import anyio

from runner.cluster.engine_process import EngineProcess
from runner.cluster.news import Bulletin, Ended, News, Outbox
from runner.engines.base import BaseEngine, Engine, EngineStats, GenerationRequest, Session
from runner.errors import DeltarunnerError, EngineDead

__all__ = ["STATS_SECONDS", "EngineHost", "Sent"]

STATS_SECONDS: Final = 1.0
"""Each client asks this often what the engine does, and so says that it is there."""

SILENT: Final = 90.0
"""A client that was not heard for so many seconds is let go: a process that died says nothing, and holds room."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A request, as the host gets it. A session goes by a number: the same object is another one in each process."""

    request: GenerationRequest
    session: int | None
    late: bool
    beside: int | None


@dataclass(eq=False, slots=True)
class _Client:
    """One who asks."""

    heard: float
    """When it was heard last, in the seconds that its host has listened."""
    outbox: Outbox = field(default_factory=Outbox)
    """What its streams said since it last heard."""
    some: anyio.Event = field(default_factory=anyio.Event)
    """Set when there is some."""
    streams: dict[int, anyio.CancelScope] = field(default_factory=dict)
    cut: dict[int, float] = field(default_factory=dict)
    """Streams that were to be left when they had not begun, or were over, and when that was said."""
    sessions: dict[int, Session] = field(default_factory=dict)

    def tell(self, number: int, news: News) -> None:
        if not self.outbox:
            self.some.set()
        self.outbox.put(number, news)


class EngineHost(EngineProcess):
    """Serves one engine to many clients. A number of a stream or a session is its client's own."""

    def __init__(self, engine: BaseEngine) -> None:
        super().__init__(engine)
        self._clients: dict[str, _Client] = {}
        self._listened = 0.0
        self._last_heard = 0.0

    async def greet(self, client_name: str) -> None:
        """A client comes; those who do not, or have left, are told of nothing."""
        self._clients[client_name] = _Client(self._listened)

    def _hear(self, client_name: str) -> _Client:
        """Take note that a client is there."""
        if client_name not in self._clients:
            raise EngineDead(f"it did not hear of this process for {SILENT:g} s, and let it go")
        now = anyio.current_time()
        # Only so much of each pause counts: while this process itself stood still, it heard nobody.
        self._listened += min(now - self._last_heard, 2 * STATS_SECONDS)
        self._last_heard = now
        client = self._clients[client_name]
        client.heard = self._listened
        return client

    def _let_the_silent_go(self, client: _Client) -> None:
        client.cut = {number: said for number, said in client.cut.items() if self._listened - said < SILENT}
        for name in [name for name, other in self._clients.items() if self._listened - other.heard > SILENT]:
            self._let_go(name)

    async def stream(self, client_name: str, number: int, sent: Sent) -> None:
        """Sample a request to its end, or until it is cut; what it says is among the client's news."""
        client = self._clients.get(client_name)
        if client is None:
            return
        engine = self.engine
        assert isinstance(engine, Engine), "a host has an engine of token ids"
        with anyio.CancelScope() as scope:
            client.streams[number] = scope
            if client.cut.pop(number, None) is not None:  # the word of it was faster
                scope.cancel()
            try:
                request = replace(sent.request, session=self._session(client, sent))
                stream = engine.stream(request)
                try:
                    async with stream:
                        client.tell(number, None)
                        async for delta in stream:
                            client.tell(number, delta)
                finally:
                    client.tell(number, Ended(list(stream.rest), stream.finish))
            except DeltarunnerError as error:
                client.tell(number, error)
        del client.streams[number]

    def _session(self, client: _Client, sent: Sent) -> Session | None:
        if sent.session is None:
            return None
        if sent.session not in client.sessions:
            beside = client.sessions.get(sent.beside) if sent.beside is not None else None
            client.sessions[sent.session] = self.engine.session(late=sent.late, beside=beside)
        return client.sessions[sent.session]

    async def cut(self, client_name: str, number: int) -> None:
        """Leave a stream, wherever it stands."""
        client = self._clients.get(client_name)
        if client is None:
            return
        if number in client.streams:
            client.streams[number].cancel()
        else:
            client.cut[number] = self._listened

    async def news(self, client_name: str) -> Bulletin:
        """What this client's streams have said since it last asked, as soon as there is any; nothing once it has left.

        Raises:
            EngineDead: it was let go.
        """
        client = self._hear(client_name)
        await client.some.wait()
        if self._clients.get(client_name) is not client:
            return []
        client.some = anyio.Event()
        return client.outbox.take()

    async def close_session(self, client_name: str, session: int) -> None:
        """Give a session's room back."""
        client = self._clients.get(client_name)
        closed = client.sessions.pop(session, None) if client is not None else None
        if closed is not None:
            self.engine.close_session(closed)

    async def leave(self, client_name: str) -> None:
        """A client is gone: its streams are cut, its sessions closed."""
        self._let_go(client_name)

    def _let_go(self, client_name: str) -> None:
        client = self._clients.pop(client_name, None)
        if client is None:
            return
        client.some.set()
        for scope in client.streams.values():
            scope.cancel()
        for session in client.sessions.values():
            self.engine.close_session(session)

    async def stats(self, client_name: str) -> EngineStats:
        """What the engine is doing, for all clients together.

        Raises:
            EngineDead: this client was let go.
        """
        # Here and not at each news, of which there are many a second.
        self._let_the_silent_go(self._hear(client_name))
        return self.engine.stats()

    async def call(self, name: str, *arguments: Any) -> Any:
        """One of the engine's calls that answer at once or later, such as `health`."""
        return await getattr(self.engine, name)(*arguments)

    async def score(self, ids: Sequence[int], named: Mapping[str, Any]) -> list[float]:
        """The engine's log-probabilities of given ids; `named` are the arguments of its `score` besides."""
        return await cast("Engine", self.engine).score(ids, **named)
