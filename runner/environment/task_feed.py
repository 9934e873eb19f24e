"""The tasks of a run: from sync or async iterables, JSONL files, and sources that receive results."""

from __future__ import annotations

import inspect
import math
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias, cast, runtime_checkable

import anyio

from runner.concurrency.cancellation import native_cancellation_as
from runner.concurrency.threads import Job, Workers
from runner.concurrency.user_code import describe_error, is_async
from runner.environment.environment import Environment
from runner.environment.task_checks import TaskChecks
from runner.environment.task_files import read_tasks
from runner.environment.task_requests import TaskRequests
from runner.errors import BadTask, DeltarunnerError
from runner.tasks import Task
from runner.trajectory import Trajectory

__all__ = ["TaskFeed", "TaskSource", "Tasks", "environment_tasks"]

Tasks: TypeAlias = Iterable[Task] | AsyncIterable[Task] | str | Path
"""The tasks of a run; a string or a path is a JSONL file."""

_END = object()


@runtime_checkable
class TaskSource(Protocol):
    """Tasks that are chosen while the run plays: an iterable, sync or async, that also receives every result.

    It may repeat a task; the runner counts the visits. When a run file is resumed, `finished` first receives the
    trajectories in that file, in the order of their commits.
    """

    def __iter__(self) -> Iterator[Task]:
        """Yield tasks. Each task is requested, in a thread, when its first episode can begin."""
        ...

    def finished(self, trajectory: Trajectory) -> None:
        """Receive a trajectory after its commit, one at a time; may be async. An error ends the run."""
        ...


def environment_tasks(environment: Environment[Any]) -> Tasks:
    """Return the result of the environment's `tasks()`.

    Raises:
        BadTask: `tasks()` raised, or did not return an iterable.
    """
    try:
        source: Any = environment.tasks()
    except DeltarunnerError:
        raise
    except (Exception, SystemExit) as error:
        raise BadTask(f"tasks() raised {describe_error(error)}") from error
    if not isinstance(source, Iterable | AsyncIterable | Path):
        close = getattr(source, "close", None)
        if close is not None:  # an unclosed coroutine would cause a warning of Python
            close()
        raise BadTask(f"tasks() returned {source!r:.80}: return a list of Task, or yield (`async def` must yield).")
    return cast("Tasks", source)


class TaskFeed:
    """A feed of tasks: it returns them one at a time, when an episode can begin.

    `next` and `finished` of a synchronous source run in worker threads, because they may block. A sequence is read
    directly, on the event loop. An asynchronous source runs in a separate task of the event loop, since it may keep a
    task group open between two of its tasks.

    Args:
        tasks: the source.
        environment: the environment.
        workers: the worker threads of the run.
        is_kept: True to check also that a run file returns tasks unchanged.
    """

    def __init__(self, tasks: Tasks, environment: Environment[Any], *, workers: Workers, is_kept: bool) -> None:
        source = read_tasks(Path(tasks), environment.task_class()) if isinstance(tasks, str | Path) else tasks
        self.requests = source if isinstance(source, TaskRequests) else None
        """The source if it consists of requests of callers, else None."""
        self._is_notified = hasattr(source, "finished")
        self.repeatable = self._is_notified or self.requests is not None
        """True if the source may repeat tasks: it receives results, or is a source of requests."""
        self._source: Any = source
        self._workers = workers
        self._checks = TaskChecks(environment, is_kept=is_kept)
        self._synchronous: Iterator[Task] | None = None
        self._blocks = not isinstance(source, Sequence)
        self._ahead: list[Any] = []
        self._own_task: _SourceTask | None = None
        self._notifying = anyio.Lock()  # episodes end concurrently, but a source gets one result at a time
        if isinstance(source, AsyncIterable):
            self._own_task = _SourceTask(aiter(source))
        elif isinstance(source, Iterable):
            self._synchronous = iter(source)
        else:
            raise BadTask(f"tasks={source!r:.80}: give an iterable of Task, or the path of a JSONL file.")

    async def __aenter__(self) -> Self:
        if self._own_task is not None:
            await self._own_task.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close the source if it is a generator, sync or async. A generator that is blocked in a thread stays open."""
        if self._own_task is not None:
            await self._own_task.__aexit__()
        if inspect.isgenerator(self._synchronous) and not self._synchronous.gi_running:
            await self._workers.call(Job(self._synchronous.close, "tasks()"))

    async def look_ahead(self, seconds: float) -> None:
        """Take and check the first task, which `next` returns later.

        A source that may repeat tasks is skipped, since its first task may depend on results or on a request. If an
        asynchronous source has no task within `seconds`, `next` waits for this task later.

        Raises:
            BadTask: the first task is invalid.
        """
        if self.repeatable:
            return
        with anyio.move_on_after(math.inf if self._own_task is None else seconds):
            self._ahead.append(await self._fetch())
            self._checked(self._ahead[0])

    async def next(self) -> Task | None:
        """Return the next task; None at the end."""
        if self._ahead:
            return self._checked(self._ahead.pop())
        return self._checked(await self._fetch())

    def _checked(self, task: Any) -> Task | None:
        return None if task is _END else self._checks.checked(task)

    async def _fetch(self) -> Any:
        if self._own_task is not None:
            return await self._own_task.next()
        if self._blocks:
            return await self._workers.call(Job(self._next, "tasks()"))
        return self._next()

    def _next(self) -> Any:
        assert self._synchronous is not None
        return next(self._synchronous, _END)

    async def finished(self, trajectory: Trajectory) -> None:
        """Send a result to a source that has `finished`; results are sent one at a time.

        Raises:
            BadTask: the source's `finished` raised an error, or cancelled the asyncio task that called it.
        """
        if not self._is_notified:
            return
        try:
            async with self._notifying:
                with native_cancellation_as(BadTask("finished() of the task source cancelled its own asyncio task")):
                    await self._notify(trajectory)
        except BadTask:
            raise
        except (Exception, SystemExit) as error:
            raise BadTask(f"finished() of the task source raised {describe_error(error)}") from error

    async def _notify(self, trajectory: Trajectory) -> None:
        finished = self._source.finished
        if self._own_task is None and not is_async(finished):
            await self._workers.call(Job(lambda: finished(trajectory), "finished()"))
            return
        result = finished(trajectory)
        if inspect.isawaitable(result):
            await result


class _SourceTask:
    """A task of the event loop that takes tasks from an asynchronous source, and closes the source.

    All requests are made in this one task, since the source may keep scopes open between two requests.
    """

    def __init__(self, source: AsyncIterator[Any]) -> None:
        self._source = source
        self._group = anyio.create_task_group()
        self._asked, self._answered = anyio.Event(), anyio.Event()
        self._is_asked = self._is_closed = self._has_failed = False
        self._answer: Any = None
        self._error: BaseException | None = None

    async def __aenter__(self) -> None:
        await self._group.__aenter__()
        self._group.start_soon(self._run, name="tasks()")

    async def __aexit__(self) -> None:
        self._is_closed = True
        if self._is_asked and not self._answered.is_set():
            self._group.cancel_scope.cancel()
        self._asked.set()
        await self._group.__aexit__(None, None, None)
        if self._has_failed and self._error is not None:
            raise self._error

    async def next(self) -> Any:
        """Return the next task; `_END` at the end.

        After a cancelled call, the next call returns the task that the cancelled call requested.
        """
        if not self._is_asked:
            self._is_asked = True
            self._asked.set()
        await self._answered.wait()
        self._answered, self._is_asked = anyio.Event(), False
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._answer

    async def _run(self) -> None:
        try:
            await self._answer_requests()
        except (Exception, BaseExceptionGroup) as raised:  # a source that keeps a task group open may raise a group
            error: BaseException | None = raised
            if isinstance(error, BaseExceptionGroup):
                _, error = error.split((GeneratorExit, anyio.get_cancelled_exc_class()))
            if error is not None:  # None if the source was only closed
                self._error, self._has_failed = BadTask(f"tasks() raised {describe_error(error)}"), True
            self._answered.set()

    async def _answer_requests(self) -> None:
        try:
            while await self._wait_for_request():
                try:
                    with native_cancellation_as(BadTask("tasks() cancelled the asyncio task that awaited it")):
                        self._answer = await anext(self._source, _END)
                except (Exception, SystemExit) as error:
                    self._error = error
                self._answered.set()
        finally:
            close = getattr(self._source, "aclose", None)
            if close is not None:
                await close()

    async def _wait_for_request(self) -> bool:
        await self._asked.wait()
        self._asked = anyio.Event()
        return not self._is_closed
