"""Calls into the author's code: either colour, contained, with a time limit."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio

import runner
from runner.clocks import Clock
from runner.threads import Job, Workers

__all__ = ["AuthorCode", "AuthorExit", "TooSlow", "describe_error", "is_async"]


class AuthorExit(Exception):
    """The author's code asked the interpreter to exit; that ends its own episode only."""


class TooSlow(Exception):
    """The author's code took longer than it may."""

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__(f"{name} took longer than {seconds:g} s")
        self.name = name
        self.seconds = seconds


class AuthorCode:
    """The author's code of one episode.

    Asynchronous functions run on the loop. Synchronous ones run in the run's worker threads, one at a time, in the
    order in which they were asked for: two of them never touch the environment at once.

    Attributes:
        abandoned: the synchronous call whose thread was left behind, since it may still write; or "".
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._one_at_a_time = anyio.Lock(fast_acquire=True)
        self.abandoned = ""

    async def call(self, function: Callable[..., Any], *args: Any, name: str, seconds: float | None = None) -> Any:
        """Call `function`, sync or async, and return its result.

        Raises:
            TooSlow: it took longer than `seconds`.
            AuthorExit: it called `sys.exit`.
        """
        try:
            if is_async(function):
                return await self._limited(partial(function, *args), name, seconds)
            async with self._one_at_a_time:
                job = Job(partial(function, *args), name)
                try:
                    result = await self._limited(partial(self._workers.call, job), name, seconds)
                finally:
                    if job.abandoned:
                        self.abandoned = name
        except SystemExit as error:
            raise AuthorExit(f"{name} called sys.exit({error.code!r})") from error
        # A partial, a lambda or a callable object may hide an async function; its clock is that of what called it.
        return await result if inspect.isawaitable(result) else result

    async def _limited(self, function: Callable[[], Any], name: str, seconds: float | None) -> Any:
        if seconds is None:
            return await function()
        with Clock(seconds) as clock:
            return await function()
        if clock.fired:
            raise TooSlow(name, seconds)
        raise AssertionError("a clock that did not fire swallows nothing")


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def describe_error(error: BaseException) -> str:
    """One line for people: what was raised and where in the author's own code; groups of one are unwrapped."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    ours = str(Path(runner.__file__).parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _foreign(f.filename, ours)]
    if not frames:
        return what
    last = frames[-1]
    return f"{what} (in {last.name}, {last.filename}:{last.lineno})"


def _foreign(filename: str, ours: str) -> bool:
    return filename.startswith((ours, "<")) or "/site-packages/" in filename or "/lib/python3" in filename
