"""A turn that an author hears while it is sampled: iterate over it, or leave it, which cuts it."""

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
"""Samples a turn and tells what it says."""


class StreamedTurn:
    """A turn while it is sampled: an iterator over what it says."""

    def __init__(self, events: MemoryObjectReceiveStream[TurnEvent], last: Callable[[], Turn | None]) -> None:
        self._events = events
        self._last = last
        self._before = last()
        self._turn: Turn | None = None
        self._error: Exception | None = None

    @property
    def turn(self) -> Turn:
        """The turn as it was recorded: whole where the iteration came to its end, else what was sampled of it.

        Raises:
            RuntimeError: it is still being sampled, or nothing was.
        """
        self._settle()
        if self._turn is None:
            raise RuntimeError("the turn is not over: iterate to its end, or leave the block, before you ask for it")
        return self._turn

    def _settle(self) -> None:
        """Take the turn, if it is there, before the agent speaks again."""
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
    """Sample a turn, which becomes the `last` one, while the block runs and no longer."""
    # It holds no more than the turn does, and the sampling never waits for whoever listens.
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
