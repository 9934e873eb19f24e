"""Checks that values come back from a run file unchanged, with a message and a fix for a value that would change."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import fractions
import numbers
import operator
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, compress
from pathlib import PurePath
from typing import Any, Final

from pydantic import BaseModel

from runner.scoring import as_score
from runner.store.json_values import class_name, decode_json, encode_json
from runner.tasks import Task, TaskBuilder
from runner.trajectory import Trajectory, Turn

__all__ = ["TaskCheck", "first_unstorable", "make_storable", "tuples_in"]

MAX_DEPTH: Final = 200
"""Maximum depth of nested containers, since JSON readers fail with very deep ones."""

_PLAIN: Final = frozenset({str, int, float, bool, type(None)})
_KEPT: Final = _PLAIN | {dict, list, tuple}
_TEXT: Final = frozenset({str})
_OWN_FIELDS: Final = frozenset(field.name for field in dataclasses.fields(Task))


def first_unstorable(value: Any, where: str) -> str | None:
    """The message for the first part of `value` that a run file would return changed.

    None, bool, int of any size, float (with NaN and infinities), str, lists, and mappings with text keys are kept. A
    subclass of these comes back as the plain type, with an equal value. Tuples come back as lists, without a message.

    Args:
        value: a value of an author.
        where: the name of the value, such as `info`; the message adds the path inside it.

    Returns:
        The place, the type, and the fix; None if all of it is kept.
    """
    return None if _are_plain([value]) else next(_unstorable(value, where, ()), None)


def tuples_in(value: Any, where: str) -> Iterator[str]:
    """The place of each tuple in `value`, such as `info['a'][0]`; `where` is the name of `value`."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tuples_in(inner, f"{where}[{key!r:.40}]")
    elif isinstance(value, list | tuple):
        if isinstance(value, tuple):
            yield where
        for index, inner in enumerate(value):
            yield from tuples_in(inner, f"{where}[{index}]")


def _are_plain(values: Sequence[Any]) -> bool:
    """True if `values` contain only JSON's own types and tuples, at most `MAX_DEPTH` deep.

    This check is fast, since it makes no texts for messages. Nearly all values pass it.
    """
    # Each pass checks one depth, without a loop in Python over its values.
    for _ in range(MAX_DEPTH):
        kinds = set(map(type, values))
        if kinds <= _PLAIN:
            return True
        dicts = _of_type(dict, values) if dict in kinds else ()
        lists = _of_type(list, values) if list in kinds else ()
        tuples = _of_type(tuple, values) if tuple in kinds else ()
        if not kinds <= _KEPT or not _TEXT.issuperset(map(type, chain.from_iterable(dicts))):
            return False
        values = [*chain.from_iterable(map(dict.values, dicts)), *chain(*lists, *tuples)]
    return False


def _of_type(kind: type, values: Sequence[Any]) -> Collection[Any]:
    """Return the values of this type, each object once.

    With repeated objects, the number of values would double at every depth for a list that contains itself twice.
    """
    found = list(compress(values, map(partial(operator.is_, kind), map(type, values))))
    return dict(zip(map(id, found), found, strict=True)).values()


def _unstorable(value: Any, where: str, outer: tuple[int, ...]) -> Iterator[str]:
    if type(value) in _PLAIN or isinstance(value, str | int | float):
        return
    if not isinstance(value, Mapping | list | tuple):
        yield f"{where} is {_kind(value)}, which a run file cannot keep: {_fix(value)}"
        return
    if id(value) in outer:
        yield f"{where} is {_kind(value)} that contains itself, which a run file cannot keep: leave that part out"
    elif len(outer) >= MAX_DEPTH:
        yield f"{where} is nested more than {MAX_DEPTH} levels deep, which a run file cannot keep: flatten it"
    else:
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            if isinstance(value, Mapping) and not isinstance(key, str):
                fix = "give key.decode()" if isinstance(key, bytes) else "give str(key)"
                yield (
                    f"{where} has the key {key!r:.40}, {_kind(key)}; JSON keys are text, so it would come back "
                    f"changed: {fix}"
                )
            if type(inner) not in _PLAIN:
                yield from _unstorable(inner, f"{where}[{key!r:.40}]", (*outer, id(value)))


def _kind(value: Any) -> str:
    cls = type(value)
    name = cls.__qualname__ if cls.__module__ == "builtins" else class_name(cls).replace(":", ".")
    return f"of type {name}"


_FIXES: Final[tuple[tuple[Any, str], ...]] = (
    ((bytes, bytearray, memoryview), "give text, such as value.decode() or base64.b64encode(value).decode()"),
    ((set, frozenset), "give a list, sorted(value)"),
    ((datetime.datetime, datetime.date, datetime.time), "give its text, value.isoformat()"),
    (datetime.timedelta, "give its seconds, value.total_seconds()"),
    ((PurePath, uuid.UUID, fractions.Fraction), "give its text, str(value)"),
    (enum.Enum, "give value.value"),
    (BaseModel, 'give value.model_dump(mode="json")'),
    (type, "give its name, value.__name__"),
)


def _fix(value: Any) -> str:
    for kinds, fix in _FIXES:
        if isinstance(value, kinds):
            return fix
    if dataclasses.is_dataclass(value):
        return "give dataclasses.asdict(value)"
    if hasattr(value, "tolist"):
        return _array_fix(value)
    if hasattr(value, "to_dict"):
        return "give value.to_dict()"
    if isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real):
        return "give [value.real, value.imag]"
    if isinstance(value, numbers.Number):
        return "give its text, str(value), or float(value)"
    if callable(value):
        return "keep it on the environment, or give its name"
    if isinstance(value, Iterable):
        return "give list(value)"
    return "give what it holds as text, numbers, lists and dicts"


def _array_fix(value: Any) -> str:
    """The fix for an array, a tensor, or a scalar of numpy."""
    if getattr(getattr(value, "dtype", None), "kind", "") in ("M", "m"):  # these are numpy's dates and durations
        return "give its text, value.astype(str).tolist()"
    return "give value.item()" if getattr(value, "shape", None) == () else "give value.tolist()"


class TaskCheck:
    """Check that tasks come back from a run file unchanged.

    A field that an author added may have any value that the field's type restores from JSON. `RunFile(task_class=)`
    restores the value in the same way.
    """

    def __init__(self) -> None:
        self._builders: dict[type[Task], TaskBuilder] = {}

    def problem(self, task: Task) -> str | None:
        """The message for the first value of the task that would come back changed; None if no value would."""
        values = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
        if _are_plain([*values.values()]):
            return None
        for name, value in values.items():
            found = first_unstorable(value, name)
            if found is not None and (name in _OWN_FIELDS or not self._comes_back(task, name, value)):
                return found
        return None

    def _comes_back(self, task: Task, name: str, value: Any) -> bool:
        try:
            builder = self._builders.get(type(task)) or TaskBuilder(type(task))
            self._builders[type(task)] = builder
            again = builder.typed(name, decode_json(encode_json(value)))
            return type(again) is type(value) and bool(again == value)
        except Exception:  # classes of an author may raise any exception
            return False


# --- values of an author in an episode


def make_storable(trajectory: Trajectory) -> str | None:
    """Convert turn rewards to floats, and check that a run file can keep the messages. A wrong reward becomes 0.

    Returns:
        The message for the first value that is wrong or cannot be kept: its place, its type or value, and the fix. None
        if all values are right and can be kept.
    """
    problems = [_credit_problem(turn) for turn in trajectory.turns if type(turn.reward) is not float or turn.reward]
    for segment in trajectory.segments:
        for number, message in enumerate(() if _are_plain(segment.messages) else segment.messages):
            rest = {name: value for name, value in message.items() if name != "content"}
            problems.append(first_unstorable(rest, f"messages[{number}]"))
    found = next((problem for problem in problems if problem is not None), None)
    return None if found is None else f"agent {trajectory.agent!r}: {found}"


def _credit_problem(turn: Turn) -> str | None:
    """Return the message for a wrong reward of a turn, and convert the reward to a float."""
    try:
        credit = as_score(turn.reward, f"turns[{turn.number}].reward")
        wrong = "is None" if credit is None else None
    except (TypeError, ValueError, OverflowError):
        credit, wrong = None, f"is {turn.reward!r:.60}"
    turn.reward = 0.0 if credit is None else credit
    return None if wrong is None else f"the reward of turn {turn.number} {wrong}: give a finite number"
