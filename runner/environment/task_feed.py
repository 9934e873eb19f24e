"""Where a run's tasks come from: iterables of either colour, JSONL files, sources that hear of results."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import anyio
import orjson

from runner.concurrency.cancellation import native_cancellation_as
from runner.concurrency.threads import Job, Workers
from runner.concurrency.user_code import describe_error, is_async
from runner.environment.environment import Environment
from runner.errors import BadTask, DeltarunnerError
from runner.tasks import Task, TaskBuilder, check_own_fields
from runner.trajectory import Trajectory

__all__ = ["TaskFeed", "TaskSource", "Tasks", "own_tasks", "read_tasks"]

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


def own_tasks(environment: Environment[Any]) -> Tasks:
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
    """

    def __init__(self, tasks: Tasks, *, task_class: type[Task], workers: Workers) -> None:
        source = read_tasks(Path(tasks), task_class) if isinstance(tasks, str | Path) else tasks
        self.repeatable = hasattr(source, "finished")
        """Whether the source hears of results, and so may give a task again."""
        self._source: Any = source
        self._workers = workers
        self._asynchronous: AsyncIterator[Task] | None = None
        self._synchronous: Iterator[Task] | None = None
        self._blocks = not isinstance(source, Sequence)
        self._hearing = anyio.Lock()  # episodes end side by side, and an author's source is not made for that
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
        return None if task is _END else _checked(task)

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
            async with self._hearing:
                with native_cancellation_as(BadTask("finished() of the task source cancelled its own task")):
                    await self._hear(trajectory)
        except BadTask:
            raise
        except (Exception, SystemExit) as error:
            raise BadTask(f"finished() of the task source raised {describe_error(error)}") from error

    async def _hear(self, trajectory: Trajectory) -> None:
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


def read_tasks(path: Path, task_class: type[Task] = Task) -> Iterator[Task]:
    """The tasks of a JSONL file, one object a line, read as they are needed.

    Raises:
        BadTask: a line that is no object, lacks a field or has keys that nothing reads; names file and line.
    """
    if not path.is_file():
        raise BadTask(f"there is no task file {str(path)!r}; give the path of a JSONL file with one task a line.")
    return _read_lines(path, task_class)


def _read_lines(path: Path, task_class: type[Task]) -> Iterator[Task]:
    build = TaskBuilder(task_class)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _task_of(line, build, f"{path}:{number}")


def _task_of(line: bytes, build: TaskBuilder, where: str) -> Task:
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise BadTask(f"{where}: not JSON ({error}).") from error
    if not isinstance(fields, dict):
        raise BadTask(f"{where}: a task is a JSON object, got {type(fields).__name__}.")
    unknown = sorted(set(fields) - build.known)
    if unknown:
        name = build.task_class.__name__
        raise BadTask(
            f"{where}: nothing reads {', '.join(map(repr, unknown))}: put it under 'info', or give {name} a field of "
            f"that name (class Case(Task) with Environment[Case]). {name} has {', '.join(sorted(build.known))}."
        )
    try:
        return build(fields)
    except (TypeError, ValueError) as error:
        raise BadTask(f"{where}: {error}.") from error


def _checked(task: Any) -> Task:
    if not isinstance(task, Task):
        raise BadTask(f"a source gave {task!r:.80}, which is no Task: give Task(id=..., prompt=...).")
    if not isinstance(task.id, str):
        raise BadTask(
            f"a task has the id {task.id!r:.60}, of type {type(task.id).__name__}: give each task a string that is "
            f"unique in the run, such as Task(id={str(task.id)!r:.60})."
        )
    if not task.id:
        raise BadTask(
            f"a task has no id (prompt {task.prompt!r:.60}): give each task a string that is unique in the run."
        )
    try:
        task.id.encode()
    except UnicodeEncodeError:
        raise BadTask(f"the task id {task.id!r} is no text: it holds half a surrogate pair.") from None
    try:
        check_own_fields(vars(task))
    except (TypeError, ValueError) as error:
        raise BadTask(f"task {task.id!r}: {error}.") from error
    return task
