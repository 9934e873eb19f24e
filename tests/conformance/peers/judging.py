"""Judgement of a reading: compared with the text's meaning, and with the template's text for the reading."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from runner.parsing.call_writer import Unwritable, WrittenCall, write_calls
from runner.parsing.learning.format_check import equal_with_types
from runner.parsing.learning.probe_renders import ProbeCall
from runner.parsing.notations import type_of
from runner.parsing.turn_format import CallFormat
from runner.tools.schema_shapes import shapes_for
from tests.conformance.peers.cases import Trial

__all__ = ["SLIGHT", "Call", "CallsReader", "Fault", "Read", "judge"]


@dataclass(frozen=True, slots=True)
class Call:
    """A call that was read."""

    name: str
    arguments: Any
    """The object that was read, or the text if it is not an object."""
    id: str | None
    error: bool = False
    """True if the reader returns it as a call that it cannot read."""


@dataclass(frozen=True, slots=True)
class Read:
    """The result of a reader for one text."""

    content: str
    calls: list[Call]


CallsReader: TypeAlias = Callable[[Trial], Read]
"""Function that reads a trial. It may raise any error."""


class Fault(enum.StrEnum):
    """The fault of a reading."""

    RAISES = "raises an error"
    LOST = "reads no call"
    ERROR = "reads a call with an error"
    FEWER = "drops a call"
    MORE = "invents a call"
    NAME = "reads another name"
    KEYS = "drops or invents an argument"
    NULL = "reads null as a string"
    TYPE = "reads a value of another type"
    CUT = "cuts a string"
    VALUE = "reads another value"
    CONTENT_LOST = "drops content"
    CONTENT_MORE = "leaves marks in the content"
    ID = "drops the id"
    AS_WRITTEN = "reads another call for which the template writes the same text"


SLIGHT: Final = frozenset({Fault.CONTENT_LOST, Fault.CONTENT_MORE, Fault.ID, Fault.AS_WRITTEN})
"""Faults in which every call is read correctly, or the template writes the same text for the call that was read."""


def judge(form: CallFormat, trial: Trial, reader: CallsReader) -> Fault | None:
    """Return the fault of a reading of a trial; None if it is correct, or cannot be distinguished from a correct one.

    Two readings cannot be distinguished if the template writes the same text for both, and the schemas allow both.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # Python's warnings about texts that a parser evaluates as code
            read = reader(trial)
    except Exception:  # an error of the parser becomes the error of the request
        return Fault.RAISES
    fault = _fault(trial, read)
    if fault is None or not _written_so(form, trial, read):
        return fault
    return None if trial.kind.is_written else Fault.AS_WRITTEN


def _fault(trial: Trial, read: Read) -> Fault | None:
    if any(call.error for call in read.calls):
        return Fault.ERROR
    if len(read.calls) != len(trial.calls):
        return Fault.LOST if not read.calls else Fault.FEWER if len(read.calls) < len(trial.calls) else Fault.MORE
    for call, said in zip(read.calls, trial.calls, strict=True):
        fault = _misread(call.name, call.arguments, said)
        if fault is not None:
            return fault
    if trial.ids and tuple(call.id for call in read.calls) != trial.ids:
        return Fault.ID
    # Readers differ in the white space between the parts of a content.
    said_words, read_words = trial.content.split(), read.content.split()
    if said_words == read_words:
        return None
    return Fault.CONTENT_LOST if len(read_words) < len(said_words) else Fault.CONTENT_MORE


def _misread(name: str, arguments: Any, said: ProbeCall) -> Fault | None:
    if name != said.name:
        return Fault.NAME
    if not isinstance(arguments, dict):
        return Fault.TYPE
    if arguments.keys() != said.arguments.keys():
        return Fault.KEYS
    for key, meant in said.arguments.items():
        read = arguments[key]
        if equal_with_types(read, meant):
            continue
        if type(read) is not type(meant):
            return Fault.NULL if meant is None else Fault.TYPE
        return Fault.CUT if isinstance(meant, str) and read in meant else Fault.VALUE
    return None


def _written_so(form: CallFormat, trial: Trial, read: Read) -> bool:
    """True if the template writes this text for the reading, and the schemas allow the reading."""
    if trial.ids or trial.content or read.content.strip() or not read.calls:
        return False
    if not all(_allowed(call.arguments, trial.schemas.get(call.name)) for call in read.calls):
        return False
    try:
        text = write_calls(form, [WrittenCall(call.name, call.arguments, call.id or "") for call in read.calls])
    except Unwritable:
        return False
    return text.strip() == trial.text.strip()


def _allowed(arguments: Any, schema: Mapping[str, Any] | None) -> bool:
    """True if these are arguments whose types the schema allows."""
    if schema is None or not isinstance(arguments, dict):
        return False
    allowed = ((shapes_for(schema).types_of_argument(key), value) for key, value in arguments.items())
    return all(not types or type_of(value) in types for types, value in allowed)
