"""The host of a shared engine: each client gets the events of its streams in batches."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Final, TypeAlias, cast

import anyio

from runner.cluster.engine_process import EngineProcess
from runner.engines.base import BaseEngine, Delta, Engine, EngineStats, Finish, GenerationRequest, Session
from runner.errors import DeltarunnerError, EngineDead

__all__ = [
    "STATS_SECONDS",
    "Ended",
    "EngineHost",
    "SentRequest",
    "StreamBatch",
    "StreamBuffer",
    "StreamEvent",
    "each_of",
]


@dataclass(frozen=True, slots=True)
class Ended:
    rest: list[Delta]
    """The deltas that the host had not read when it left the stream."""
    finish: Finish | None


StreamEvent: TypeAlias = Delta | Ended | DeltarunnerError | None
"""An event of a stream: a delta, the stream's end, or its error. None reports that the request was admitted."""


@dataclass(eq=False, slots=True)
class Deltas:
    """Deltas that have only ids and log-probabilities, in order.

    They are stored as columns, since there are thousands of them, and objects take several times as long to send and to
    read.
    """

    numbers: array[int] = field(default_factory=lambda: array("q"))
    """The number of the stream of each delta, shape [deltas]."""
    counts: array[int] = field(default_factory=lambda: array("i"))
    """Number of ids of each delta, shape [deltas]."""
    ids: array[int] = field(default_factory=lambda: array("i"))
    """The ids of all deltas, shape [ids]."""
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    """The log-probability of each id in nats, shape [ids]."""

    def add(self, number: int, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        self.numbers.append(number)
        self.counts.append(len(ids))
        self.ids.extend(ids)
        self.logprobs.extend(logprobs)

    def __iter__(self) -> Iterator[tuple[int, Delta]]:
        ids, logprobs = self.ids.tolist(), self.logprobs.tolist()
        spans = pairwise(accumulate(self.counts, initial=0))
        for number, (start, end) in zip(self.numbers, spans, strict=True):
            yield number, Delta(ids[start:end], logprobs[start:end])


StreamBatch: TypeAlias = list[tuple[int, StreamEvent] | Deltas]
"""Events of many streams, each with the number of its stream, in order."""


def each_of(batch: StreamBatch) -> Iterator[tuple[int, StreamEvent]]:
    """Yield each event of a batch with the number of its stream, in order."""
    for item in batch:
        if isinstance(item, Deltas):
            yield from item
        else:
            yield item


def _is_plain(delta: Delta) -> bool:
    """Return True if the delta has only ids and log-probabilities."""
    return delta.logprobs is not None and delta.finish is None and delta.top is None and delta.side is None


class StreamBuffer:
    """Events of streams since the last `take`."""

    def __init__(self) -> None:
        self._batch: StreamBatch = []

    def __bool__(self) -> bool:
        return bool(self._batch)

    def put(self, number: int, event: StreamEvent) -> None:
        batch = self._batch
        if isinstance(event, Delta) and _is_plain(event):
            if not batch or not isinstance(batch[-1], Deltas):
                batch.append(Deltas())
            last = batch[-1]
            assert isinstance(last, Deltas), "it was added above"
            last.add(number, event.token_ids, event.logprobs or ())
        else:
            batch.append((number, event))

    def take(self) -> StreamBatch:
        """Return all events, and clear the buffer."""
        taken, self._batch = self._batch, []
        return taken


STATS_SECONDS: Final = 1.0
"""Seconds between two requests of a client for the statistics. These requests also prove that the client is alive."""

SILENT_SECONDS: Final = 90.0
"""Seconds without a request after which a client is dropped, so that a dead process keeps no memory in the engine."""


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request as the host receives it. Sessions have numbers, since objects have no identity across processes."""

    request: GenerationRequest
    session: int | None
    late: bool
    beside: int | None


@dataclass(eq=False, slots=True)
class _HostClient:
    last_request: float
    """Time of its last request, in seconds of the host's clock, which stops while the host is suspended."""
    buffer: StreamBuffer = field(default_factory=StreamBuffer)
    """Events of its streams since its last read."""
    some: anyio.Event = field(default_factory=anyio.Event)
    """Set when the buffer has events."""
    streams: dict[int, anyio.CancelScope] = field(default_factory=dict)
    cut: dict[int, float] = field(default_factory=dict)
    """Streams that were cut before they began or after they ended, with the time of the cut."""
    sessions: dict[int, Session] = field(default_factory=dict)

    def send(self, number: int, event: StreamEvent) -> None:
        if not self.buffer:
            self.some.set()
        self.buffer.put(number, event)


class EngineHost(EngineProcess):
    """The host of one engine for many clients. Each client numbers its own streams and sessions."""

    def __init__(self, engine: BaseEngine) -> None:
        super().__init__(engine)
        self._clients: dict[str, _HostClient] = {}
        self._running_seconds = 0.0
        self._last_request = 0.0

    async def greet(self, client_name: str) -> None:
        """Register a client. Only registered clients receive events."""
        self._clients[client_name] = _HostClient(self._running_seconds)

    def _note_request(self, client_name: str) -> _HostClient:
        if client_name not in self._clients:
            raise EngineDead(
                f"the engine got no request from this client for {SILENT_SECONDS:g} s, and closed its connection: "
                "enter the engine again."
            )
        now = anyio.current_time()
        # While this process is suspended, it receives no requests. This time must not count as silence of a client,
        # so each request moves the host's clock forward by at most two intervals (`STATS_SECONDS`).
        self._running_seconds += min(now - self._last_request, 2 * STATS_SECONDS)
        self._last_request = now
        client = self._clients[client_name]
        client.last_request = self._running_seconds
        return client

    def _drop_silent_clients(self, client: _HostClient) -> None:
        client.cut = {
            number: since for number, since in client.cut.items() if self._running_seconds - since < SILENT_SECONDS
        }
        for name in [
            name for name, other in self._clients.items() if self._running_seconds - other.last_request > SILENT_SECONDS
        ]:
            self._let_go(name)

    async def stream(self, client_name: str, number: int, sent: SentRequest) -> None:
        """Sample a request to its end, or until it is cut. Its events go into the client's buffer."""
        client = self._clients.get(client_name)
        if client is None:
            return
        engine = self.engine
        assert isinstance(engine, Engine), "a host has an engine of token ids"
        with anyio.CancelScope() as scope:
            client.streams[number] = scope
            if client.cut.pop(number, None) is not None:  # the cut arrived before the request
                scope.cancel()
            try:
                request = replace(sent.request, session=self._session(client, sent))
                stream = engine.stream(request)
                try:
                    async with stream:
                        client.send(number, None)
                        async for delta in stream:
                            client.send(number, delta)
                finally:
                    client.send(number, Ended(list(stream.rest), stream.finish))
            except DeltarunnerError as error:
                client.send(number, error)
        del client.streams[number]

    def _session(self, client: _HostClient, sent: SentRequest) -> Session | None:
        if sent.session is None:
            return None
        if sent.session not in client.sessions:
            beside = client.sessions.get(sent.beside) if sent.beside is not None else None
            client.sessions[sent.session] = self.engine.session(late=sent.late, beside=beside)
        return client.sessions[sent.session]

    async def cut(self, client_name: str, number: int) -> None:
        """End a stream. This call may arrive before the request of the stream, or after the end of the stream."""
        client = self._clients.get(client_name)
        if client is None:
            return
        if number in client.streams:
            client.streams[number].cancel()
        else:
            client.cut[number] = self._running_seconds

    async def event(self, client_name: str) -> StreamBatch:
        """Wait for events of this client's streams, and return all events since the last call.

        The result is [] if the client is removed during the wait.

        Raises:
            EngineDead: the client was removed before this call.
        """
        client = self._note_request(client_name)
        await client.some.wait()
        if self._clients.get(client_name) is not client:
            return []
        client.some = anyio.Event()
        return client.buffer.take()

    async def close_session(self, client_name: str, session: int) -> None:
        """Release a session's memory."""
        client = self._clients.get(client_name)
        closed = client.sessions.pop(session, None) if client is not None else None
        if closed is not None:
            self.engine.close_session(closed)

    async def leave(self, client_name: str) -> None:
        """Remove a client: cut its streams, close its sessions."""
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
        """Return the engine's statistics, for all clients together.

        Raises:
            EngineDead: this client was dropped.
        """
        # Silent clients are dropped here and not at each event, since there are many events per second.
        self._drop_silent_clients(self._note_request(client_name))
        return self.engine.stats()

    async def call(self, name: str, *arguments: Any) -> Any:
        """Call one of the engine's other methods, such as `health`, and await its answer if it is asynchronous."""
        return await getattr(self.engine, name)(*arguments)

    async def score(self, ids: Sequence[int], named: Mapping[str, Any]) -> list[float]:
        """Return the engine's log-probabilities of given ids; `named` has the keyword arguments of `Engine.score`."""
        return await cast("Engine", self.engine).score(ids, **named)
