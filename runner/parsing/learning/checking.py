"""Checks a learnt format against its template, with words and values that it was not learnt from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, get_args

from runner.messages import canonical_json
from runner.parsing.argument_rules import Inexpressible, ends_of_strings
from runner.parsing.events import TurnReading
from runner.parsing.learning.asking import Asker, FormatProperty, SaidCall, Unlearnt
from runner.parsing.notations import Cdata, Html, Raw, ValueType, type_of
from runner.parsing.reading import CallReader, Reading, Schemas
from runner.parsing.traits import CallTrait
from runner.parsing.turn_format import CallFormat, TaggedArguments
from runner.parsing.writing import Unwritable, WrittenCall, write_calls

__all__ = [
    "Case",
    "CaseDifference",
    "ReadText",
    "alike",
    "battery",
    "check_calls",
    "common_cases",
    "differences",
    "misread",
    "schemas_of",
    "text_of",
]


@dataclass(frozen=True, slots=True)
class Case:
    """Something that an assistant may say."""

    what: str
    """The name of the case, as a report has it."""
    calls: tuple[SaidCall, ...]
    """The calls of the turn, in order."""
    content: str = ""
    """The text beside the calls."""


@dataclass(frozen=True, slots=True)
class CaseDifference:
    """A case in which the template and its format differ."""

    case: Case
    """The case that was tried."""
    why: str
    """The clause that says what differs."""

    @property
    def sentence(self) -> str:
        """The same for somebody who knows of no cases."""
        return f"a call that it writes is not read as it was meant ({self.case.what}): {self.why}"


ReadText: TypeAlias = Callable[[str, Schemas], Reading | TurnReading]
"""How a turn's text is read, beside the reader of its format."""


def check_calls(asker: Asker, form: CallFormat, read: ReadText | None = None) -> frozenset[CallTrait]:
    """What the format cannot do.

    Raises:
        Unlearnt: it reads or writes something else than the template does, and no trait says why.
    """
    wrong = differences(asker, form, read)
    traits = frozenset(_traits(asker, form, wrong))
    left = [each for each in wrong if not _explained(each, traits)]
    if left:
        raise Unlearnt(FormatProperty.INVERTED, left[0].sentence)
    return traits


def differences(asker: Asker, form: CallFormat, read: ReadText | None = None) -> list[CaseDifference]:
    """Every case of the battery in which what is written is not in the render, or what is read is not what was said."""
    read = read or CallReader(form).read
    found: list[CaseDifference] = []
    for case in battery(form):
        try:
            text = text_of(asker, form, case)
        except Unwritable as error:
            found.append(CaseDifference(case, str(error)))
            continue
        wrong = misread(read(text, schemas_of(case.calls)), case)
        if wrong:
            found.append(CaseDifference(case, wrong))
    return found


def text_of(asker: Asker, form: CallFormat, case: Case) -> str:
    """A case as the template writes it, without what begins and ends any turn.

    Raises:
        Unwritable: the template refuses it, or writes it in another way than the format.
    """
    rendered = asker.turn(*case.calls, content=case.content)
    if rendered is None:
        raise Unwritable(REFUSED)
    calls = [WrittenCall(said.name, said.arguments, asker.id_of(said, n)) for n, said in enumerate(case.calls)]
    written = write_calls(form, calls)
    if written not in rendered:
        raise Unwritable("it is not written as other calls are")
    before = f"{case.content}{form.after_content}" if case.content and form.after_content is not None else ""
    behind = f"{form.before_content}{case.content}" if case.content and form.before_content is not None else ""
    return before + written + behind


def misread(reading: Reading | TurnReading, case: Case) -> str:
    """What of the reading is not what was said, or ""."""
    if len(reading.calls) != len(case.calls):
        return f"{len(reading.calls)} calls are read in place of {len(case.calls)}"
    for call, said in zip(reading.calls, case.calls, strict=True):
        if call.error is not None:
            return call.error
        if call.name != said.name:
            return f"the name is read as {call.name!r}"
        if not alike(call.arguments, said.arguments):
            return f"the arguments {_shown(said.arguments)} are read as {_shown(call.arguments)}"
    if reading.content != case.content.strip():
        return f"the content is read as {reading.content!r}"
    return ""


def _shown(arguments: Mapping[str, Any]) -> str:
    text = canonical_json(arguments)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}... ({len(text)} characters)"


LONGEST_SHOWN: Final = 200


def alike(one: Any, other: Any) -> bool:
    """Equal, and of the same types all through: True is not 1, and 1 is not 1.0; a template may sort keys."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return type(one) is type(other) and one == other


def schemas_of(calls: Sequence[SaidCall], *, typed: bool = False) -> dict[str, Any]:
    """Schemas under which the calls are right; they tell the type of strings alone, or that of every value."""
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


def battery(form: CallFormat) -> Iterator[Case]:
    """What a turn of this format can say, in words that were not learnt from."""
    for case in _cases(form):
        several_written = len(case.calls) == 1 or form.between is not None
        content_written = form.after_content is not None or form.before_content is not None
        if several_written and (content_written or not case.content):
            yield case


def common_cases() -> Iterator[Case]:
    """Cases for every format, in words that were not learnt from."""
    for what, value in STRINGS.items():
        yield Case(f"a string: {what}", (SaidCall("look_up", {"limit": 3, "query": value}),))
    for what, value in OTHERS.items():
        yield Case(f"a value: {what}", (SaidCall("set_value", {"note": "done", "value": value}),))
    yield Case("no arguments", (SaidCall("refresh", {}),))
    yield Case("many arguments", (SaidCall("many", {f"arg_{n}": n if n % 2 else f"text {n}" for n in range(10)}),))
    yield Case("keys in no order", (SaidCall("look_up", {"zone": 1, "Area": {"z": 1, "b": 2}, "query": "first"}),))
    for name in ("ns.tool", "get-weather", "tool_2", "Tool$x"):
        yield Case(f"the name {name}", (SaidCall(name, {"$g": None, "a_b": 1, "c-d": "x", "e.f": True}),))
    two = (SaidCall("look_up", {"query": "first one"}), SaidCall("refresh", {"hard": True}))
    yield Case("two calls", two)
    yield Case("three calls", (*two, SaidCall("look_up", {"query": "third"})))
    yield Case("the same call twice", (two[0], two[0]))
    yield Case("two calls, one without arguments", (SaidCall("refresh", {}), two[0]))
    yield Case("content beside a call", (two[0],), "I look it up.")
    yield Case("content of two lines", (two[0],), "First.\n\nThen I look it up.")
    yield Case("JSON in the content", (two[0],), 'It is {"a": [1, 2]} and so on.')
    yield Case("content beside two calls", two, "Both at once.")


def _cases(form: CallFormat) -> Iterator[Case]:
    yield from common_cases()
    for mark in dict.fromkeys(each for each in (form.trigger, form.close.strip(), form.begin.strip()) if each):
        yield Case(f"{mark!r} in a string", (SaidCall("look_up", {"query": f"a {mark} b"}),))
    if isinstance(form.arguments, TaggedArguments):
        for mark in dict.fromkeys(
            each.strip() for each in (form.arguments.tail, form.arguments.separator) if each.strip()
        ):
            yield Case(f"{mark!r} in a string", (SaidCall("look_up", {"query": f"a {mark} b", "zone": 3}),))
        yield _whole_closing(form, form.arguments)


REFUSED: Final = "the template refuses it"
WHOLE_CLOSING: Final = "what ends the calls in a string"


def _whole_closing(form: CallFormat, arguments: TaggedArguments) -> Case:
    string = arguments.styles.get("string")
    ending = f"{string.close if string else ''}{arguments.tail}{form.close}"
    return Case(WHOLE_CLOSING, (SaidCall("look_up", {"query": f"a{ending} b"}),))


def _traits(asker: Asker, form: CallFormat, wrong: Sequence[CaseDifference]) -> Iterator[CallTrait]:
    if form.between is None:
        yield CallTrait.ONE_CALL
    if not form.trigger:
        yield CallTrait.BARE
    if form.id_pieces is not None:
        yield CallTrait.NAME_IN_ID
    if form.after_content is None:
        if form.before_content is not None:
            yield CallTrait.CONTENT_BEHIND
        else:
            yield CallTrait.CONTENT_INSIDE if _holds_content(asker, form) else CallTrait.CONTENT_DROPPED
    if any(each.why == REFUSED for each in wrong):
        yield CallTrait.SOME_VALUES_REFUSED
    if any(_without_arguments(each.case) for each in wrong):
        yield CallTrait.NO_ARGUMENTS_UNWRITABLE
    style = form.arguments
    if not isinstance(style, TaggedArguments):
        return
    if len(style.styles) < len(get_args(ValueType)):
        yield CallTrait.SOME_TYPES_UNWRITABLE
    string = style.styles.get("string")
    if string is not None and isinstance(string.notation, Raw | Html | Cdata):
        if write_one(form, "5") == write_one(form, 5):
            yield CallTrait.UNTYPED
        elif string.close:
            yield CallTrait.QUOTED_UNESCAPED
        if any(each.case.what == WHOLE_CLOSING for each in wrong):
            yield CallTrait.CLOSING_IN_STRING
        if _has_one_end(form):
            yield CallTrait.END_IN_STRING


def _has_one_end(form: CallFormat) -> bool:
    """Whether a grammar tells the end of a string by one mark, where a reader looks at what follows it too."""
    try:
        return len(ends_of_strings(form)) == 1
    except Inexpressible:
        return False


def _holds_content(asker: Asker, form: CallFormat) -> bool:
    """Whether the template writes a content inside of what begins the calls."""
    said, content = SaidCall("look_up", {"query": "first"}), "I look it up now."
    before, found, after = (asker.turn(said, content=content) or "").partition(content)
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


def _explained(difference: CaseDifference, traits: frozenset[CallTrait]) -> bool:
    case = difference.case
    if case.what == WHOLE_CLOSING:
        return CallTrait.CLOSING_IN_STRING in traits
    if difference.why == REFUSED:
        return CallTrait.SOME_VALUES_REFUSED in traits
    return _without_arguments(case) and CallTrait.NO_ARGUMENTS_UNWRITABLE in traits


def _without_arguments(case: Case) -> bool:
    return any(not said.arguments for said in case.calls)
