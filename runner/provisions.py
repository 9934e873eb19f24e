"""What a run gets from the environment object before any episode: its shared resources and its tasks."""

from __future__ import annotations

import inspect
from contextlib import AsyncExitStack
from typing import Any

from runner.authors import describe_error
from runner.environment import Environment
from runner.errors import BadEnvironment, BadTask, DeltarunnerError
from runner.sources import Tasks
from runner.threads import Job, Workers

__all__ = ["enter_lifespan", "own_tasks"]


async def enter_lifespan(environment: Environment[Any], exit_stack: AsyncExitStack) -> Any:
    """Enter the environment's `lifespan()`, sync or async; gives what it yields, None where it has none.

    Raises:
        BadEnvironment: it raised.
    """
    if not environment.overrides("lifespan"):
        return None
    try:
        lifespan: Any = environment.lifespan()
        if hasattr(lifespan, "__aenter__"):
            return await exit_stack.enter_async_context(lifespan)
        return exit_stack.enter_context(lifespan)
    except DeltarunnerError:
        raise
    except (Exception, SystemExit) as error:
        raise BadEnvironment(f"lifespan() raised {describe_error(error)}") from error


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
