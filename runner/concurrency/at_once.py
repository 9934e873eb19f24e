"""Several calls at the same time: the first failure cancels the others and is raised."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio

__all__ = ["at_once"]


async def at_once(calls: Sequence[Callable[[], Awaitable[object]]]) -> None:
    """Make the calls at the same time, and return when all have returned.

    Raises:
        Exception: the first failure, which a task group would wrap.
    """
    errors: list[Exception] = []

    async def kept(call: Callable[[], Awaitable[object]], others: anyio.CancelScope) -> None:
        try:
            await call()
        except Exception as error:
            errors.append(error)
            others.cancel()

    async with anyio.create_task_group() as group:
        for call in calls:
            group.start_soon(kept, call, group.cancel_scope)
    if errors:
        raise errors[0]
