"""The lifespan of an environment: resources that all episodes share, opened before the first, closed after the last."""

from __future__ import annotations

import inspect
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio

from runner.concurrency.exit_stack import exit_arguments
from runner.concurrency.threads import Job, ThreadContext, Workers, WorkerThread
from runner.concurrency.user_code import describe_error
from runner.environment.environment import Environment
from runner.errors import BadEnvironment, DeltarunnerError, unwrapped

__all__ = ["lifespan_of"]


@asynccontextmanager
async def lifespan_of(
    environment: Environment[Any], workers: Workers, *, close_seconds: float | None
) -> AsyncIterator[Any]:
    """Enter the environment's `lifespan()` and yield its value; None if the environment does not define it.

    A synchronous lifespan is created, entered and left in one worker thread, which does nothing else.

    Raises:
        BadEnvironment: `lifespan()` raised, or did not end in time.
    """
    if not environment.overrides("lifespan"):
        yield None
        return
    lifespan = _Lifespan(environment, workers)
    # The scope encloses all other code, because cancel scopes of an asynchronous lifespan must close inside it.
    with anyio.CancelScope() as leaving:
        shared = await lifespan.enter()
        passing: BaseException | None = None
        try:
            yield shared
        except BaseException as error:
            passing = error
        leaving.shield = True
        leaving.deadline = math.inf if close_seconds is None else anyio.current_time() + close_seconds
        if not await lifespan.leave(passing) and passing is not None:
            raise passing
    if leaving.cancelled_caught:
        raise BadEnvironment(
            f"lifespan() took longer than {close_seconds:g} s to end; its resources may stay open "
            f"(Limits(close_seconds=) allows more time)"
        )


class _Lifespan:
    """The context manager of an environment's `lifespan()`, sync or async."""

    def __init__(self, environment: Environment[Any], workers: Workers) -> None:
        self._environment = environment
        self._workers = workers
        self._manager: Any = None
        self._thread: WorkerThread | None = None
        self._variables = ThreadContext()

    async def enter(self) -> Any:
        try:
            return await self._enter()
        except DeltarunnerError:
            raise
        except (Exception, SystemExit, BaseExceptionGroup) as error:
            if _holds_a_cancellation(error):
                raise
            raise BadEnvironment(f"lifespan() raised {describe_error(error)}") from error

    async def _enter(self) -> Any:
        make: Callable[[], Any] = self._environment.lifespan
        if inspect.isasyncgenfunction(make):
            make = asynccontextmanager(make)
        elif inspect.isgeneratorfunction(make):
            make = contextmanager(make)
        if inspect.isasyncgenfunction(inspect.unwrap(make)):
            self._manager = make()
        else:
            self._thread = WorkerThread()
            self._manager = await self._in_thread(make)
        # The returned object is checked, since a synchronous method may return an asynchronous context manager.
        if not hasattr(self._manager, "__aenter__"):
            if not hasattr(self._manager, "__enter__"):
                raise BadEnvironment(
                    f"lifespan() returned {self._manager!r:.60}, which is not a context manager: `yield` what episodes "
                    "share, and close it after that."
                )
            return await self._in_thread(lambda: self._manager.__enter__())
        self._end_thread()
        return await self._manager.__aenter__()

    async def leave(self, passing: BaseException | None) -> bool:
        """Leave the context; return True if it swallowed the error `passing`."""
        try:
            return await self._leave(passing)
        except (Exception, SystemExit, BaseExceptionGroup) as error:
            if passing is not None and unwrapped(error) is unwrapped(passing):
                return False  # the context raised the error that it received, perhaps wrapped by a task group
            if _holds_a_cancellation(error):
                raise
            raise BadEnvironment(f"lifespan() raised {describe_error(error)}, at its end") from error
        finally:
            self._end_thread()

    async def _leave(self, passing: BaseException | None) -> bool:
        if self._thread is None:
            return bool(await self._manager.__aexit__(*exit_arguments(passing)))
        return bool(await self._in_thread(lambda: self._manager.__exit__(*exit_arguments(passing))))

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        job = Job(lambda: self._variables.run(function), "lifespan()")
        return await self._workers.call_beside(job, self._thread)

    def _end_thread(self) -> None:
        if self._thread is not None:
            self._thread.end()
            self._thread = None


def _holds_a_cancellation(error: BaseException) -> bool:
    return isinstance(error, BaseExceptionGroup) and error.subgroup(anyio.get_cancelled_exc_class()) is not None
