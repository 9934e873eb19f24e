"""Trials of every reader of a format: the battery as the template writes it, and answers without a call."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from runner.parsing.call_writer import Unwritable
from runner.parsing.learning.format_check import WHOLE_CLOSING, FormatCase, check_cases, text_of
from runner.parsing.learning.probe_renders import FormatProber, ProbeCall
from runner.parsing.notations import type_of
from runner.parsing.turn_format import CallFormat

__all__ = ["NOT_TRIED", "PLAIN", "Kind", "Trial", "schemas_of", "written"]


class Kind(enum.StrEnum):
    """The subject of a trial. The first members are text as templates write it, the others deviate from it."""

    STRINGS = "strings"
    MARKS = "a mark of the format in a string"
    CLOSING = "the complete end of the calls in a string"
    SCALARS = "numbers and booleans"
    NULL = "null"
    NESTED = "lists and objects"
    SCHEMAS = "schemas with several types, references or no type"
    NO_ARGUMENTS = "no arguments"
    ARGUMENTS = "many arguments"
    NAMES = "names of tools and arguments with punctuation"
    CALLS = "several calls"
    CONTENT = "content beside calls"
    IDS = "the id of a call"
    ANSWERS = "an answer without a call"

    SQUEEZED = "no white space between marks"
    SPREAD = "line breaks between tags"
    WORDS_BEFORE = "text before the call"
    WORDS_AFTER = "text after the call"
    WORDS_BETWEEN = "text between two calls"
    TWICE = "the opening mark twice"
    UNOPENED = "no opening mark"
    OPEN_CALL = "the last call not closed"
    OPEN_SECTION = "the section not closed"
    OPEN_ARGUMENT = "an argument not closed"
    SECTIONS = "a section for each call"
    TOGETHER = "two calls in one pair of marks"
    LISTED = "a list of calls in one pair of marks"
    UNLISTED = "one call without the list around it"
    COMPACT = "compact JSON"
    INDENTED = "indented JSON"
    ESCAPED = "JSON with `\\u` escapes"
    PYTHON = "Python's literals instead of JSON's"
    LITERALS = "`true` instead of `True`, or the reverse"
    COMMA = "a trailing comma in the JSON"
    LINE_BREAK = "a line break inside a JSON string"
    FENCED = "a Markdown fence around the JSON"
    DOUBLED = "doubled braces around the JSON"
    REORDERED = "the arguments before the name"
    MORE_MEMBERS = "additional keys beside the name and the arguments"
    OTHER_KEY = "`parameters` instead of `arguments`, or the reverse"
    AS_TEXT = "the arguments as JSON in a string"
    LEFT_OUT = "a call without arguments that leaves out their key"
    MENTIONED = "an answer with the opening mark"
    SPELT = "an answer with the opening mark, spelled in several tokens"

    @property
    def is_written(self) -> bool:
        """True for text as templates write it."""
        kinds = list(Kind)
        return kinds.index(self) <= kinds.index(Kind.ANSWERS)


@dataclass(frozen=True, slots=True)
class Trial:
    """A text to read, and its meaning."""

    kind: Kind
    what: str
    """The name of the case, unique in a format."""
    text: str
    calls: tuple[ProbeCall, ...]
    content: str
    schemas: Mapping[str, Any]
    """The tools' parameters in the form of a request."""
    ids: tuple[str, ...] = ()
    """The ids in the text, if the trial is about ids."""
    spelt: bool = False
    """True if the text has no control token: its marks were sampled letter by letter."""


NOT_TRIED: Final[Mapping[str, str]] = {
    "cohere_command3": "needs the package cohere_melody",
    "cohere_command4": "needs the package cohere_melody",
    "hf": "needs a response template in the files of the tokenizer",
    "openai": "needs the vocabulary of openai_harmony, which that package downloads",
    "openai_gptoss": "is a part of `openai`",
}
"""vLLM's parsers that are not tried, with the reasons."""

PLAIN: Final = (ProbeCall("look_up", {"query": "two words", "limit": 3}), ProbeCall("look_up", {"query": "two words"}))
"""Plain calls: a reader must read one of them correctly before it gets the other trials."""


def written(prober: FormatProber, form: CallFormat) -> Iterator[Trial]:
    """Return all trials of text that the template itself writes."""
    for case in check_cases(form):
        yield from _trial(prober, form, _kind(case), case, schemas_of(case.calls))
    for what, value, schema in _SCHEMAS:
        calls = (ProbeCall("set_value", {"note": "done", "value": value}),)
        schemas = schemas_of(calls)
        schemas["set_value"]["properties"]["value"] = schema
        schemas["set_value"]["$defs"] = _DEFINITIONS
        yield from _trial(prober, form, Kind.SCHEMAS, FormatCase(f"a schema: {what}", calls), schemas)
    said = PLAIN[0]
    for trial in _trial(prober, form, Kind.IDS, FormatCase("the id", (said,)), schemas_of([said])):
        if prober.id_of(said, 0) in trial.text:
            yield dataclasses.replace(trial, ids=(prober.id_of(said, 0),))
    for answer in _ANSWERS:
        yield Trial(Kind.ANSWERS, f"an answer: {answer}", answer, (), answer, schemas_of(PLAIN))


def schemas_of(calls: Sequence[ProbeCall]) -> dict[str, Any]:
    """Return tools' parameters under which these calls are valid: each argument has its type."""
    schemas: dict[str, Any] = {}
    for said in calls:
        schema = schemas.setdefault(said.name, {"type": "object", "properties": {}})
        schema["properties"] |= {key: {"type": type_of(value)} for key, value in said.arguments.items()}
    return schemas


def _trial(
    prober: FormatProber, form: CallFormat, kind: Kind, case: FormatCase, schemas: Mapping[str, Any]
) -> Iterator[Trial]:
    """Yield the case as the template writes it, or nothing if the template cannot write it."""
    try:
        text = text_of(prober, form, case)
    except Unwritable:
        return
    yield Trial(kind, case.what, text, case.calls, case.content, schemas)


def _kind(case: FormatCase) -> Kind:
    """Return the kind of a case of the battery."""
    said = case.calls[0]
    if case.what == WHOLE_CLOSING:
        return Kind.CLOSING
    if case.what.endswith("in a string"):
        return Kind.MARKS
    if case.content:
        return Kind.CONTENT
    if any(not each.arguments for each in case.calls):
        return Kind.NO_ARGUMENTS
    if len(case.calls) > 1:
        return Kind.CALLS
    if not all(sign.isalnum() or sign == "_" for key in said.arguments for sign in key):
        return Kind.NAMES
    if len(said.arguments) != 2:
        return Kind.ARGUMENTS
    value = said.arguments.get("value", said.arguments.get("query"))
    if value is None:
        return Kind.NULL
    return Kind.STRINGS if isinstance(value, str) else Kind.NESTED if isinstance(value, list | dict) else Kind.SCALARS


_DEFINITIONS: Final = {
    "Place": {"type": "object", "properties": {"x": {"type": "integer"}, "open": {"type": "boolean"}}}
}
_SCHEMAS: Final[Sequence[tuple[str, Any, Mapping[str, Any]]]] = (
    ("null, or a string", None, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
    ("a string, or null", "some words", {"anyOf": [{"type": "string"}, {"type": "null"}]}),
    ("an integer, or null", 7, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
    ("one of two types", 7, {"type": ["integer", "boolean"]}),
    ("one of three integers", 2, {"enum": [1, 2, 3]}),
    ("an object by reference", {"x": 7, "open": True}, {"$ref": "#/$defs/Place"}),
    ("an object whose members have types", {"x": 7, "open": True}, _DEFINITIONS["Place"]),
    ("a list of integers", [1, 2], {"type": "array", "items": {"type": "integer"}}),
    ("no type, an integer", 7, {}),
    ("no type, a boolean", True, {}),
    ("no type, words", "some words", {}),
    ("no type, a list", [1, "two"], {}),
)

_ANSWERS: Final = (
    "Just an answer.",
    "First.\n\nThen a second paragraph.",
    'It is {"a": [1, 2]} and so on.',
    '{"answer": 42}',
    '["one", "two"]',
    "f(x) = x + 1",
    '{"name": "Ada", "arguments": "none"}',
    "<b>so</b> & <i>so</i>",
)
"""Texts without a call, without a tool's name and without a mark of a format."""
