"""Round trip of calls before a run: calls of each tool are written and read again, to find the losses of a format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from runner.parsing.argument_reader import as_typed
from runner.parsing.call_reader import CallReader
from runner.parsing.call_writer import Unwritable, WrittenCall, id_for, write_calls
from runner.parsing.harmony import read_harmony
from runner.parsing.learning.format_check import equal_with_types
from runner.parsing.notations import ValueType, type_of
from runner.parsing.turn_format import TurnFormat
from runner.tools.schema_shapes import SchemaShapes, shapes_for, types_of
from runner.tools.tool import Tool, is_tool_name
from runner.tools.value_shapes import ValueShape

__all__ = ["Ambiguity", "Loss", "ambiguities", "losses", "supports_name"]

# --- calls that change in a round trip


class Loss(NamedTuple):
    """A part of a tool's calls that is not read as it was written."""

    tool: str
    argument: str
    """Name of the affected argument; "" for the call as a whole."""
    what: str
    """The loss and its fix, in words."""
    uncallable: bool
    """True if no call of the tool can be read."""

    def __str__(self) -> str:
        return f"{self.tool}({self.argument})"


def losses(form: TurnFormat, tools: Sequence[Tool]) -> Iterator[Loss]:
    """Yield the parts of the tools' calls that do not survive a round trip through the format.

    For each tool, calls with a single argument are tried: each argument, with each type that its schema allows. If no
    loss is found, a call with all arguments is tried, and then a call without arguments if none is required.
    """
    trial = _RoundtripTrial(form, tools)
    for tool in tools:
        found = list(_lost_arguments(trial, tool))
        yield from found or _lost_calls(trial, tool)


def supports_name(form: TurnFormat | None, tool: Tool) -> bool:
    """Return whether a call is read back with the name of the tool.

    If the form of calls is unknown, any printable name of at most `MAX_NAME_LENGTH` characters passes.
    """
    if is_tool_name(tool.name):
        return True
    if len(tool.name) > MAX_NAME_LENGTH or not tool.name.isprintable():
        return False
    if form is None or form.calls is None:
        return True
    # The probe has an argument, since some formats cannot write a call without one.
    return _RoundtripTrial(form, [tool]).fault(tool.name, {"argument": "text"}) is None


MAX_NAME_LENGTH: Final = 256
"""Maximum number of characters in the name of a tool."""


class _RoundtripTrial:
    """Round trip of single calls through one format: each call is written and read again."""

    def __init__(self, form: TurnFormat, tools: Sequence[Tool]) -> None:
        assert form.calls is not None, "the caller checks that calls can be read"
        self._form = form.calls
        self._reader = None if form.harmony else CallReader(form.calls)
        self._schemas = {tool.name: tool.parameters for tool in tools}

    def fault(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """Return a clause with the reason why a call is not read as it was written; None if it is read correctly."""
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
        return None if equal_with_types(back, arguments) else f"{arguments!r:.60} is read as {back!r:.60}"


def _lost_arguments(trial: _RoundtripTrial, tool: Tool) -> Iterator[Loss]:
    shapes = shapes_for(tool.parameters)
    needed = [set(shape.required) for shape in shapes.arguments()]
    required = set.intersection(*needed) if needed else set()
    for name in tool.parameters["properties"]:
        examples = _examples(shapes, name)
        lost = {kind: why for kind, value in examples.items() if (why := trial.fault(tool.name, {name: value}))}
        if len(lost) == len(examples):
            what = f"its argument {name!r} cannot be read back ({next(iter(lost.values()))}). {_fix(name)}"
            yield Loss(tool.name, name, what, name in required)
            continue
        if name not in required:
            lost.pop("null", None)  # the call may omit the argument instead
        if lost:
            types, why = " or ".join(lost), next(iter(lost.values()))
            what = f"its argument {name!r} cannot be of type {types} ({why}). {_fix(name)}"
            yield Loss(tool.name, name, what, False)


def _fix(argument: str) -> str:
    return f"{'Give it another type' if argument else 'Rename the argument'}, or {_ANOTHER}."


def _lost_calls(trial: _RoundtripTrial, tool: Tool) -> Iterator[Loss]:
    shapes = shapes_for(tool.parameters)
    every = {name: next(iter(_examples(shapes, name).values())) for name in tool.parameters["properties"]}
    why = trial.fault(tool.name, every) if every else None
    if why is not None:
        what = f"a call with all of its arguments cannot be read back ({why}). Rename the arguments, or {_ANOTHER}."
        yield Loss(tool.name, "", what, True)
    elif not tool.parameters.get("required") and (why := trial.fault(tool.name, {})):
        what = (
            f"a call without arguments cannot be read back ({why}). Give the tool a required argument, or {_ANOTHER}."
        )
        yield Loss(tool.name, "", what, not every)


_ANOTHER: Final = "give the run another template (--template hermes)"


_EXAMPLES: Final[Mapping[ValueType, Any]] = {
    "string": "text",
    "integer": 7,
    "number": 2.5,
    "boolean": True,
    "null": None,
    "array": ["text"],
    "object": {"key": "text"},
}


def _examples(shapes: SchemaShapes, name: str) -> Mapping[ValueType, Any]:
    """Return a value of each type that an argument allows; a string if the schema names no type."""
    types = shapes.types_of_argument(name)
    return {kind: value for kind, value in _EXAMPLES.items() if kind in types} or {"string": _EXAMPLES["string"]}


# --- values that look the same


class Ambiguity(NamedTuple):
    """An argument whose text may be read as a string or as another type, if strings are written without quotes."""

    tool: str
    argument: str
    """Name of the argument; "..." for all arguments that the schema does not name."""
    types: tuple[ValueType, ...]
    """Types as which a string may be misread; all types except null if the schema does not name any."""

    def __str__(self) -> str:
        listed = "any" if set(_TYPES_OF_LITERALS) <= set(self.types) else " | ".join(("string", *self.types))
        return f"{self.tool}({self.argument}: {listed})"


def ambiguities(tools: Sequence[Tool]) -> Iterator[Ambiguity]:
    """Yield the arguments whose type is ambiguous in a format that writes strings without quotes.

    Arguments that allow any string or null, and nothing else, are omitted, since only the texts "null" and "None" are
    ambiguous there.
    """
    for tool in tools:
        shapes = shapes_for(tool.parameters)
        for name in dict.fromkeys(name for shape in shapes.arguments() for name in shape.named):
            types = _read_from_strings(shapes.argument(name))
            if types:
                yield Ambiguity(tool.name, name, types)
        others = [s for one in shapes.arguments() if _has_additional(one) for s in shapes.of(one.others)]
        types = _read_from_strings(others)
        if types:
            yield Ambiguity(tool.name, "...", types)


def _has_additional(shape: ValueShape) -> bool:
    return any(part.has_additional for part in shape.objects)


_TYPES_OF_LITERALS: Final = ("integer", "number", "boolean", "array", "object")
_LITERALS: Final = ("5", "2.5", "true", "[1]", '{"a": 1}')


def _read_from_strings(shapes: Sequence[ValueShape]) -> tuple[ValueType, ...]:
    """Return the types, other than string, as which strings of these shapes may be read; () if there are none."""
    strings = [shape for shape in shapes if shape.kind == "string"]
    listed = [text for shape in strings for text in shape.values or ()]
    texts = _LITERALS if any(shape.values is None for shape in strings) else listed
    types = types_of(shapes)
    values = [as_typed(text, types) for text in texts]
    return tuple(dict.fromkeys(type_of(value) for value in values if not isinstance(value, str)))
