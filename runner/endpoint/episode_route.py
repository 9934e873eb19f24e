"""The route of an episode in the run's HTTP server, and the interface of the episode that answers its requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import anyio

from runner.chat_requests import ChatCall
from runner.endpoint.refusals import Reason, Refused, ended
from runner.history_cache import HistoryCache
from runner.trajectory import Turn
from runner.turn_events import DeliverTurn, TurnEventSink

__all__ = ["EpisodeRoute", "RequestHandler"]


class RequestHandler(Protocol):
    """The interface of an episode that answers requests with whole histories. `ServedEpisode` implements it."""

    async def ask(
        self, chat_call: ChatCall, *, sink: TurnEventSink | None = None, deliver: DeliverTurn | None = None
    ) -> Turn:
        """Answer a request; see `ChatService.ask`."""
        ...

    async def count(self, chat_call: ChatCall) -> int:
        """Return the number of ids in the prompt of a request."""
        ...

    def text_of(self, ids: Sequence[int], /) -> str:
        """Return the text of ids."""
        ...


class EpisodeRoute:
    """Route from one API key to its episode. A route that is shut refuses every request, since the episode is over.

    Args:
        handler: answers the requests.
        model: name of the model.
        context: maximum context of the model, in ids.
        max_requests: maximum number of requests in flight.
    """

    def __init__(self, handler: RequestHandler, *, model: str, context: int, max_requests: int) -> None:
        self.handler = handler
        """The episode that answers."""
        self.model = model
        """Name of the model."""
        self.context = context
        """Maximum number of ids of prompt and answer together."""
        self.max_requests = max_requests
        """Maximum number of requests in flight."""
        self.seen = defaultdict[str, HistoryCache[Any]](HistoryCache)
        """Caches of histories that were read for earlier requests, by the name of their wire form."""
        self.in_flight = 0
        """Number of requests in flight."""
        self._scopes: set[anyio.CancelScope] = set()
        self.on_over: Callable[[], None] = _nothing
        """Called when a client ends the episode, and when an answer is refused because the episode is over."""
        self.ended = anyio.Event()
        """Set once a client ended the episode."""
        self.end_body: Mapping[str, Any] = {}
        """The body of the request that ended the episode."""
        self.is_shut = False
        """True if every request is refused."""

    def shut(self) -> None:
        """Refuse all further requests, and cut the requests in flight."""
        self.is_shut = True
        for scope in self._scopes:
            scope.cancel()

    @property
    def is_full(self) -> bool:
        """True if the limit of requests in flight is reached."""
        return self.in_flight >= self.max_requests

    def busy(self) -> Refused:
        """Return the refusal for a full route."""
        return Refused(Reason.BUSY, f"{self.max_requests} requests of this key are in flight: wait for one of them.")

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Count a request as in flight while the block runs.

        Raises:
            Refused: the route is shut, a client ended the episode, or too many requests are in flight.
        """
        if self.is_shut or self.ended.is_set():
            raise ended()
        if self.is_full:
            raise self.busy()
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    @contextmanager
    def cutting(self, scope: anyio.CancelScope) -> Iterator[None]:
        """Cancel the scope if the route is shut while the block runs."""
        self._scopes.add(scope)
        try:
            yield
        finally:
            self._scopes.remove(scope)

    def end(self, body: Mapping[str, Any]) -> None:
        """End the episode for clients. Requests in flight are answered, and further ones are refused."""
        self.end_body = body
        self.ended.set()
        self.on_over()


def _nothing() -> None:
    pass
