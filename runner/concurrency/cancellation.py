"""Distinction between a cancellation by a scope and a cancellation that the author's code raised."""

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
    """True if a cancel scope around the current task is cancelled, or a clock over the task has fired."""
    # Inside a cancelled scope, anyio reports minus infinity as the deadline, on every event loop.
    return anyio.current_effective_deadline() == -math.inf or a_clock_has_fired()


def forget_native_cancellation() -> None:
    """Clear the cancellation requests that `asyncio.Task.cancel()` left on the current task.

    Otherwise, later cancel scopes would handle these requests as their own.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:  # the event loop is not asyncio's
        return
    while task is not None and task.cancelling():
        task.uncancel()


@contextmanager
def native_cancellation_as(failure: Exception) -> Iterator[None]:
    """Raise `failure` if the author's code in the block raises a cancellation that no scope requested."""
    try:
        yield
    except anyio.get_cancelled_exc_class() as error:
        if cancellation_is_asked_for():
            raise
        forget_native_cancellation()
        raise failure from error


async def to_its_end(call: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """Run `call` to its end, even if the current task is cancelled during the call, and return its result.

    The cancellation is raised only after the call has ended.

    A shield of anyio stops anyio's cancellations but not asyncio's own (`asyncio.timeout`, `Task.cancel`). So the call
    runs in a separate task, which asyncio's cancellations do not reach.
    """
    results: list[ResultT] = []
    failures: list[Exception] = []

    async def run() -> None:
        with anyio.CancelScope(shield=True):
            try:
                results.append(await call())
            except Exception as error:  # a task group would wrap the error
                failures.append(error)

    with anyio.CancelScope(shield=True):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
    if failures:
        raise failures[0]
    return results[0]
