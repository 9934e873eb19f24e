"""Where a run's tasks come from: iterables, sync or async, JSONL files, and sources that are given the results."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import anyio

from runner.concurrency.cancellation import native_cancellation_as
from runner.concurrency.threads import Job, Workers
from runner.concurrency.user_code import describe_error, is_async
from runner.environment.environment import Environment
from runner.environment.task_checks import TaskChecks
from runner.environment.task_files import read_tasks
from runner.errors import BadTask, DeltarunnerError
from runner.tasks import Task
from runner.trajectory import Trajectory

__all__ = ["TaskFeed", "TaskSource", "Tasks", "environment_tasks"]

Tasks: TypeAlias = Iterable[Task] | AsyncIterable[Task] | str | Path
"""What a run takes as tasks; a string or a path is a JSONL file."""

_END = object()


@runtime_checkable
class TaskSource(Protocol):
    """Tasks that are decided while the run plays: an iterable, sync or async, that also hears of every result.

    It may repeat a task: the runner counts the visits. A file that is resumed tells it the stored trajectories
    first, in the order they were committed.
    """

    def __iter__(self) -> Iterator[Task]:
        """Give the tasks. The next one is asked for, in a thread, when its first episode can begin."""
        ...

    def finished(self, trajectory: Trajectory) -> None:
        """Hear of a trajectory after its commit, one at a time; it may be async. What it raises ends the run."""
        ...


def environment_tasks(environment: Environment[Any]) -> Tasks:
    """What the environment's `tasks()` gives.

    Raises:
        BadTask: it raised, or gave nothing that can be iterated over.
    """
    try:
        source: Any = environment.tasks()
    except DeltarunnerError:
        raise
    except (Exception, SystemExit) as error:
        raise BadTask(f"tasks() raised {describe_error(error)}") from error
    if not isinstance(source, Iterable | AsyncIterable | Path):
        close = getattr(source, "close", None)
        if close is not None:  # a coroutine that nobody awaits would be warned of
            close()
        raise BadTask(f"tasks() gave {source!r:.80}: return a list of Task, or yield them (`async def` only to yield).")
    return cast("Tasks", source)


class TaskFeed:
    """Tasks one at a time, pulled when somebody can play one.

    What may block runs in the run's threads: `next` of a synchronous source, and its `finished`. A list cannot block.

    Args:
        tasks: the source.
        environment: the environment that they are played with.
        workers: the run's threads.
        is_kept: the run keeps a file, which has to give every task back as it was.
    """

    def __init__(self, tasks: Tasks, environment: Environment[Any], *, workers: Workers, is_kept: bool) -> None:
        source = read_tasks(Path(tasks), environment.task_class()) if isinstance(tasks, str | Path) else tasks
        self.repeatable = hasattr(source, "finished")
        """Whether the source hears of results, and so may give a task again."""
        self._source: Any = source
        self._workers = workers
        self._checks = TaskChecks(environment, is_kept=is_kept)
        self._asynchronous: AsyncIterator[Task] | None = None
        self._synchronous: Iterator[Task] | None = None
        self._blocks = not isinstance(source, Sequence)
        self._notifying = anyio.Lock()  # episodes end side by side, and an author's source is not made for that
        if isinstance(source, AsyncIterable):
            self._asynchronous = aiter(source)
        elif isinstance(source, Iterable):
            self._synchronous = iter(source)
        else:
            raise BadTask(f"tasks must be an iterable of Task or the path of a JSONL file, got {source!r:.80}")

    async def next(self) -> Task | None:
        """The next task, or None where there is no further one."""
        if self._asynchronous is not None:
            with native_cancellation_as(BadTask("tasks() cancelled the task that asked for the next one")):
                task: Any = await anext(self._asynchronous, _END)
        elif self._blocks:
            task = await self._workers.call(Job(self._next, "tasks()"))
        else:
            task = self._next()
        return None if task is _END else self._checks.checked(task)

    def _next(self) -> Any:
        assert self._synchronous is not None
        return next(self._synchronous, _END)

    async def finished(self, trajectory: Trajectory) -> None:
        """Tell the source, if it wants to hear, of one result at a time.

        Raises:
            BadTask: its `finished` raised.
        """
        if not self.repeatable:
            return
        try:
            async with self._notifying:
                with native_cancellation_as(BadTask("finished() of the task source cancelled its own task")):
                    await self._notify(trajectory)
        except BadTask:
            raise
        except (Exception, SystemExit) as error:
            raise BadTask(f"finished() of the task source raised {describe_error(error)}") from error

    async def _notify(self, trajectory: Trajectory) -> None:
        hear = self._source.finished
        if self._asynchronous is None and not is_async(hear):
            await self._workers.call(Job(lambda: hear(trajectory), "finished()"))
            return
        result = hear(trajectory)
        if inspect.isawaitable(result):
            await result

    async def aclose(self) -> None:
        """Close a generator of either colour; a synchronous one that blocks in a thread is left to it."""
        close = getattr(self._asynchronous, "aclose", None)
        if close is not None:
            await close()
        if inspect.isgenerator(self._synchronous) and not self._synchronous.gi_running:
            await self._workers.call(Job(self._synchronous.close, "tasks()"))
