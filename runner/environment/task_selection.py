"""Selection of tasks: all, the first ones, or the one with an id."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, Final

from runner.concurrency.user_code import describe_error
from runner.environment.environment import Environment
from runner.environment.task_checks import TaskChecks
from runner.environment.task_feed import Tasks
from runner.environment.task_files import read_tasks
from runner.errors import BadTask, DeltarunnerError
from runner.tasks import Task

__all__ = ["SelectedTasks", "check_ahead", "find_selected", "select"]

_NAMED_IDS: Final = 3
"""Maximum number of ids that the error about a missing task names."""


def select(source: Tasks, task_class: type[Task], *, most: int | None = None, only: str | None = None) -> Tasks:
    """Select tasks of a source; a source that receives results still receives them.

    Args:
        source: tasks, or the path of a JSONL file.
        task_class: the class of the tasks of a file.
        most: select the first `most` tasks; None for all.
        only: select the task with this id; if there is no such task, an error is raised after the last task.
    """
    if isinstance(source, str | Path):
        source = read_tasks(Path(source), task_class)
    if most is None and only is None and isinstance(source, Sequence):
        return source
    kind: Any = _AsyncSelection if isinstance(source, AsyncIterable) else _TaskSelection
    chosen = kind(source, most, only)
    if hasattr(source, "finished"):
        chosen.finished = source.finished
    return chosen  # type: ignore[no-any-return]  # a selection of one of the two kinds


def check_ahead(
    chosen: Tasks, source: Tasks, environment: Environment[Any], checks: TaskChecks, *, most: int | None = None
) -> tuple[Tasks, int | None]:
    """Check selected tasks before the start, if that consumes nothing.

    Files and lists are checked completely. Of a generator, the first task is checked and stays the first. Other sources
    are checked only during the run: async sources, sources that receive results, and generators that may use the value
    of `lifespan()`.

    Args:
        chosen: the result of `select`.
        source: tasks, or the path of a JSONL file.
        environment: the environment of the tasks.
        checks: the checks of each task.
        most: the number of selected tasks; None for all.

    Returns:
        The tasks, and their number if known.

    Raises:
        BadTask: a task is invalid or missing, or the source raised.
    """
    try:
        if isinstance(source, str | Path):
            return chosen, checks.check_file(Path(source), most=most)
        if isinstance(source, list | tuple) and not hasattr(source, "finished"):
            count = checks.check_all(source[:most])
            if not count:
                raise BadTask("tasks() returns no task: there is nothing to play.")
            return chosen, count
        if environment.overrides("lifespan"):
            return chosen, None
        return checks.check_first(chosen), None
    except DeltarunnerError:
        raise
    except (Exception, SystemExit) as error:
        raise BadTask(f"tasks() raised {describe_error(error)}") from error


def find_selected(chosen: Tasks, source: Tasks, environment: Environment[Any], checks: TaskChecks) -> Tasks:
    """Find the selected task before the start, if possible.

    Async sources, sources that receive results, and generators that may use the value of `lifespan()` are not read.

    Raises:
        BadTask: the task is missing or invalid, or the source raised.
    """
    ready = isinstance(source, str | Path | Sequence) or not environment.overrides("lifespan")
    if not ready or not isinstance(chosen, _TaskSelection) or hasattr(chosen, "finished"):
        return chosen
    try:
        tasks = list(chosen)
    except DeltarunnerError:
        raise
    except (Exception, SystemExit) as error:
        raise BadTask(f"tasks() raised {describe_error(error)}") from error
    checks.check_all(tasks)
    return tasks


class SelectedTasks:
    """Some tasks of a source. If the source receives results, its `finished` is set on this object."""

    finished: Callable[..., Any]

    def __init__(self, source: Any, most: int | None, only: str | None) -> None:
        self._source = source
        self._most = most
        self._only = only


class _TaskSelection(SelectedTasks):
    def __iter__(self) -> Iterator[Task]:
        try:
            yield from self._selected()
        finally:
            if inspect.isgenerator(self._source):  # the source may hold a file open
                self._source.close()

    def _selected(self) -> Iterator[Task]:
        if self._only is None:
            yield from islice(self._source, self._most)
            return
        count, first = 0, list[str]()
        for count, task in enumerate(self._source, 1):
            if task.id == self._only:
                yield task
                return
            if count <= _NAMED_IDS:
                first.append(task.id)
        raise _no_such_task(self._only, count, first)


class _AsyncSelection(SelectedTasks):
    async def __aiter__(self) -> AsyncIterator[Task]:
        tasks: Any = aiter(self._source)
        count, first = 0, list[str]()
        # The generator is closed here, since Python could close it on any event loop.
        async with aclosing(tasks) if hasattr(tasks, "aclose") else nullcontext():
            if self._most == 0:
                return
            async for task in tasks:
                if self._only is None or task.id == self._only:
                    yield task
                count += 1
                if count <= _NAMED_IDS:
                    first.append(task.id)
                if count == self._most or task.id == self._only:
                    return
        if self._only is not None:
            raise _no_such_task(self._only, count, first)


def _no_such_task(id: str, count: int, first: Sequence[str]) -> BadTask:
    if not count:
        return BadTask(f"There are no tasks, so none has the id {id!r}.")
    return BadTask(f"None of {count} tasks has the id {id!r}; the first ids are {', '.join(map(repr, first))}.")
