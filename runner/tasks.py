"""Tasks: one problem each."""

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

    Each episode gets a deep copy of its own: what it changes in its task no other episode sees.
    """

    id: str
    """The name of the task, unique within a run."""
    prompt: Prompt = ()
    """The first messages; a string is a user message."""
    answer: str = ""
    """Reference data for scoring."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Anything else that the environment needs: values of JSON, which a run file gives back as they are."""


def deep_copy(value: T) -> T:
    """A copy in depth, in which what cannot be copied (a lock, an open file) is shared."""
    made: T = _copied(value, {})
    return made


# The types themselves: an object of a subclass may have attributes that change.
_UNCHANGING = frozenset({str, int, float, bool, bytes, type(None)})


def _copied(value: Any, known: dict[int, Any]) -> Any:
    """The same as `copy.deepcopy`, faster for JSON and without its refusals.

    `known` holds the copies by the identity of what they are copies of, so that what is shared inside stays shared.
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
    with contextlib.suppress(Exception):  # whatever its class makes of being copied
        if _is_plain(kind) and hasattr(value, "__dict__"):
            made = known[id(value)] = copy.copy(value)
            vars(made).update((name, _copied(each, known)) for name, each in vars(value).items())
            return made
        # With a memo of its own: a copy that fails half way leaves what it has made so far in its memo.
        copies: dict[int, Any] = {}
        made = copy.deepcopy(value, copies)
        known.update((key, each) for key, each in copies.items() if key != id(copies))
        return made
    known[id(value)] = value
    return value


def _is_plain(kind: type) -> bool:
    """Whether its objects are what their attributes are: the class says nothing of its own about being copied."""
    own = ("__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")
    return all(getattr(kind, name, None) is getattr(object, name, None) for name in own)


class TaskBuilder:
    """Makes tasks of a class from JSON: each field checked, and converted to the type that the class gives it."""

    def __init__(self, task_class: type[Task]) -> None:
        self.task_class = task_class
        """The class whose tasks are made."""
        self.known = frozenset(field.name for field in dataclasses.fields(task_class))
        """The names of its fields."""
        self.needed = tuple(
            field.name
            for field in dataclasses.fields(task_class)
            if field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        """The names of those without a default."""
        self._validators = _validators(task_class)

    def __call__(self, fields: Mapping[str, Any]) -> Task:
        """The task of these fields.

        Raises:
            ValueError: a field has a value that does not fit.
            TypeError: a field is missing or unknown.
        """
        check_base_fields(fields)
        return self.task_class(**{name: self.typed(name, value) for name, value in fields.items()})

    def typed(self, name: str, value: Any) -> Any:
        """The value of a field as the type that its class gives it.

        Raises:
            ValueError: it does not fit.
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
    """Check the fields that every task has.

    Raises:
        ValueError: one has a value of another kind.
        TypeError: the prompt is none.
    """
    for name, kind, wanted in (("id", str, "a string"), ("answer", str, "a string"), ("info", Mapping, "an object")):
        if name in fields and not isinstance(fields[name], kind):
            raise ValueError(f"{name}: {wanted} is needed, got {fields[name]!r:.60}")
    as_messages(fields.get("prompt", ()))


_BASE_FIELDS = frozenset(field.name for field in dataclasses.fields(Task))


def _validators(task_class: type[Task]) -> dict[str, TypeAdapter[Any]]:
    """For each field that an author added, what turns JSON into its type; a type that pydantic cannot say has none."""
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
