"""An engine that many processes ask: what each of its streams says goes to who asked in one message a tick."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import anyio

from runner.cluster.engine_process import EngineProcess
from runner.engines.base import BaseEngine, Delta, Engine, EngineStats, Finish, GenerationRequest, Session
from runner.errors import DeltarunnerError

__all__ = ["Ended", "EngineHost", "News", "Sent"]


@dataclass(frozen=True, slots=True)
class Sent:
    """A request, as the host gets it. A session goes by a number: the same object is another one in each process."""

    request: GenerationRequest
    session: int | None
    late: bool
    beside: int | None


@dataclass(frozen=True, slots=True)
class Ended:
    """A stream was left."""

    rest: list[Delta]
    """What was drained while it was."""
    finish: Finish | None


News: TypeAlias = Delta | Ended | DeltarunnerError | None
"""What a stream says: a delta, its end, or why it failed; None once its request was let in."""


@dataclass(eq=False, slots=True)
class _Client:
    """One who asks."""

    news: list[tuple[int, News]] = field(default_factory=list)
    """What its streams said since it last heard, each by its number, in order."""
    some: anyio.Event = field(default_factory=anyio.Event)
    """Set when there is some."""
    streams: dict[int, anyio.CancelScope] = field(default_factory=dict)
    cut: set[int] = field(default_factory=set)
    """Streams that were to be left when they had not begun, or were over."""
    sessions: dict[int, Session] = field(default_factory=dict)

    def tell(self, number: int, news: News) -> None:
        self.news.append((number, news))
        self.some.set()


class EngineHost(EngineProcess):
    """Serves one engine to many clients. A number of a stream or a session is its client's own."""

    def __init__(self, engine: BaseEngine, place: str = "") -> None:
        super().__init__(engine, place)
        self._clients: defaultdict[str, _Client] = defaultdict(_Client)

    async def stream(self, client_name: str, number: int, sent: Sent) -> None:
        """Sample a request to its end, or until it is cut; what it says is among the client's news."""
        client = self._clients[client_name]
        engine = self.engine
        assert isinstance(engine, Engine), "a host has an engine of token ids"
        with anyio.CancelScope() as scope:
            client.streams[number] = scope
            if number in client.cut:  # the word of it was faster
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

    async def cut(self, client: str, number: int) -> None:
        """Leave a stream, wherever it stands."""
        known = self._clients[client]
        if number in known.streams:
            known.streams[number].cancel()
        else:
            known.cut.add(number)

    async def news(self, client_name: str) -> list[tuple[int, News]]:
        """What this client's streams have said since it last asked, as soon as there is any."""
        client = self._clients[client_name]
        await client.some.wait()
        news, client.news, client.some = client.news, [], anyio.Event()
        return news

    async def close_session(self, client: str, session: int) -> None:
        """Give a session's room back."""
        closed = self._clients[client].sessions.pop(session, None)
        if closed is not None:
            self.engine.close_session(closed)

    async def leave(self, client_name: str) -> None:
        """A client is gone: its streams are cut, its sessions closed."""
        client = self._clients.pop(client_name, None)
        if client is None:
            return
        for scope in client.streams.values():
            scope.cancel()
        for session in client.sessions.values():
            self.engine.close_session(session)

    async def stats(self) -> EngineStats:
        """What the engine is doing, for all clients together."""
        return self.engine.stats()

    async def call(self, name: str, *arguments: Any) -> Any:
        """One of the engine's calls that answer at once or later, such as `health`."""
        return await getattr(self.engine, name)(*arguments)
