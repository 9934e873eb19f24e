"""What a format cannot carry of some tools' calls: found before a run, by writing and reading calls of each tool."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from runner.parsing.argument_reader import as_typed
from runner.parsing.call_reader import CallReader
from runner.parsing.call_writer import Unwritable, WrittenCall, id_for, write_calls
from runner.parsing.harmony import read_harmony
from runner.parsing.learning.format_check import alike
from runner.parsing.notations import ValueType, type_of
from runner.parsing.turn_format import TurnFormat
from runner.tools.schema_shapes import SchemaShapes, shapes_for, types_of
from runner.tools.tool import Tool, is_tool_name
from runner.tools.value_shapes import ValueShape

__all__ = ["SUPPORTED_NAME", "Ambiguity", "Loss", "ambiguities", "losses", "supports_name"]

SUPPORTED_NAME: Final = re.compile(r"[\w.$-]+")
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
    trial = _RoundtripTrial(form, tools)
    for tool in tools:
        found = list(_lost_arguments(trial, tool))
        yield from found or _lost_calls(trial, tool)


def supports_name(form: TurnFormat | None, tool: Tool) -> bool:
    """Whether a call of a tool is read back with its name, which may be any text; without a format nothing is tried."""
    if is_tool_name(tool.name):
        return True
    if len(tool.name) > LONGEST_NAME or not tool.name.isprintable():
        return False
    if form is None or form.calls is None:
        return True
    # With an argument, since some formats cannot write a call that has none.
    return _RoundtripTrial(form, [tool]).fault(tool.name, {"argument": "text"}) is None


LONGEST_NAME: Final = 256
"""The most characters that the name of a tool may have."""


class _RoundtripTrial:
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
            lost.pop("null", None)  # leaving it out says the same
        if lost:
            types, why = " or ".join(lost), next(iter(lost.values()))
            what = f"its argument {name!r} cannot be of type {types} ({why}). {_fix(name)}"
            yield Loss(tool.name, name, what, False)


def _fix(argument: str) -> str:
    if SUPPORTED_NAME.fullmatch(argument):
        return f"Give it another type, or {_ANOTHER}."
    return "Rename it: letters, digits and _ are read in every format."


def _lost_calls(trial: _RoundtripTrial, tool: Tool) -> Iterator[Loss]:
    shapes = shapes_for(tool.parameters)
    every = {name: next(iter(_examples(shapes, name).values())) for name in tool.parameters["properties"]}
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


def _examples(shapes: SchemaShapes, name: str) -> Mapping[ValueType, Any]:
    """A value of each type that an argument names; a text where it names none."""
    types = shapes.types_of_argument(name)
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
        shapes = shapes_for(tool.parameters)
        for name in dict.fromkeys(name for shape in shapes.arguments() for name in shape.named):
            types = _read_from_strings(shapes.argument(name))
            if types:
                yield Ambiguity(tool.name, name, types)
        others = [s for one in shapes.arguments() if _says_others(one) for s in shapes.of(one.others)]
        types = _read_from_strings(others)
        if types:
            yield Ambiguity(tool.name, "...", types)


def _says_others(shape: ValueShape) -> bool:
    return any(part.says_additional for part in shape.objects)


_TYPES_OF_LITERALS: Final = ("integer", "number", "boolean", "array", "object")
_LITERALS: Final = ("5", "2.5", "true", "[1]", '{"a": 1}')


def _read_from_strings(shapes: Sequence[ValueShape]) -> tuple[ValueType, ...]:
    """The types of other values that strings of these shapes are read as."""
    strings = [shape for shape in shapes if shape.kind == "string"]
    listed = [text for shape in strings for text in shape.values or ()]
    texts = _LITERALS if any(shape.values is None for shape in strings) else listed
    types = types_of(shapes)
    values = [as_typed(text, types) for text in texts]
    return tuple(dict.fromkeys(type_of(value) for value in values if not isinstance(value, str)))
