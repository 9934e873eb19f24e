"""Several calls at the same time: the first failure cancels the others and is raised."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

__all__ = ["gather"]

T = TypeVar("T")


async def gather(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Make the calls at the same time, and return their results in the order of `calls`.

    Raises:
        Exception: the first failure, not wrapped in an exception group.
    """
    errors: list[Exception] = []
    results: dict[int, T] = {}

    async def kept(number: int, call: Callable[[], Awaitable[T]], others: anyio.CancelScope) -> None:
        try:
            results[number] = await call()
        except Exception as error:
            errors.append(error)
            others.cancel()

    async with anyio.create_task_group() as group:
        for number, call in enumerate(calls):
            group.start_soon(kept, number, call, group.cancel_scope)
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(calls))]
