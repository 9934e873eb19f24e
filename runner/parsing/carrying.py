"""What a format cannot carry of some tools' calls: found before a run, by writing and reading calls of each tool."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from runner.parsing.harmony import read_harmony
from runner.parsing.learning.checking import alike
from runner.parsing.notations import ValueType, type_of
from runner.parsing.reading import CallReader
from runner.parsing.schema_rules import by_type
from runner.parsing.turn_format import TurnFormat
from runner.parsing.values import as_typed, schema_types
from runner.parsing.writing import Unwritable, WrittenCall, id_for, write_calls
from runner.tools.tool import Tool

__all__ = ["CARRIED_NAME", "Ambiguity", "Loss", "ambiguities", "losses"]

CARRIED_NAME: Final = re.compile(r"[\w.$-]+")
"""Names of arguments that every format carries; in some of them other signs end a name."""


# --- what does not come back


class Loss(NamedTuple):
    """Something of a tool's calls that is not read as it was written."""

    tool: str
    """The tool's name."""
    argument: str
    """The argument that it is about, or ""."""
    what: str
    """What is lost and what to do about it, in words."""
    uncallable: bool
    """Whether the tool cannot be called at all."""

    def __str__(self) -> str:
        return f"{self.tool}({self.argument})"


def losses(form: TurnFormat, tools: Sequence[Tool]) -> Iterator[Loss]:
    """What of the tools' calls does not come back from the text that the format makes of them.

    Tried are, of each tool, every argument alone in every type that it may have, all of them together, and none.
    """
    trial = _CarryingTrial(form, tools)
    for tool in tools:
        found = list(_lost_arguments(trial, tool))
        yield from found or _lost_calls(trial, tool)


class _CarryingTrial:
    """Writes calls, and reads what it wrote."""

    def __init__(self, form: TurnFormat, tools: Sequence[Tool]) -> None:
        assert form.calls is not None, "who asks has looked whether calls can be read"
        self._form = form.calls
        self._reader = None if form.harmony else CallReader(form.calls)
        self._schemas = {tool.name: tool.parameters for tool in tools}

    def fault(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """Why a call does not come back, as a clause; None where it does."""
        call = WrittenCall(name, arguments, id_for(self._form, name, 0))
        try:
            text = write_calls(self._form, [call])
        except Unwritable as error:
            return str(error)
        calls = read_harmony(text).calls if self._reader is None else self._reader.read(text, self._schemas).calls
        if len(calls) != 1:
            return f"it is read as {len(calls)} calls"
        if calls[0].error is not None:
            return calls[0].error
        if calls[0].name != name:
            return f"it is read as a call of {calls[0].name!r}"
        back = calls[0].arguments
        return None if alike(back, arguments) else f"{arguments!r:.60} is read as {back!r:.60}"


def _lost_arguments(trial: _CarryingTrial, tool: Tool) -> Iterator[Loss]:
    required = tool.parameters.get("required", ())
    for name, schema in tool.parameters["properties"].items():
        examples = _examples(schema, tool.parameters)
        lost = {kind: why for kind, value in examples.items() if (why := trial.fault(tool.name, {name: value}))}
        if len(lost) == len(examples):
            what = f"its argument {name!r} cannot be read back ({next(iter(lost.values()))}). {_fix(name)}"
            yield Loss(tool.name, name, what, name in required)
            continue
        if name not in required:
            lost.pop("null", None)  # leaving it out says the same
        if lost:
            types, why = " or ".join(lost), next(iter(lost.values()))
            what = f"its argument {name!r} cannot be of type {types} ({why}). {_fix(name)}"
            yield Loss(tool.name, name, what, False)


def _fix(argument: str) -> str:
    if CARRIED_NAME.fullmatch(argument):
        return f"Give it another type, or {_ANOTHER}."
    return "Rename it: letters, digits and _ are read in every format."


def _lost_calls(trial: _CarryingTrial, tool: Tool) -> Iterator[Loss]:
    every = {
        name: next(iter(_examples(schema, tool.parameters).values()))
        for name, schema in tool.parameters["properties"].items()
    }
    why = trial.fault(tool.name, every) if every else None
    if why is not None:
        what = f"a call with all of its arguments cannot be read back ({why}). Give it another name, or {_ANOTHER}."
        yield Loss(tool.name, "", what, True)
    elif not tool.parameters.get("required") and (why := trial.fault(tool.name, {})):
        what = f"a call without arguments cannot be read back ({why}). Give it one that is required, or {_ANOTHER}."
        yield Loss(tool.name, "", what, not every)


_ANOTHER: Final = "the run another template (--template hermes)"


_EXAMPLES: Final[Mapping[ValueType, Any]] = {
    "string": "text",
    "integer": 7,
    "number": 2.5,
    "boolean": True,
    "null": None,
    "array": ["text"],
    "object": {"key": "text"},
}


def _examples(schema: Any, root: Mapping[str, Any]) -> Mapping[ValueType, Any]:
    """A value of each type that a schema names; a text where it names none."""
    types = schema_types(schema, root)
    return {kind: value for kind, value in _EXAMPLES.items() if kind in types} or {"string": _EXAMPLES["string"]}


# --- what looks alike


class Ambiguity(NamedTuple):
    """An argument that takes some text both as a string and as something else, where strings stand without quotes."""

    tool: str
    """The tool's name."""
    argument: str
    """The argument's name; "..." stands for all that the schema does not name."""
    types: tuple[ValueType, ...]
    """The types that such a text is read as, though it may be meant as a string; all of them where it names none."""

    def __str__(self) -> str:
        listed = "any" if set(_TYPES_OF_LITERALS) <= set(self.types) else " | ".join(("string", *self.types))
        return f"{self.tool}({self.argument}: {listed})"


def ambiguities(tools: Sequence[Tool]) -> Iterator[Ambiguity]:
    """The arguments of which a format that writes strings without quotes cannot tell what is meant.

    A string that may also be null is none of them: what is lost there is nothing but the words "null" and "None".
    """
    for tool in tools:
        arguments = dict(tool.parameters["properties"])
        if tool.parameters.get("additionalProperties"):
            arguments["..."] = tool.parameters["additionalProperties"]
        for name, schema in arguments.items():
            types = _read_from_strings(schema, tool.parameters)
            if types:
                yield Ambiguity(tool.name, name, types)


_TYPES_OF_LITERALS: Final = ("integer", "number", "boolean", "array", "object")
_LITERALS: Final = ("5", "2.5", "true", "[1]", '{"a": 1}')


def _read_from_strings(schema: Any, root: Mapping[str, Any]) -> tuple[ValueType, ...]:
    """The types of other values that strings are read as which the schema allows."""
    types = schema_types(schema, root)
    if types and "string" not in types:
        return ()
    texts = _allowed_strings(schema, root)
    values = [as_typed(text, schema, root) for text in (_LITERALS if texts is None else texts)]
    return tuple(dict.fromkeys(type_of(value) for value in values if not isinstance(value, str)))


def _allowed_strings(schema: Any, root: Mapping[str, Any]) -> list[str] | None:
    """The strings that a schema lists, or None where it allows more than those."""
    texts: list[str] = []
    try:
        for kind, each in by_type(schema, root):
            if kind == "string":
                if "enum" not in each:
                    return None
                texts += each["enum"]
    except (
        LookupError,
        TypeError,
        ValueError,
    ):  # a reference to nothing, of which the check of the arguments will complain
        return None
    return texts
