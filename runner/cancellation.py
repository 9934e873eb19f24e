"""Cancellation that a scope asked for, told from one that the author's code made of its own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

__all__ = ["cancellation_is_asked_for", "forget_native_cancellation", "native_cancellation_as"]


def cancellation_is_asked_for() -> bool:
    """A cancel scope around the current task is cancelled."""
    return anyio.current_effective_deadline() == -math.inf


def forget_native_cancellation() -> None:
    """Take back what `asyncio.Task.cancel()` left in the current task, so that later scopes are not taken in."""
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
