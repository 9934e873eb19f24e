"""A separate task for code that may leave cancel scopes and task groups open between calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

import anyio
from anyio.abc import TaskGroup

from runner.concurrency.clocks import Clock, on_asyncio

__all__ = ["LentClock", "OwnTask"]


class OwnTask:
    """A separate task that runs a function.

    By default the task runs no other code, so scopes that the function leaves open cannot affect other code. These
    scopes are cancelled after `close_rest`.
    """

    def __init__(self) -> None:
        self.outer = Clock(over_tasks=True)
        """The clock around the whole task, without a limit of its own."""
        self.left_open = False
        """True if the function left scopes or task groups open."""
        self.cannot_be_left = False
        """True if scopes or task groups were still open after `close_rest`."""
        self._tasks: TaskGroup
        self._has_others = False
        self._failure: BaseException | None = None

    @property
    def tasks(self) -> TaskGroup:
        """The task group for other tasks, which are cancelled when the function ends."""
        self._has_others = True
        return self._tasks

    async def run(
        self,
        function: Callable[[], Awaitable[None]],
        *,
        close_rest: Callable[[], Awaitable[None]],
        name: str,
        in_this_task: bool = False,
    ) -> None:
        """Run the function to its end. Cancelling this call cancels the function and waits for it.

        Args:
            function: the function.
            close_rest: function that is called in the same task if `function` left something open; it closes what it
                can.
            name: the name of the task.
            in_this_task: True to run the function in the calling task, for debuggers.

        Raises:
            BaseException: the error that the function raised.
        """
        done = anyio.Event()
        with self.outer:
            try:
                async with anyio.create_task_group() as self._tasks:
                    if in_this_task:
                        await self._hosted(function, close_rest, done)
                    else:
                        self._tasks.start_soon(self._hosted, function, close_rest, done, name=name)
                    try:
                        await done.wait()
                    except BaseException:
                        with anyio.CancelScope(shield=True):
                            await done.wait()
                        raise
                    finally:
                        if self._has_others or self.left_open:
                            self._tasks.cancel_scope.cancel()
            except BaseExceptionGroup:
                # The task ended inside scopes that the function left open, so the group raises an error about them.
                if not self.left_open:
                    raise
            if self._failure is not None:
                raise self._failure

    def shield(self) -> None:
        """Keep out the cancellation of the caller of `run` from now on."""
        assert isinstance(self.outer.scope, anyio.CancelScope)
        self.outer.scope.shield = True

    def clock(self, seconds: float | None = None) -> Clock | LentClock:
        """Return a clock over a part of the function. The part may leave scopes open, or close earlier scopes."""
        # On other event loops, scopes must be left in order, so all parts use the scope of the outermost clock.
        return Clock(seconds) if on_asyncio() else LentClock(self.outer, seconds)

    async def _hosted(
        self,
        function: Callable[[], Awaitable[None]],
        close_rest: Callable[[], Awaitable[None]],
        done: anyio.Event,
    ) -> None:
        groups = _open_groups()
        around = anyio.CancelScope()
        around.__enter__()
        try:
            try:
                await function()
            except BaseException as error:  # a task group would wrap the error
                self._failure = error
            if not _left(around, groups):
                self.left_open = True
                await close_rest()
                self.cannot_be_left = not _left(around, groups)
        finally:
            done.set()


class LentClock:
    """The clock of an outer block, lent to an inner block.

    The outer block sets no limit, so the clock has the limit of the inner block until that block ends. If the limit is
    reached, the outer block is cancelled, so `fired` stays True.
    """

    def __init__(self, clock: Clock, seconds: float | None) -> None:
        self.seconds = seconds
        """The limit in seconds that was set last; None for no limit."""
        self.scope = clock.scope
        """The cancel scope of the outer clock."""
        self._clock = clock

    @property
    def fired(self) -> bool:
        """True if the limit was reached, or the outer block was cancelled."""
        return self._clock.fired

    def start(self, seconds: float | None) -> None:
        """Set a new limit that counts from now."""
        self.seconds = seconds
        self._clock.start(seconds)

    def __enter__(self) -> Self:
        self.start(self.seconds)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if self.fired:
            return isinstance(error, anyio.get_cancelled_exc_class())
        self._clock.lift()
        return False


def _left(scope: anyio.CancelScope, groups: int) -> bool:
    """Leave a scope. Return False if a scope or a task group that was opened inside it is still open, else True.

    Args:
        scope: the scope.
        groups: number of task groups that were open before the scope was entered.
    """
    try:
        scope.__exit__(None, None, None)
    except RuntimeError:
        return False
    return _open_groups() == groups


def _open_groups() -> int:
    """Return the number of open task groups of this task on trio; 0 on asyncio.

    If a scope is left before a task group that was opened inside it, trio forgets the scope of the group, but not the
    group. On asyncio, the scope stays open too.
    """
    if on_asyncio():
        return 0
    from trio.lowlevel import current_task

    return len(current_task().child_nurseries)
