"""What answers the requests of an endpoint: an episode, as far as an endpoint has to know it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import anyio

from runner.chat_requests import ChatCall
from runner.endpoint.refusals import Reason, Refused, ended
from runner.trajectory import Turn
from runner.turn_events import DeliverTurn, TurnEventSink

__all__ = ["EpisodeRoute", "RequestHandler"]


class RequestHandler(Protocol):
    """An episode that takes requests with whole histories."""

    async def ask(
        self, asked: ChatCall, *, sink: TurnEventSink | None = None, deliver: DeliverTurn | None = None
    ) -> Turn:
        """Have a request answered; see `ChatService.ask`."""
        ...

    async def count(self, asked: ChatCall) -> int:
        """How many ids the prompt of a request has."""
        ...

    def text_of(self, ids: Sequence[int], /) -> str:
        """The text of ids."""
        ...


class EpisodeRoute:
    """Where the requests of one key come in; once it is shut they are told that the episode is over.

    Args:
        handler: what answers them.
        model: the name of the model that answers.
        context: how many ids it can have.
        max_requests: how many requests may be in flight.
    """

    def __init__(self, handler: RequestHandler, *, model: str, context: int, max_requests: int) -> None:
        self.handler = handler
        """The episode that answers."""
        self.model = model
        """The name of the model that answers."""
        self.context = context
        """The number of ids that the model can have."""
        self.max_requests = max_requests
        """The number of requests that may be in flight."""
        self.in_flight = 0
        """The number of requests that are in flight."""
        self._scopes: set[anyio.CancelScope] = set()
        self.on_over: Callable[[], None] = _nothing
        """Is called whenever a client is told that the episode is over."""
        self.ended = anyio.Event()
        """Is set once a client said that its episode is over."""
        self.end_body: Mapping[str, Any] = {}
        """What it said then."""
        self.is_shut = False
        """Whether nothing is answered any more."""

    def shut(self) -> None:
        """Answer nothing any more, and cut what is being answered."""
        self.is_shut = True
        for scope in self._scopes:
            scope.cancel()

    @property
    def is_full(self) -> bool:
        """Whether as many requests are in flight as may be."""
        return self.in_flight >= self.max_requests

    def busy(self) -> Refused:
        """What a client is told where it is full."""
        return Refused(Reason.BUSY, f"{self.max_requests} requests of this key are in flight: wait for one of them.")

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Count a request as in flight inside of the block.

        Raises:
            Refused: the door is shut, a client said that its episode is over, or too many are inside.
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
        """A block in which a scope is cancelled where the door is shut."""
        self._scopes.add(scope)
        try:
            yield
        finally:
            self._scopes.remove(scope)

    def end(self, said: Mapping[str, Any]) -> None:
        """Take a client's word that its episode is over: what is being answered is answered, and nothing further."""
        self.end_body = said
        self.ended.set()
        self.on_over()


def _nothing() -> None:
    pass
