"""A turn whose text, reasoning and calls an author reads while it is sampled; leaving the block cuts it."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Self, TypeAlias

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from runner.trajectory import Turn
from runner.turn_events import TurnEvent

__all__ = ["StreamedTurn", "stream_turn"]

Generate: TypeAlias = Callable[[Callable[[TurnEvent], None]], Awaitable[Turn]]
"""Samples a turn, and calls its argument with each event."""


class StreamedTurn:
    """A turn while it is sampled: an asynchronous iterator over its events."""

    def __init__(self, events: MemoryObjectReceiveStream[TurnEvent], last: Callable[[], Turn | None]) -> None:
        self._events = events
        self._last = last
        self._before = last()
        self._turn: Turn | None = None
        self._error: Exception | None = None

    @property
    def turn(self) -> Turn:
        """The recorded turn: complete where the iteration reached its end, else what was sampled.

        Raises:
            RuntimeError: the turn is still being sampled, or nothing was sampled.
        """
        self._settle()
        if self._turn is None:
            raise RuntimeError("the turn is not over: iterate to its end, or leave the block, before you ask for it")
        return self._turn

    def _settle(self) -> None:
        """Keep the turn, if there is one, before the agent's next turn."""
        if self._turn is None and (turn := self._last()) is not self._before:
            self._turn = turn

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TurnEvent:
        try:
            return await self._events.receive()
        except anyio.EndOfStream:
            error, self._error = self._error, None
            if error is not None:
                raise error from None
            raise StopAsyncIteration from None


@asynccontextmanager
async def stream_turn(last: Callable[[], Turn | None], generate: Generate) -> AsyncIterator[StreamedTurn]:
    """Sample a turn while the block runs. Leaving the block cuts it.

    Args:
        last: returns the latest turn, or None.
        generate: samples the turn.
    """
    # The queue needs no limit: it holds no more than the turn does, and sampling never waits for its reader.
    on_event, events = anyio.create_memory_object_stream[TurnEvent](math.inf)
    streamed = StreamedTurn(events, last)

    async def sample() -> None:
        with on_event:
            try:
                await generate(on_event.send_nowait)
            except Exception as error:
                streamed._error = error

    left: Exception | None = None
    with events:
        async with anyio.create_task_group() as group:
            group.start_soon(sample)
            try:
                yield streamed
            except Exception as error:  # a task group would wrap it
                left = error
            group.cancel_scope.cancel()
    streamed._settle()
    if left is None:
        left = streamed._error
    if left is not None:
        raise left
