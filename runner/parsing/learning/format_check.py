"""Check of a learnt format against its template, with other words and values than in learning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, get_args

from runner.messages import canonical_json
from runner.parsing.argument_rules import NoGrammar, ends_of_strings
from runner.parsing.call_reader import CallReader, CallsReading, Schemas
from runner.parsing.call_writer import Unwritable, WrittenCall, write_calls
from runner.parsing.events import TurnReading
from runner.parsing.learning.probe_renders import FormatProber, FormatRequirement, ProbeCall, UnlearnableFormat
from runner.parsing.limitations import CallLimitation
from runner.parsing.notations import Cdata, Html, Raw, ValueType, type_of
from runner.parsing.turn_format import CallFormat, TaggedArguments

__all__ = [
    "CaseDifference",
    "FormatCase",
    "ReadText",
    "check_calls",
    "check_cases",
    "common_cases",
    "differences",
    "equal_with_types",
    "misread",
    "schemas_of",
    "text_of",
]


@dataclass(frozen=True, slots=True)
class FormatCase:
    """A turn of an assistant for the check."""

    what: str
    """Name of the case in reports."""
    calls: tuple[ProbeCall, ...]
    content: str = ""


@dataclass(frozen=True, slots=True)
class CaseDifference:
    """A case in which the template and its format differ."""

    case: FormatCase
    why: str
    """Clause with the difference."""

    @property
    def sentence(self) -> str:
        """Clause with the name of the case and the difference, for an error."""
        return f"the format fails for a test turn ({self.case.what}): {self.why}"


ReadText: TypeAlias = Callable[[str, Schemas], CallsReading | TurnReading]
"""Reader of a turn's text that replaces the reader of the format."""


def check_calls(prober: FormatProber, form: CallFormat, read: ReadText | None = None) -> frozenset[CallLimitation]:
    """Return the limitations of the format.

    Raises:
        UnlearnableFormat: format and template differ, and no limitation explains it.
    """
    wrong = differences(prober, form, read)
    limitations = frozenset(_limitations(prober, form, wrong))
    left = [each for each in wrong if not _explained(each, limitations)]
    if left:
        raise UnlearnableFormat(FormatRequirement.INVERTED, left[0].sentence)
    return limitations


def differences(prober: FormatProber, form: CallFormat, read: ReadText | None = None) -> list[CaseDifference]:
    """Return the cases that the template refuses or writes in another form than the format, and the misread cases."""
    read = read or CallReader(form).read
    found: list[CaseDifference] = []
    for case in check_cases(form):
        try:
            text = text_of(prober, form, case)
        except Unwritable as error:
            found.append(CaseDifference(case, str(error)))
            continue
        wrong = misread(read(text, schemas_of(case.calls)), case)
        if wrong:
            found.append(CaseDifference(case, wrong))
    return found


def text_of(prober: FormatProber, form: CallFormat, case: FormatCase) -> str:
    """Return a case as the template writes it, without the texts around every turn.

    Raises:
        Unwritable: the template refuses the case, or writes it in another form than the format.
    """
    rendered = prober.turn(*case.calls, content=case.content)
    if rendered is None:
        raise Unwritable(REFUSED)
    calls = [WrittenCall(said.name, said.arguments, prober.id_of(said, n)) for n, said in enumerate(case.calls)]
    written = write_calls(form, calls)
    if written not in rendered:
        raise Unwritable("it is not written like other calls")
    before = f"{case.content}{form.after_content}" if case.content and form.after_content is not None else ""
    after = f"{form.before_content}{case.content}" if case.content and form.before_content is not None else ""
    return before + written + after


def misread(reading: CallsReading | TurnReading, case: FormatCase) -> str:
    """Return the difference between a reading and its case, or ""."""
    if len(reading.calls) != len(case.calls):
        return f"{len(reading.calls)} calls are read in place of {len(case.calls)}"
    for call, said in zip(reading.calls, case.calls, strict=True):
        if call.error is not None:
            return call.error
        if call.name != said.name:
            return f"the name is read as {call.name!r}"
        if not equal_with_types(call.arguments, said.arguments):
            return f"the arguments {_shown(said.arguments)} are read as {_shown(call.arguments)}"
    if reading.content != case.content.strip():
        return f"the content is read as {reading.content!r}"
    return ""


def _shown(arguments: Mapping[str, Any]) -> str:
    text = canonical_json(arguments)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}... ({len(text)} characters)"


MAX_SHOWN_CHARACTERS: Final = 200


def equal_with_types(one: Any, other: Any) -> bool:
    """Return whether two values and all their types are equal: True is not 1, 1 is not 1.0. Key order is ignored."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal_with_types(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal_with_types, one, other))
    return type(one) is type(other) and one == other


def schemas_of(calls: Sequence[ProbeCall], *, typed: bool = False) -> dict[str, Any]:
    """Return schemas of tools for the calls. With `typed`, all values have a declared type; otherwise, only strings."""
    schemas: dict[str, Any] = {}
    for said in calls:
        properties = schemas.setdefault(said.name, {"type": "object", "properties": {}})["properties"]
        for key, value in said.arguments.items():
            properties[key] = {"type": type_of(value)} if typed or isinstance(value, str) else {}
    return schemas


STRINGS: Final[Mapping[str, str]] = {
    "words": "two words", "empty": "", "border spaces": "  two  ", "line breaks": "one\ntwo\n\nthree\n",
    "break first": "\none", "tab": "a\tb", "double quotes": 'say "yes"', "single quotes": "it's 'so'",
    "backslashes": "C:\\new\\table \\", "unicode": "naïve 日本語 🙂 \u200b", "markup": "<b>bold</b> & <br/>",
    "code": "def f(x):\n    return {'a': [x, \"b\"]}\n", "json": '{"name": "x", "arguments": {"a": [1, 2]}}',
    "digits": "42", "true": "true", "None": "None", "comma": "a, b=3, c", "brackets": "f(x)[0] {y}", "null": "null",
    "percent": "50% {{ x }} {% if %}", "slashes": "https://example.org/a?b=c#d",
}  # fmt: skip
OTHERS: Final[Mapping[str, Any]] = {
    "zero": 0, "negative": -17, "large": 2**70, "float": 2.5, "small": -0.125, "true": True, "false": False,
    "null": None, "no items": [], "no members": {}, "list": [1, "two", None, True, 2.5],
    "object": {"flag": False, "inner": {"deep": ["x", {"y": "z w"}]}, "n": 3}, "strings": ["it's", 'say "x"', "a, b"],
}  # fmt: skip


def check_cases(form: CallFormat) -> Iterator[FormatCase]:
    """Yield the cases of the check, except those with several calls or content if the format cannot write them."""
    for case in _cases(form):
        several_written = len(case.calls) == 1 or form.between is not None
        content_written = form.after_content is not None or form.before_content is not None
        if several_written and (content_written or not case.content):
            yield case


def common_cases() -> Iterator[FormatCase]:
    for what, value in STRINGS.items():
        yield FormatCase(f"a string: {what}", (ProbeCall("look_up", {"limit": 3, "query": value}),))
    for what, value in OTHERS.items():
        yield FormatCase(f"a value: {what}", (ProbeCall("set_value", {"note": "done", "value": value}),))
    yield FormatCase("no arguments", (ProbeCall("refresh", {}),))
    yield FormatCase(
        "many arguments", (ProbeCall("many", {f"arg_{n}": n if n % 2 else f"text {n}" for n in range(10)}),)
    )
    yield FormatCase(
        "keys in no order", (ProbeCall("look_up", {"zone": 1, "Area": {"z": 1, "b": 2}, "query": "first"}),)
    )
    for name in ("ns.tool", "get-weather", "tool_2", "Tool$x"):
        yield FormatCase(f"the name {name}", (ProbeCall(name, {"$g": None, "a_b": 1, "c-d": "x", "e.f": True}),))
    two = (ProbeCall("look_up", {"query": "first one"}), ProbeCall("refresh", {"hard": True}))
    yield FormatCase("two calls", two)
    yield FormatCase("three calls", (*two, ProbeCall("look_up", {"query": "third"})))
    yield FormatCase("the same call twice", (two[0], two[0]))
    yield FormatCase("two calls, one without arguments", (ProbeCall("refresh", {}), two[0]))
    yield FormatCase("content beside a call", (two[0],), "I look it up.")
    yield FormatCase("content of two lines", (two[0],), "First.\n\nThen I look it up.")
    yield FormatCase("JSON in the content", (two[0],), 'It is {"a": [1, 2]} and so on.')
    yield FormatCase("content beside two calls", two, "Both at once.")


def _cases(form: CallFormat) -> Iterator[FormatCase]:
    yield from common_cases()
    for mark in dict.fromkeys(each for each in (form.trigger, form.close.strip(), form.begin.strip()) if each):
        yield FormatCase(f"{mark!r} in a string", (ProbeCall("look_up", {"query": f"a {mark} b"}),))
    if isinstance(form.arguments, TaggedArguments):
        for mark in dict.fromkeys(
            each.strip() for each in (form.arguments.tail, form.arguments.separator) if each.strip()
        ):
            yield FormatCase(f"{mark!r} in a string", (ProbeCall("look_up", {"query": f"a {mark} b", "zone": 3}),))
        yield _whole_closing(form, form.arguments)


REFUSED: Final = "the template refuses it"
WHOLE_CLOSING: Final = "the end of the calls in a string"


def _whole_closing(form: CallFormat, arguments: TaggedArguments) -> FormatCase:
    string = arguments.styles.get("string")
    ending = f"{string.close if string else ''}{arguments.tail}{form.close}"
    return FormatCase(WHOLE_CLOSING, (ProbeCall("look_up", {"query": f"a{ending} b"}),))


def _limitations(prober: FormatProber, form: CallFormat, wrong: Sequence[CaseDifference]) -> Iterator[CallLimitation]:
    if form.between is None:
        yield CallLimitation.ONE_CALL
    if not form.trigger:
        yield CallLimitation.BARE
    if form.id_pieces is not None:
        yield CallLimitation.NAME_IN_ID
    if form.after_content is None:
        if form.before_content is not None:
            yield CallLimitation.CONTENT_BEHIND
        else:
            yield CallLimitation.CONTENT_INSIDE if _holds_content(prober, form) else CallLimitation.CONTENT_DROPPED
    if any(each.why == REFUSED for each in wrong):
        yield CallLimitation.SOME_VALUES_REFUSED
    if any(_without_arguments(each.case) for each in wrong):
        yield CallLimitation.NO_ARGUMENTS_UNWRITABLE
    if isinstance(form.arguments, TaggedArguments):
        yield from _tag_limitations(form, form.arguments, wrong)


def _tag_limitations(
    form: CallFormat, style: TaggedArguments, wrong: Sequence[CaseDifference]
) -> Iterator[CallLimitation]:
    if len(style.styles) < len(get_args(ValueType)):
        yield CallLimitation.SOME_TYPES_UNWRITABLE
    string = style.styles.get("string")
    if string is not None and isinstance(string.notation, Raw | Html | Cdata):
        if write_one(form, "5") == write_one(form, 5):
            yield CallLimitation.UNTYPED
        elif string.close:
            yield CallLimitation.QUOTED_UNESCAPED
        if any(each.case.what == WHOLE_CLOSING for each in wrong):
            yield CallLimitation.CLOSING_IN_STRING
        if _has_one_end(form):
            yield CallLimitation.END_IN_STRING


def _has_one_end(form: CallFormat) -> bool:
    """Return True if a grammar has exactly one text that ends an unquoted string.

    A reader also checks the text after this end text. A grammar cannot, so it allows no string with the end text.
    """
    try:
        return len(ends_of_strings(form)) == 1
    except NoGrammar:
        return False


def _holds_content(prober: FormatProber, form: CallFormat) -> bool:
    """Return whether the template writes content inside the text that begins the calls."""
    said, content = ProbeCall("look_up", {"query": "first"}), "I look it up now."
    before, found, after = (prober.turn(said, content=content) or "").partition(content)
    return bool(found) and any(
        before.rstrip().endswith(form.begin[:at].strip()) and after.lstrip().startswith(form.begin[at:].strip())
        for at in range(1, len(form.begin))
        if form.begin[:at].strip() and form.begin[at:].strip()
    )


def write_one(form: CallFormat, value: Any) -> str | None:
    try:
        return write_calls(form, [WrittenCall("look_up", {"query": value}, "")])
    except Unwritable:
        return None


def _explained(difference: CaseDifference, limitations: frozenset[CallLimitation]) -> bool:
    case = difference.case
    if case.what == WHOLE_CLOSING:
        return CallLimitation.CLOSING_IN_STRING in limitations
    if difference.why == REFUSED:
        return CallLimitation.SOME_VALUES_REFUSED in limitations
    return _without_arguments(case) and CallLimitation.NO_ARGUMENTS_UNWRITABLE in limitations


def _without_arguments(case: FormatCase) -> bool:
    return any(not said.arguments for said in case.calls)
