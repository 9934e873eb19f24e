"""Calls of the author's code, sync or async, with a time limit. An error in this code affects only its episode."""

from __future__ import annotations

import inspect
import os
import re
import traceback
from collections.abc import Callable
from functools import partial
from inspect import isawaitable
from pathlib import Path
from typing import Any

import anyio

from runner.concurrency.cancellation import cancellation_is_asked_for, forget_native_cancellation
from runner.concurrency.clocks import Clock
from runner.concurrency.own_task import LentClock
from runner.concurrency.threads import Job, ThreadContext, Workers
from runner.errors import unwrapped

__all__ = ["HOW_TO_CLOSE", "AuthorCode", "AuthorExit", "TooSlow", "describe_error", "is_async", "is_foreign"]


MAX_ERROR_CHARS = 2000
"""Maximum number of characters of an error's own text that are kept."""


HOW_TO_CLOSE = (
    "close it in close(), in reverse order of opening, or enter it with self.episode.exit_stack in setup();"
    " a tool that runs in parallel with other tools of its turn must close what it opens"
)
"""Advice for authors whose hooks leave a resource open, or close it in the wrong place."""

_OTHER_THREAD = (
    "Synchronous methods of an episode run in threads that change, one call at a time: open the SQLite "
    "connection with check_same_thread=False."
)

_OTHER_CONTEXT = (
    "Reset a context variable in a method of the kind that set it: both synchronous, or both async and not in a"
    " tool that runs in parallel with others."
)

_MISNESTED = re.compile(r"cancel scope|(Nursery|Cancel scope) stack corrupted|Nursery misnesting")


class AuthorExit(Exception):
    """The author's code called `sys.exit`, raised an error that is not an Exception, or cancelled its own task.

    Only its episode ends.
    """


class TooSlow(Exception):
    """The author's code exceeded its time limit."""

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__(f"{name} took longer than {seconds:g} s")
        self.name = name
        self.seconds = seconds


class AuthorCode:
    """The caller of the author's code of one episode.

    Asynchronous functions run on the loop. Synchronous functions run in the run's worker threads, one at a time, in the
    order of the calls: two synchronous functions never use the environment at the same time.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        # `fast_acquire`: taking a free lock does not wait for a pass of the event loop.
        self._one_at_a_time = anyio.Lock(fast_acquire=True)
        self._variables = ThreadContext()
        self.abandoned = ""
        """The synchronous call whose thread was abandoned and may still change data; "" if there is none."""

    async def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        name: str,
        seconds: float | None = None,
        clock: Callable[[float], Clock | LentClock] = Clock,
    ) -> Any:
        """Call `function`, sync or async, and return its result.

        Args:
            function: the function.
            args: its arguments.
            name: its name in messages.
            seconds: its time limit; None for no limit.
            clock: function that creates the clock of the limit.

        Raises:
            TooSlow: the function took longer than `seconds`, also if it swallowed the cancellation and returned.
            AuthorExit: the function called `sys.exit`, raised something that is not an Exception, or was cancelled by
                the author's code.
            Exception: any other error that the function raised.
        """
        job: Job | None = None
        try:
            if is_async(function):
                return await self._limited(partial(function, *args), name, seconds, clock)
            async with self._one_at_a_time:
                job = Job(partial(self._variables.run, partial(function, *args)), name)
                try:
                    result = await self._limited(partial(self._workers.call, job), name, seconds, clock)
                finally:
                    if job.abandoned:
                        self.abandoned, self._variables = name, ThreadContext()
                    self._variables.publish()
            # A partial, a lambda or a callable object may hide an async function.
            return await self._limited(lambda: result, name, seconds, clock) if isawaitable(result) else result
        except anyio.get_cancelled_exc_class() as error:
            if cancellation_is_asked_for():
                raise
            forget_native_cancellation()
            raise AuthorExit(
                f"{name} was cancelled by task.cancel(), or by a timeout or task group that a hook left open: "
                f"{HOW_TO_CLOSE}"
            ) from error
        except BaseException as error:
            # Any error from a worker thread is the author's, since signals arrive only in the main thread.
            from_thread = job is not None and error is job.error
            if isinstance(error, Exception) or (_is_not_the_authors(error) and not from_thread):
                raise
            raise AuthorExit(f"{name} {_what_left(error)}") from error

    async def _limited(
        self, function: Callable[[], Any], name: str, seconds: float | None, clock: Callable[[float], Clock | LentClock]
    ) -> Any:
        if seconds is None:
            return await function()
        with clock(seconds) as limit:
            result = await function()
        # The clock is checked, since the author's code may have swallowed the cancellation.
        if limit.fired:
            raise TooSlow(name, seconds)
        return result


def is_async(function: Callable[..., Any]) -> bool:
    """Return True for an `async def` function, or an object whose `__call__` is an `async def` method."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def describe_error(error: BaseException) -> str:
    """Describe an error and the place where it was raised, for people. Groups of one error are unwrapped.

    The place is the innermost frame of the author's code, and the innermost frame of all if it is in a library.
    """
    error = unwrapped(error)
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
        error = error.__cause__  # Python wraps a StopIteration of a coroutine in a RuntimeError
    text = _text_of(error)
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    origin = error.__cause__ if isinstance(error, AuthorExit) and error.__cause__ else error
    frames = traceback.extract_tb(origin.__traceback__)
    raised_at = [f"in {_where(frame)}" for frame in frames if not is_foreign(frame.filename)][-1:]
    # Our own errors explain themselves, so our line does not matter.
    raised_at += [f"raised in {_where(frame)}" for frame in frames[-1:] if _is_library(frame.filename)]
    return f"{what} ({'; '.join(raised_at)})" if raised_at else what


def _text_of(error: BaseException) -> str:
    try:
        text = "; ".join([_own_text(error), *getattr(error, "__notes__", ())])
    except Exception as broken:
        return f"its text cannot be made ({type(broken).__name__})"
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:MAX_ERROR_CHARS]}... ({len(text)} characters)"


def _own_text(error: BaseException) -> str:
    # The texts of anyio and trio are long, and name no fix.
    if isinstance(error, RuntimeError | AssertionError) and _MISNESTED.search(str(error)):
        text = f"{str(error).splitlines()[0]}: a task group or a cancel scope is open; {HOW_TO_CLOSE}"
        return f"{text}; open what several episodes share in lifespan()" if "a different task" in text else text
    if not isinstance(error, BaseExceptionGroup):
        text = str(error)
        if "only be used in that same thread" in text:
            return f"{text} {_OTHER_THREAD}"
        return f"{text}. {_OTHER_CONTEXT}" if "was created in a different Context" in text else text
    return f"{error}: {'; '.join(map(describe_error, error.exceptions))}"


def _what_left(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r:.{MAX_ERROR_CHARS}})"
    return f"raised {describe_error(error)}"


def _is_not_the_authors(error: BaseException) -> bool:
    """Return True for a cancellation, GeneratorExit or Ctrl-C, even in a group."""
    kinds = (anyio.get_cancelled_exc_class(), GeneratorExit, KeyboardInterrupt)
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(kinds) is not None
    return isinstance(error, kinds)


def _where(frame: traceback.FrameSummary) -> str:
    *_, file = re.split(r"/lib/python3[^/]*/(?:(?:site|dist)-packages/)?|/(?:site|dist)-packages/", frame.filename)
    return f"{frame.name}, {file}:{frame.lineno}"


_OURS = f"{Path(__file__).parents[1]}{os.sep}"


def is_foreign(filename: str) -> bool:
    """Return True for a file of deltarunner or of a library, and for a name that is not a file, such as `<string>`."""
    return filename.startswith((_OURS, "<")) or _is_library(filename)


def _is_library(filename: str) -> bool:
    # Modules compiled by Cython name their source, which is not in a folder of packages.
    compiled = filename.endswith((".pyx", ".pxd", ".pxi"))
    return compiled or any(part in filename for part in ("/site-packages/", "/dist-packages/", "/lib/python3"))
