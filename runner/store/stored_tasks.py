"""Conversion of tasks to JSON for a run file, and back to tasks of the author's class."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from runner.errors import RunFileError
from runner.store.json_values import class_name, decode_json, encode_json
from runner.tasks import Task, TaskBuilder

__all__ = ["TaskDecoder", "encode_task"]


def encode_task(task: Task) -> str:
    """The task's fields as JSON."""
    return encode_json({field.name: getattr(task, field.name) for field in dataclasses.fields(task)})


class TaskDecoder:
    """Decoder of tasks as `task_class`; fields that the class lacks are put into `info`.

    Args:
        task_class: the class of the tasks. For several environments, a mapping from the name of each environment, as in
            `Environment.parts()`, to the class of its tasks. The name is the text before the slash in a task's id.
    """

    def __init__(self, task_class: type[Task] | Mapping[str, type[Task]] = Task) -> None:
        classes = task_class if isinstance(task_class, Mapping) else {"": task_class}
        self._builders = {name: TaskBuilder(each) for name, each in classes.items()}
        self._other = self._builders.get("") or TaskBuilder(Task)

    def __call__(self, text: str) -> Task:
        """Return the task from the text that `encode_task` returned.

        Raises:
            RunFileError: the fields do not fit the class.
        """
        fields = decode_json(text)
        build = self._builders.get(str(fields["id"]).partition("/")[0], self._other)
        extra = {name: fields.pop(name) for name in fields.keys() - build.known}
        if extra:
            fields["info"] = {**fields["info"], **extra}
        if fields["prompt"] == []:
            fields["prompt"] = ()  # this is the default of the class
        try:
            return build(fields)
        except (TypeError, ValueError) as error:
            raise RunFileError(
                f"task {fields.get('id')!r} of the run file is not a {class_name(build.task_class)} ({error}). "
                f"Give the class that it was written with (task_class=), or leave task_class out."
            ) from error
