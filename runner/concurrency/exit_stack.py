"""An exit stack of two kinds of threads: what was entered in a worker thread is left in one, not on the event loop."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack
from functools import partial
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

__all__ = ["Leave", "ThreadedExitStack", "exit_arguments", "is_empty"]

T = TypeVar("T")
P = ParamSpec("P")

Leave = Callable[[Callable[[], bool | None], str], Awaitable[bool | None]]
"""Calls a synchronous exit of that name elsewhere than on the event loop, and tells whether it swallowed the error."""


class ThreadedExitStack(AsyncExitStack):
    """An exit stack whose synchronous exits do not hold up the event loop.

    What was entered in a worker thread, as by an author's synchronous code, is left by `leave`. What was entered on the
    event loop is left there, as cancel scopes and whatever belongs to one thread must be.

    Args:
        leave: leaves what was entered in a thread; without it everything is left on the event loop.
        owner: whose stack it is, for people.
    """

    def __init__(self, leave: Leave | None = None, owner: str = "") -> None:
        super().__init__()
        self.owner = owner
        self._leave = leave
        self._loop_thread = threading.get_ident()  # a stack is made on its event loop

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to leave."""
        return is_empty(self)

    def enter_context(self, cm: AbstractContextManager[T, bool | None]) -> T:
        if self._on_the_loop():
            return super().enter_context(cm)
        single = ExitStack()
        entered = single.enter_context(cm)
        self._push_apart(single, f"{_name_of(cm)}.__exit__()")
        return entered

    def push(self, exit: T) -> T:
        if self._on_the_loop():
            super().push(exit)  # type: ignore[type-var]  # it says itself what is wrong
            return exit
        single = ExitStack()
        single.push(exit)  # type: ignore[type-var]  # likewise
        self._push_apart(single, f"{_name_of(exit)}()")
        return exit

    def callback(self, callback: Callable[P, T], /, *args: P.args, **kwds: P.kwargs) -> Callable[P, T]:
        if self._on_the_loop():
            return super().callback(callback, *args, **kwds)
        single = ExitStack()
        single.callback(callback, *args, **kwds)
        self._push_apart(single, f"{_name_of(callback)}()")
        return callback

    def pop_all(self) -> ThreadedExitStack:
        popped = super().pop_all()  # made as `type(self)()`, which is why both arguments have defaults
        popped.owner, popped._leave = self.owner, self._leave
        return popped

    async def unwind(self, passing: BaseException | None) -> bool:
        """Leave everything; whether the error that is passing was swallowed.

        The lag report looks for this function's frame, to tell a blocking exit from a blocking hook.
        """
        return bool(await self.__aexit__(*exit_arguments(passing)))

    def _on_the_loop(self) -> bool:
        return self._leave is None or threading.get_ident() == self._loop_thread

    def _push_apart(self, single: ExitStack, name: str) -> None:
        # Each thing has a stack of its own, so that the limit of `leave` holds for each, and their order stays.
        leave = self._leave
        assert leave is not None

        async def leave_apart(
            kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
        ) -> bool | None:
            return await leave(partial(_left, single, error), name)

        self.push_async_exit(leave_apart)


def is_empty(stack: AsyncExitStack) -> bool:
    """Whether a stack has nothing to leave, as far as can be seen."""
    return not getattr(stack, "_exit_callbacks", True)


def _left(single: ExitStack, passing: BaseException | None) -> bool | None:
    """Leave one thing. An error that was passing and comes out again is not the thing's own."""
    try:
        return single.__exit__(*exit_arguments(passing))
    except BaseException as error:
        if error is passing:
            return False
        raise


def exit_arguments(
    passing: BaseException | None,
) -> tuple[type[BaseException] | None, BaseException | None, TracebackType | None]:
    """What an `__exit__` is told of the error that passes through it."""
    return (None, None, None) if passing is None else (type(passing), passing, passing.__traceback__)


def _name_of(thing: Any) -> str:
    """The name of a function, of the function behind a `@contextmanager`, or else of the class."""
    for function in (thing, getattr(thing, "func", None)):
        if isinstance(name := getattr(function, "__qualname__", None), str):
            return name
    return type(thing).__qualname__
