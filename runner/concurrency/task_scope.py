"""A cancel scope of one asyncio task outside the stack of anyio's scopes, so that blocks may overlap."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

import anyio

# No public API shows the scopes of a task. They are only read, to detect a shield.
_task_states: Any = {}
with suppress(ImportError):
    from anyio._backends._asyncio import _task_states

__all__ = ["TaskScope"]

_MESSAGE: Final = "cancelled by deltarunner"


class TaskScope:
    """A cancel scope over a block of the current asyncio task, like `anyio.CancelScope`.

    A scope of anyio must be left after all scopes that were opened inside it. This scope has no such rule: scopes that
    an author's hook opens in the block may stay open after it, and earlier scopes may be closed inside it. As with
    anyio the task is cancelled at each of its waits until it has left the block, except under a shield in the block.
    """

    __slots__ = ("_asked", "_before", "_deadline", "_due", "_handle", "_start", "_task", "_waits_for", "cancel_called")

    def __init__(self) -> None:
        self.cancel_called = False
        """True if the deadline was reached or `cancel` was called."""
        self._deadline = math.inf
        self._due = math.inf
        """Time at which the timer is due; infinite without a timer."""
        self._handle: asyncio.Handle | None = None
        self._task: asyncio.Task[Any] | None = None
        self._waits_for: asyncio.Future[Any] | None = None

    @property
    def deadline(self) -> float:
        """Time at which the block is cancelled, on the event loop's clock."""
        return self._deadline

    @deadline.setter
    def deadline(self, value: float) -> None:
        self._deadline = value
        # A timer that is due earlier is kept, and moved only when it is due: clocks move their deadlines at every turn.
        if value < self._due and self._task is not None and not self.cancel_called:
            self._disarm()
            self._arm()

    def cancel(self) -> None:
        if not self.cancel_called:
            self.cancel_called = True
            self._disarm()
            if self._task is not None:
                self._deliver()

    def __enter__(self) -> Self:
        self._task = task = asyncio.current_task()
        assert task is not None
        self._start, self._before = _scope_of(task), task.cancelling()
        self._asked = 0  # number of cancellations that this scope requested
        if self.cancel_called:
            self._deliver()
        else:
            self._arm()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._disarm()
        task, self._task, self._start = self._task, None, None
        assert task is not None
        if not self._asked:
            return False
        for _ in range(self._asked):
            task.uncancel()
        if not isinstance(error, asyncio.CancelledError):
            return False
        # If other code also cancels the task, the error belongs to that code too.
        return task.cancelling() <= self._before and anyio.current_effective_deadline() != -math.inf

    def _arm(self) -> None:
        self._due = self._deadline
        if self._due == math.inf:
            return
        loop = asyncio.get_running_loop()
        if loop.time() >= self._due:
            self.cancel()
        else:
            self._handle = loop.call_at(self._due, self._arm)  # `_arm` checks the time, since the call may be early

    def _disarm(self) -> None:
        self._due = math.inf
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self._waits_for is not None:
            self._waits_for.remove_done_callback(self._deliver)
            self._waits_for = None

    def _deliver(self, over: asyncio.Future[Any] | None = None) -> None:
        if over is not self._waits_for:  # this callback came late: the block was left
            return
        task: Any = self._task
        loop = task.get_loop()
        waits_for, self._waits_for = getattr(task, "_fut_waiter", None), None
        # A finished wait returns its result first. The next wait is cancelled.
        waits = waits_for is None or not waits_for.done()
        shielded = self._is_shielded(task)
        if shielded and waits_for is not None and waits:
            # When that future is done, the task continues first. Then it waits for another future, where it can be
            # cancelled.
            self._waits_for = waits_for
            waits_for.add_done_callback(self._deliver)
            return
        is_free = task is not asyncio.current_task(loop) and not shielded
        if is_free and waits and not getattr(task, "_must_cancel", False):
            task.cancel(_MESSAGE)
            self._asked += 1
        self._handle = loop.call_soon(self._deliver)

    def _is_shielded(self, task: asyncio.Task[Any]) -> bool:
        """True if a shield inside the block encloses the task's current wait."""
        around = set()
        scope = self._start
        while scope is not None:
            around.add(id(scope))
            scope = scope._parent_scope
        scope = _scope_of(task)
        while scope is not None and id(scope) not in around:
            if scope.shield:
                return True
            scope = scope._parent_scope
        return False


def _scope_of(task: asyncio.Task[Any]) -> Any:
    """The innermost anyio scope of the task; None outside of any scope."""
    state = _task_states.get(task)
    return None if state is None else state.cancel_scope
