"""Cancels a scenario at every point where it suspends, one after another, and checks what is left each time."""

from __future__ import annotations

import inspect
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, Final

import anyio

__all__ = ["cancel_everywhere"]

_MOST: Final = 100_000
_EVENT_LOOPS: Final = frozenset({"anyio", "asyncio", "trio"})


async def cancel_everywhere(
    scenario: Callable[[], Coroutine[Any, Any, object]],
    *,
    check: Callable[[], object | Awaitable[object]] = lambda: None,
) -> int:
    """Run `scenario` again and again, cancelled when it suspends for the 1st, the 2nd, the 3rd ... time.

    The cancellation comes from a scope around it, as it suspends; where it waits in a shield, it comes once that is
    left. Child tasks are cancelled with it; their own suspension points are not counted. Trio runs the tasks that are
    ready in a random order, so a scenario that waits for others may suspend more or less often there from run to run.

    Args:
        scenario: makes one run's coroutine. It must be the same each time: same steps, fresh state.
        check: called after every run, cancelled or not, sync or async; raises if something was left behind.

    Returns:
        How many suspension points were cancelled: all that an undisturbed run has.

    Raises:
        RuntimeError: the scenario never ended undisturbed.
        BaseException: what the scenario or the check raised, with a note that says where it had been cancelled.
    """
    for at in range(1, _MOST):
        run = _Run(scenario(), at)
        try:
            await run.play()
            result = check()
            if inspect.isawaitable(result):
                await result
        except BaseException as error:
            if run.cancelled_in:
                error.add_note(f"cancelled at suspension point {at}, in {run.cancelled_in}")
            raise
        if not run.cancelled_in:
            return at - 1
    raise RuntimeError(f"the scenario still ran after {_MOST} suspension points: it has to end")


@dataclass(slots=True)
class _Run:
    coroutine: Coroutine[Any, Any, object]
    at: int
    cancelled_in: str = ""

    async def play(self) -> None:
        with anyio.CancelScope() as scope:
            await self._step_by_step(scope)

    @types.coroutine
    def _step_by_step(self, scope: anyio.CancelScope) -> Generator[Any, Any, None]:
        """Drive the coroutine as its task would, counting what it yields to the event loop."""
        coroutine = self.coroutine
        suspensions = 0
        resume: Callable[[], Any] = lambda: coroutine.send(None)  # noqa: E731  # replaced below
        while True:
            try:
                awaited = resume()
            except StopIteration:
                return
            suspensions += 1
            if suspensions == self.at:
                self.cancelled_in = _place(coroutine)
                scope.cancel()
            resume = yield from _suspended(coroutine, awaited)


def _suspended(coroutine: Coroutine[Any, Any, object], awaited: Any) -> Generator[Any, Any, Callable[[], Any]]:
    """Suspend in the coroutine's stead; gives how to go on with it."""
    try:
        value = yield awaited
    except BaseException as error:  # a cancellation among others: the coroutine is whom it was meant for
        thrown = error
        return lambda: coroutine.throw(thrown)
    return lambda: coroutine.send(value)


def _place(coroutine: Any) -> str:
    """Where the scenario is suspended: its innermost frame outside the event loop's libraries."""
    place = "the scenario"
    while True:
        match coroutine:
            case types.CoroutineType():
                frame, inner = coroutine.cr_frame, coroutine.cr_await
            case types.GeneratorType():
                frame, inner = coroutine.gi_frame, coroutine.gi_yieldfrom
            case _:
                return place
        if frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] not in _EVENT_LOOPS:
            place = f"{coroutine.__qualname__} ({frame.f_code.co_filename}:{frame.f_lineno})"
        coroutine = inner
