"""An exit stack that exits each context in the kind of thread in which it was entered: event loop or worker thread."""

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
"""Function that runs a synchronous exit outside the event loop, and returns True if the exit suppressed the error. Its
arguments are the exit, and the exit's name for messages."""


class ThreadedExitStack(AsyncExitStack):
    """An exit stack whose synchronous exits do not block the event loop.

    Contexts entered in a worker thread, as by an author's synchronous code, are exited by `leave`. Contexts entered on
    the event loop are exited there, since cancel scopes and similar objects belong to one thread.

    Args:
        leave: function that exits a context that was entered in a thread; None to exit all contexts on the event loop.
        owner: name of the owner of the stack, for messages.
    """

    def __init__(self, leave: Leave | None = None, owner: str = "") -> None:
        super().__init__()
        self.owner = owner
        self._leave = leave
        self._loop_thread = threading.get_ident()  # a stack is created on its event loop

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to exit."""
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
            super().push(exit)  # type: ignore[type-var]  # `push` raises a clear error itself
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
        popped = super().pop_all()  # contextlib calls `type(self)()`, so both arguments have defaults
        popped.owner, popped._leave = self.owner, self._leave
        return popped

    async def unwind(self, passing: BaseException | None) -> bool:
        """Exit all contexts, and return True if the passing error was suppressed.

        The lag report searches for this function's frame, to distinguish a blocking exit from a blocking hook.
        """
        return bool(await self.__aexit__(*exit_arguments(passing)))

    def _on_the_loop(self) -> bool:
        return self._leave is None or threading.get_ident() == self._loop_thread

    def _push_apart(self, single: ExitStack, name: str) -> None:
        # Each context has its own stack, so that `leave` exits the contexts one by one, each with its own time limit.
        leave = self._leave
        assert leave is not None

        async def leave_apart(
            kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
        ) -> bool | None:
            return await leave(partial(_left, single, error), name)

        self.push_async_exit(leave_apart)


def is_empty(stack: AsyncExitStack) -> bool:
    """True if a stack is known to be empty."""
    return not getattr(stack, "_exit_callbacks", True)


def _left(single: ExitStack, passing: BaseException | None) -> bool | None:
    """Exit one context. Return True if it suppressed the passing error; if it raised that error again, return False."""
    try:
        return single.__exit__(*exit_arguments(passing))
    except BaseException as error:
        if error is passing:
            return False
        raise


def exit_arguments(
    passing: BaseException | None,
) -> tuple[type[BaseException] | None, BaseException | None, TracebackType | None]:
    """Return the three arguments of `__exit__` for the error `passing`; each is None without an error."""
    return (None, None, None) if passing is None else (type(passing), passing, passing.__traceback__)


def _name_of(thing: Any) -> str:
    """Return the name of a function, of the function that `@contextmanager` wraps, or of the class of an object."""
    for function in (thing, getattr(thing, "func", None)):
        if isinstance(name := getattr(function, "__qualname__", None), str):
            return name
    return type(thing).__qualname__
