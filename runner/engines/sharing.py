"""Sharing an engine that nobody has entered yet: whoever enters it closes it, once the others are done with it."""

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
    "this {engine} was entered on another event loop, and works on that one alone. Give it unentered: then the "
    "run enters it; or enter it on the loop that plays: in an async test whose fixtures share its loop, with "
    "`await play_async(...)`. In tests, the fixture `real_engine` plays from any loop."
)


@dataclass(slots=True)
class _Entered:
    """An engine that one of its users entered."""

    guests: int = 0
    """How many users there are besides the one that entered it."""
    open: bool = False
    """Whether it has started and is not being closed."""
    started: anyio.Event = field(default_factory=anyio.Event)
    """Set once it has started, or could not."""
    left: anyio.Event = field(default_factory=anyio.Event)
    """Set when the last guest goes."""
    closed: anyio.Event = field(default_factory=anyio.Event)
    """Set once it is over."""


_ENTERED: WeakKeyDictionary[BaseEngine, _Entered] = WeakKeyDictionary()


@asynccontextmanager
async def ensure_running(engine: BaseEngine) -> AsyncIterator[None]:
    """The engine runs within this block: it is entered unless it is running already.

    Of several such blocks at once, the one that came first enters the engine and leaves it, both in its own task;
    before it leaves, it waits for the others.

    Raises:
        BadOption: it runs on another event loop.
        EngineError, BadInput: the engine does not start.
    """
    while (entered := _ENTERED.get(engine)) is not None:
        if entered.open:
            async with _guest(entered):
                yield
            return
        # Starting or closing: then we look again, since whoever waited with us may be the next to enter it.
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
                # In a loop: another guest may come between the last one's leaving and this task's turn.
                while entered.guests:
                    entered.left = anyio.Event()
                    await entered.left.wait()
            finally:
                entered.open = False
    finally:
        del _ENTERED[engine]
        entered.started.set()
        entered.closed.set()
