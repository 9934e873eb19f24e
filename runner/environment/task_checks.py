"""Checks of tasks before they are played: their ids, their fields, and that a run file returns them unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from runner.environment.environment import Environment
from runner.environment.program import Program
from runner.environment.task_files import read_numbered_tasks
from runner.errors import BadTask
from runner.store.storable import TaskCheck
from runner.tasks import Task, check_base_fields

__all__ = ["TaskChecks"]


class TaskChecks:
    """The checks of an environment's tasks.

    Args:
        environment: the environment.
        is_kept: True to check also that a run file returns tasks unchanged.
    """

    def __init__(self, environment: Environment[Any], *, is_kept: bool) -> None:
        self._task_class = environment.task_class()
        self._stored = TaskCheck() if is_kept else None
        writes_prompts = any(environment.overrides(hook) for hook in ("prompt", "rollout", "setup"))
        self._needs_prompts = isinstance(environment, Program) or not writes_prompts

    def checked(self, task: Any) -> Task:
        """Check a task and return it.

        Raises:
            BadTask: the value is not a task, or the task has no id or an invalid value.
        """
        _check_id(task)
        try:
            check_base_fields(vars(task))
        except (TypeError, ValueError) as error:
            raise BadTask(f"task {task.id!r}: {error}.") from error
        problem = self._stored.problem(task) if self._stored is not None else None
        if problem is not None:
            raise BadTask(f"task {task.id!r}: {problem}.")
        return task  # type: ignore[no-any-return]  # checked above

    def check_all(self, tasks: Iterable[Any]) -> int:
        """Check the tasks of an iterable that can be read again, and that their ids are unique; return their number.

        Raises:
            BadTask: a task is invalid, or has the id of an earlier one.
        """
        places: dict[str, int] = {}
        for number, task in enumerate(tasks, 1):
            first = places.setdefault(self.checked(task).id, number)
            if first != number:
                raise BadTask(
                    f"task {number} has the same id {task.id!r} as task {first}: give each task a unique id. If the "
                    f"source repeats tasks on purpose, define finished(trajectory) on the source; then ids may repeat."
                )
        return len(places)

    def check_file(self, path: Path, *, most: int | None = None) -> int:
        """Check the tasks of a JSONL file, or the first `most` of them, and return their number.

        Raises:
            BadTask: a task is invalid or has the id of an earlier one, or the file is empty. The message
                names the file, and the line.
        """
        places: dict[str, int] = {}
        for number, task in islice(read_numbered_tasks(path, self._task_class), most):
            try:
                self.checked(task)
            except BadTask as error:
                raise BadTask(f"{path}:{number}: {error}") from None
            if self._needs_prompts and not task.prompt:
                raise BadTask(
                    f"{path}:{number}: task {task.id!r} has no prompt, and the environment writes none: give the "
                    'task a "prompt".'
                )
            first = places.setdefault(task.id, number)
            if first != number:
                raise BadTask(f"{path}:{number}: line {first} has the same id {task.id!r}: give each task a unique id.")
        if not places:
            raise BadTask(f"the task file {str(path)!r} has no task: write one JSON object per line.")
        return len(places)

    def check_known(self, source: Any) -> int | None:
        """Check the tasks of a file or a list, and return their number; None for other sources.

        Raises:
            BadTask: a task is invalid.
        """
        if isinstance(source, str | Path):
            return self.check_file(Path(source))
        # Other sequences may load tasks one by one, and task sources that receive results may repeat them.
        if isinstance(source, list | tuple) and not hasattr(source, "finished"):
            return self.check_all(source)
        return None

    def check_first(self, source: Any) -> Any:
        """Check the first task of an iterable, and return an iterable of all its tasks.

        Async sources, and sources that receive results, are returned unchanged.

        Raises:
            BadTask: the task is invalid or missing.
        """
        if not isinstance(source, Iterable) or hasattr(source, "finished"):
            return source
        rest = iter(source)
        for first in rest:
            self.checked(first)
            return source if isinstance(source, Sequence) else chain([first], rest)
        raise BadTask("tasks() returns no task: there is nothing to play.")


def _check_id(task: Any) -> None:
    if not isinstance(task, Task):
        raise BadTask(f"a task source returned {task!r:.80}, which is not a Task: give Task(id=..., prompt=...).")
    if not isinstance(task.id, str):
        raise BadTask(
            f"a task has the id {task.id!r:.60}, of type {type(task.id).__name__}: give each task a string that is "
            f"unique in the run, such as Task(id={str(task.id)!r:.60})."
        )
    if not task.id.strip():
        blank = f"the id {task.id!r:.60}, which is blank" if task.id else "no id"
        raise BadTask(
            f"a task has {blank} (prompt {task.prompt!r:.60}): give each task a string that is unique in the run."
        )
    try:
        task.id.encode()
    except UnicodeEncodeError:
        raise BadTask(
            f"the task id {task.id!r:.60} is not valid text, since it has half a surrogate pair: remove that half."
        ) from None
