"""Which of an environment's tasks are played: all, the first so many, or the one with an id."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

from runner.concurrency.user_code import describe_error
from runner.environment.environment import Environment
from runner.environment.task_checks import TaskChecks
from runner.environment.task_feed import Tasks
from runner.environment.task_files import read_tasks
from runner.errors import BadTask, DeltarunnerError
from runner.tasks import Task

__all__ = ["check_ahead", "find_selected", "select"]


def select(source: Tasks, task_class: type[Task], *, most: int | None = None, only: str | None = None) -> Tasks:
    """The tasks of `source` that are to be played; a source that hears of results goes on hearing of them.

    Args:
        source: tasks, or the path of a JSONL file.
        task_class: what the lines of a file become.
        most: how many, the first ones; None is all of them.
        only: the id of the only one; that there is none is found out when all have been seen.
    """
    if isinstance(source, str | Path):
        source = read_tasks(Path(source), task_class)
    if most is None and only is None:
        return source
    kind: Any = _AsyncSelection if isinstance(source, AsyncIterable) else _TaskSelection
    chosen = kind(source, most, only)
    if hasattr(source, "finished"):
        chosen.finished = source.finished
    return chosen  # type: ignore[no-any-return]  # one of the two


def check_ahead(
    chosen: Tasks, source: Tasks, environment: Environment[Any], checks: TaskChecks, *, most: int | None = None
) -> tuple[Tasks, int | None]:
    """Check what was chosen of `source` before the start, as far as nothing is lost by it.

    A file and a list are checked whole. Of a generator the first task is checked, and stays the first. An async source,
    one that is given the results, and a generator that may read what `lifespan()` yields are left as they are.

    Args:
        chosen: what `select` made of the source.
        source: tasks, or the path of a JSONL file.
        environment: the environment whose tasks they are.
        checks: the checks of each task.
        most: how many were chosen; None is all.

    Returns:
        The tasks, and how many there are; None where that is not known.

    Raises:
        BadTask: a task cannot be used, there is none, or the source raised.
    """
    try:
        if isinstance(source, str | Path):
            return chosen, checks.check_file(Path(source), most=most)
        if isinstance(source, list | tuple) and not hasattr(source, "finished"):
            count = checks.check_all(source[:most])
            if not count:
                raise BadTask("tasks() gives no task: there is nothing to play.")
            return chosen, count
        if environment.overrides("lifespan"):
            return chosen, None
        return checks.check_first(chosen), None
    except DeltarunnerError:
        raise
    except (Exception, SystemExit) as error:
        raise BadTask(f"tasks() raised {describe_error(error)}") from error


def find_selected(chosen: Tasks, source: Tasks, environment: Environment[Any], checks: TaskChecks) -> Tasks:
    """Look up the task that was chosen of `source` now, where that is possible.

    An async source, one that is given the results, and a generator that may read what `lifespan()` yields have to wait.

    Raises:
        BadTask: there is no such task, it cannot be used, or the source raised.
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


class _Selection:
    """Some of a source's tasks. A source that hears of results has its `finished` put on the choice."""

    finished: Callable[..., Any]

    def __init__(self, source: Any, most: int | None, only: str | None) -> None:
        self._source = source
        self._most = most
        self._only = only


class _TaskSelection(_Selection):
    def __iter__(self) -> Iterator[Task]:
        if self._only is None:
            yield from islice(self._source, self._most)
            return
        seen: list[str] = []
        for task in self._source:
            if task.id == self._only:
                yield task
                return
            seen.append(task.id)
        raise _no_such_task(self._only, seen)


class _AsyncSelection(_Selection):
    async def __aiter__(self) -> AsyncIterator[Task]:
        tasks: Any = aiter(self._source)
        seen: list[str] = []
        # Closed here: what is left of an async generator would be closed by whichever loop comes by.
        async with aclosing(tasks) if hasattr(tasks, "aclose") else nullcontext():
            if self._most == 0:
                return
            async for task in tasks:
                seen.append(task.id)
                if self._only is None or task.id == self._only:
                    yield task
                if len(seen) == self._most or task.id == self._only:
                    return
        if self._only is not None:
            raise _no_such_task(self._only, seen)


def _no_such_task(id: str, seen: list[str]) -> BadTask:
    first = ", ".join(map(repr, seen[:3])) or "none"
    return BadTask(f"There is no task {id!r} among {len(seen)}; the first ids are {first}.")
