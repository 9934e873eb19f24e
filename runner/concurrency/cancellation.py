"""Cancellation that a scope asked for, told from one that the author's code made of its own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import anyio

from runner.concurrency.clocks import a_clock_has_fired

__all__ = ["cancellation_is_asked_for", "forget_native_cancellation", "native_cancellation_as", "to_its_end"]

ResultT = TypeVar("ResultT")


def cancellation_is_asked_for() -> bool:
    """Whether a cancel scope around the current task is cancelled, or a clock over it has fired."""
    # anyio gives a cancelled scope the deadline minus infinity, on every event loop alike.
    return anyio.current_effective_deadline() == -math.inf or a_clock_has_fired()


def forget_native_cancellation() -> None:
    """Take back what `asyncio.Task.cancel()` left in the current task; later scopes would count it as theirs."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # another event loop than asyncio's
        return
    while task is not None and task.cancelling():
        task.uncancel()


@contextmanager
def native_cancellation_as(failure: Exception) -> Iterator[None]:
    """Raise `failure` where the author's code lets out a cancellation that no scope asked for."""
    try:
        yield
    except anyio.get_cancelled_exc_class() as error:
        if cancellation_is_asked_for():
            raise
        forget_native_cancellation()
        raise failure from error


async def to_its_end(call: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """What `call` returns, waited for however often the current task is cancelled meanwhile; that is raised after.

    A shield of anyio's keeps anyio's cancellations out and lets asyncio's own through (`asyncio.timeout`,
    `Task.cancel`). So the call runs in a task of its own, which they do not reach.
    """
    results: list[ResultT] = []
    failures: list[Exception] = []

    async def run() -> None:
        with anyio.CancelScope(shield=True):
            try:
                results.append(await call())
            except Exception as error:  # a task group would wrap it
                failures.append(error)

    with anyio.CancelScope(shield=True):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
    if failures:
        raise failures[0]
    return results[0]
