"""The class `Task`, a builder of tasks from JSON, and deep copies."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from runner.messages import Prompt, as_messages

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = ["Task", "TaskBuilder", "check_base_fields", "deep_copy"]

T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """One problem; subclass it for typed fields.

    Each episode gets its own deep copy, so changes to it do not affect other episodes.
    """

    id: str
    """The name of the task, unique within a run."""
    prompt: Prompt = ()
    """The first messages; a string is a user message."""
    answer: str = ""
    """Reference data for scoring."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Further JSON values for the environment; a run file returns them unchanged."""


def deep_copy(value: T) -> T:
    """A deep copy that shares objects that cannot be copied, such as locks and open files."""
    made: T = _copied(value, {})
    return made


# Only values of exactly these types are shared, since objects of subclasses may have mutable attributes.
_UNCHANGING = frozenset({str, int, float, bool, bytes, type(None)})


def _copied(value: Any, known: dict[int, Any]) -> Any:
    """Return a deep copy, as `copy.deepcopy` does, but faster for JSON; objects that cannot be copied are shared.

    `known` contains the copies by the ids of their originals, so that shared parts stay shared.
    """
    kind = type(value)
    if kind in _UNCHANGING:
        return value
    if id(value) in known:
        return known[id(value)]
    if kind is dict:
        made: Any = known.setdefault(id(value), {})
        for key, each in value.items():
            made[key] = each if type(each) in _UNCHANGING else _copied(each, known)
        return made
    if kind is list:
        made = known.setdefault(id(value), [])
        made.extend(_copied(each, known) for each in value)
        return made
    if kind is tuple:
        return tuple(_copied(each, known) for each in value)
    with contextlib.suppress(Exception):  # copying runs code of the class, which may raise any exception
        if _is_plain(kind) and hasattr(value, "__dict__"):
            made = known[id(value)] = copy.copy(value)
            vars(made).update((name, _copied(each, known)) for name, each in vars(value).items())
            return made
        # This copy has its own memo, because a failing copy leaves unfinished objects in its memo.
        copies: dict[int, Any] = {}
        made = copy.deepcopy(value, copies)
        known.update((key, each) for key, each in copies.items() if key != id(copies))
        return made
    known[id(value)] = value
    return value


def _is_plain(kind: type) -> bool:
    """Return True if copying an object of this class means copying its attributes: it has no copy methods."""
    own = ("__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")
    return all(getattr(kind, name, None) is getattr(object, name, None) for name in own)


class TaskBuilder:
    """A builder of tasks of a class from JSON; fields are checked and converted to their types."""

    def __init__(self, task_class: type[Task]) -> None:
        self.task_class = task_class
        self.known = frozenset(field.name for field in dataclasses.fields(task_class))
        self.needed = tuple(
            field.name
            for field in dataclasses.fields(task_class)
            if field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        """Names of the fields without a default."""
        self._validators = _validators(task_class)

    def __call__(self, fields: Mapping[str, Any]) -> Task:
        """Build a task from its fields.

        Raises:
            ValueError: a value does not fit its field.
            TypeError: a field is missing or unknown, or the prompt is not valid.
        """
        check_base_fields(fields)
        return self.task_class(**{name: self.typed(name, value) for name, value in fields.items()})

    def typed(self, name: str, value: Any) -> Any:
        """Convert a value to the type of its field.

        Raises:
            ValueError: the value does not fit.
        """
        from pydantic import ValidationError

        validator = self._validators.get(name)
        if validator is None:
            return value
        try:
            return validator.validate_python(value)
        except ValidationError as error:
            raise ValueError(f"{name}: {error.errors()[0]['msg']}, got {value!r:.60}") from error


def check_base_fields(fields: Mapping[str, Any]) -> None:
    """Check the fields of the class `Task`.

    Raises:
        ValueError: a value has the wrong type.
        TypeError: the prompt is not valid.
    """
    for name, kind, wanted in (("id", str, "a string"), ("answer", str, "a string"), ("info", Mapping, "an object")):
        if name in fields and not isinstance(fields[name], kind):
            raise ValueError(f"{name}: {wanted} is needed, got {fields[name]!r:.60}")
    as_messages(fields.get("prompt", ()))


_BASE_FIELDS = frozenset(field.name for field in dataclasses.fields(Task))


def _validators(task_class: type[Task]) -> dict[str, TypeAdapter[Any]]:
    """Validators of the fields that an author added, by name; none for types that pydantic does not support.

    The result is empty if a type hint of the class cannot be resolved.
    """
    from pydantic import PydanticUserError, TypeAdapter

    try:
        hints = typing.get_type_hints(task_class)
    except NameError:
        return {}
    validators = {}
    for name in hints.keys() - _BASE_FIELDS:
        with contextlib.suppress(PydanticUserError):
            validators[name] = TypeAdapter(hints[name])
    return validators
