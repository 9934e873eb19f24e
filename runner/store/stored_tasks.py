"""Tasks in a run file: encoded as JSON, decoded as a task of the author's class."""

from __future__ import annotations

import dataclasses

from runner.errors import RunFileError
from runner.store.json_values import class_name, decode_json, encode_json
from runner.tasks import Task, TaskBuilder

__all__ = ["TaskDecoder", "encode_task"]


def encode_task(task: Task) -> str:
    """The task's fields as JSON."""
    return encode_json({field.name: getattr(task, field.name) for field in dataclasses.fields(task)})


class TaskDecoder:
    """Decodes tasks as `task_class`; fields that the class lacks are put into `info`."""

    def __init__(self, task_class: type[Task] = Task) -> None:
        self._build = TaskBuilder(task_class)

    def __call__(self, text: str) -> Task:
        """The task.

        Raises:
            RunFileError: the fields do not fit the class.
        """
        fields = decode_json(text)
        extra = {name: fields.pop(name) for name in fields.keys() - self._build.known}
        if extra:
            fields["info"] = {**fields["info"], **extra}
        if fields["prompt"] == []:
            fields["prompt"] = ()  # the class's own default
        try:
            return self._build(fields)
        except (TypeError, ValueError) as error:
            raise RunFileError(
                f"task {fields.get('id')!r} of the run file is not a {class_name(self._build.task_class)} ({error}). "
                f"Give the class that it was written with (task_class=), or leave task_class out."
            ) from error
