"""Shared use of an engine: the first user enters the engine, and closes it after the last user has left."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import anyio
from anyio.lowlevel import current_token

from runner.engines.base import BaseEngine
from runner.errors import BadOption

__all__ = ["ensure_running"]

_ELSEWHERE = (
    "this {engine} was entered on another event loop, and works only there. Leave out `async with`, so that the run "
    "enters the engine, or enter the engine on the event loop of the run. In an async test, use "
    "`await play_async(...)`, and fixtures on the loop of the test. The fixture `real_engine` works from any loop."
)


@dataclass(slots=True)
class _Entered:
    """State of an engine that one of its users entered."""

    guests: int = 0
    """Number of users, except the user that entered the engine."""
    open: bool = False
    """True after the start and before the close."""
    started: anyio.Event = field(default_factory=anyio.Event)
    """Set after the start or its failure."""
    left: anyio.Event = field(default_factory=anyio.Event)
    """Set when the last user in `guests` leaves."""
    closed: anyio.Event = field(default_factory=anyio.Event)
    """Set after the close."""


_ENTERED: WeakKeyDictionary[BaseEngine, _Entered] = WeakKeyDictionary()


@asynccontextmanager
async def ensure_running(engine: BaseEngine) -> AsyncIterator[None]:
    """Ensure that the engine runs within this block: enter it unless it is running.

    The first of several concurrent blocks enters and leaves the engine, both in its own task; before it leaves, it
    waits for the others.

    Raises:
        BadOption: the engine runs on another event loop.
        EngineError, BadInput: the engine does not start.
    """
    while (entered := _ENTERED.get(engine)) is not None:
        if entered.open:
            async with _guest(entered):
                yield
            return
        # The engine is starting or closing. The state is checked again afterwards, since another waiting task may enter
        # the engine first.
        await (entered.closed if entered.started.is_set() else entered.started).wait()
    if engine.running:
        if engine.loop not in (None, current_token()):
            raise BadOption(_ELSEWHERE.format(engine=type(engine).__name__))
        yield
        return
    async with _host(engine):
        yield


@asynccontextmanager
async def _guest(entered: _Entered) -> AsyncIterator[None]:
    entered.guests += 1
    try:
        yield
    finally:
        entered.guests -= 1
        if not entered.guests:
            entered.left.set()


@asynccontextmanager
async def _host(engine: BaseEngine) -> AsyncIterator[None]:
    entered = _ENTERED[engine] = _Entered()
    try:
        async with engine:
            entered.open = True
            entered.started.set()
            try:
                yield
                # The wait is a loop, since another user may arrive before this task runs.
                while entered.guests:
                    entered.left = anyio.Event()
                    await entered.left.wait()
            finally:
                entered.open = False
    finally:
        del _ENTERED[engine]
        entered.started.set()
        entered.closed.set()
