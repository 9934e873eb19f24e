"""What a run gets from the environment object before any episode: its shared resources and its tasks."""

from __future__ import annotations

import inspect
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio

from runner.concurrency.threads import Job, Workers, WorkerThread
from runner.concurrency.user_code import describe_error
from runner.environment.environment import Environment
from runner.environment.task_feed import Tasks
from runner.errors import BadEnvironment, BadTask, DeltarunnerError, unwrapped

__all__ = ["lifespan_of", "own_tasks"]


@asynccontextmanager
async def lifespan_of(
    environment: Environment[Any], workers: Workers, *, close_seconds: float | None
) -> AsyncIterator[Any]:
    """What the environment's `lifespan()` yields, None where it has none.

    A synchronous one is made, entered and left in one worker thread, which is kept for it.

    Raises:
        BadEnvironment: it raised, on its way in or out, or did not end in time.
    """
    if not environment.overrides("lifespan"):
        yield None
        return
    lifespan = _Lifespan(environment, workers)
    # Around all of it, since cancel scopes that an asynchronous one opens must close inside.
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
            f"lifespan() took longer than {close_seconds:g} s to end; what it holds may be left behind "
            f"(Limits(close_seconds=) gives it more time)"
        )


class _Lifespan:
    """The context manager of an environment's `lifespan()`, of either colour."""

    def __init__(self, environment: Environment[Any], workers: Workers) -> None:
        self._environment = environment
        self._workers = workers
        self._manager: Any = None
        self._thread: WorkerThread | None = None

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
        make = self._environment.lifespan
        if inspect.isasyncgenfunction(inspect.unwrap(make)):
            self._manager = make()
        else:
            self._thread = WorkerThread()
            self._manager = await self._in_thread(make)
        if not hasattr(self._manager, "__aenter__"):
            return await self._in_thread(lambda: self._manager.__enter__())
        self._end_thread()
        return await self._manager.__aenter__()

    async def leave(self, passing: BaseException | None) -> bool:
        """Leave it; tells whether it swallowed what is passing."""
        try:
            return await self._leave(type(passing) if passing else None, passing)
        except (Exception, SystemExit, BaseExceptionGroup) as error:
            if passing is not None and unwrapped(error) is unwrapped(passing):
                return False
            if _holds_a_cancellation(error):
                raise
            raise BadEnvironment(f"lifespan() raised {describe_error(error)}, on its way out") from error
        finally:
            self._end_thread()

    async def _leave(self, kind: type[BaseException] | None, passing: BaseException | None) -> bool:
        traceback = passing.__traceback__ if passing else None
        if self._thread is None:
            return bool(await self._manager.__aexit__(kind, passing, traceback))
        return bool(await self._in_thread(lambda: self._manager.__exit__(kind, passing, traceback)))

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        return await self._workers.call_beside(Job(function, "lifespan()"), self._thread)

    def _end_thread(self) -> None:
        if self._thread is not None:
            self._thread.end()
            self._thread = None


def _holds_a_cancellation(error: BaseException) -> bool:
    return isinstance(error, BaseExceptionGroup) and error.subgroup(anyio.get_cancelled_exc_class()) is not None


async def own_tasks(environment: Environment[Any], workers: Workers) -> Tasks:
    """The environment's own tasks; asked for in a thread, since it may load them all.

    Raises:
        BadTask: `tasks()` raised.
    """
    if inspect.isasyncgenfunction(environment.tasks):
        return environment.tasks()
    try:
        tasks: Tasks = await workers.call(Job(environment.tasks, "tasks()"))
    except DeltarunnerError:
        raise
    except (Exception, SystemExit) as error:
        raise BadTask(f"tasks() raised {describe_error(error)}") from error
    return tasks
