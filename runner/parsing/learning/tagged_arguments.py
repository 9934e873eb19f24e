"""Learning of tagged arguments: keys and values between literals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from runner.parsing.learning.call_spans import CallSpan
from runner.parsing.learning.probe_renders import FormatProber, FormatRequirement, ProbeCall, UnlearnableFormat
from runner.parsing.notations import (
    Cdata,
    Html,
    Json,
    Nested,
    Notation,
    Python,
    Raw,
    ValueType,
    object_notations,
    type_of,
)
from runner.parsing.turn_format import Slot, TaggedArguments, ValueStyle

__all__ = ["TaggedLearner"]

NAME: Final = "zqfirstz"
# Integers have no quotes in any notation.
INTEGERS: Final = ProbeCall(NAME, {"zqkeyaz": 70707, "zqkeybz": 80808})
PROBES: Final = (
    ProbeCall(NAME, {"zqkeyaz": 70707}),
    ProbeCall("zqsecondz", {"zqkeybz": 80808}),
    ProbeCall("zqthirdz", {"zqkeycz": 90909}),
)
SIMPLE: Final = "zqvaluez"
HARD: Final = "é \"q\" 'r' \\ / <b> & \n z"
VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "string": (SIMPLE, HARD),
    "integer": (60606, -5),
    "number": (1.5,),
    "boolean": (True, False),
    "null": (None,),
    "array": (["zqitemz", 1, [True, None], {"zqinnerz": "'\""}], []),
    "object": ({"zqinnerz": ["zqitemz", None], "zqmorez": {"zqdeepz": 1.5}}, {}),
}
SCALARS: Final[tuple[Notation, ...]] = (Json(), Python())


@dataclass(frozen=True, slots=True)
class TaggedLearner:
    """Learnt form of tagged arguments. It finds calls with one integer argument in renders (see `__call__`)."""

    arguments: TaggedArguments
    """Form of the arguments. Text that also follows a call without arguments belongs to the close, not to `tail`."""
    probes: tuple[ProbeCall, ProbeCall, ProbeCall] = PROBES

    @classmethod
    def learn(cls, prober: FormatProber) -> Self:
        """Learn how the template writes tagged arguments.

        Raises:
            UnlearnableFormat: the template does not write tagged arguments, or writes values that cannot be read.
        """
        text = _asked(prober, INTEGERS)
        words = [NAME, "zqkeyaz", "70707", "zqkeybz", "80808"]
        parts = list(_between(text, words))
        if len(parts) != len(words) or parts[1] != parts[3]:
            why = "the beginning and the end of a call's arguments cannot be found"
            raise UnlearnableFormat(FormatRequirement.SEPARABLE, why)
        head, open_integer, separator, _, after = parts
        tail, none = _ends(prober, after)
        styles = _styles(prober, head, separator, open_integer)
        backwards = ProbeCall(NAME, dict(reversed(list(INTEGERS.arguments.items()))))
        return cls(TaggedArguments(head, separator, tail, none, styles, sorted_keys=prober.turn(backwards) == text))

    def __call__(self, text: str, said: ProbeCall, call_id: str, start: int = 0) -> CallSpan | None:
        """Return the span of a call with one integer argument; None if the text does not contain the call."""
        ((key, value),) = said.arguments.items()
        style = self.arguments.styles["integer"]
        written = f"{said.name}{self.arguments.head}{key}{style.open}{style.notation.encode(value)}{style.close}"
        at = text.find(written, start)
        if at < 0:
            return None
        end = at + len(written)
        arguments = at + len(said.name)
        return CallSpan(at, end, (Slot.NAME, Slot.ARGUMENTS), text[arguments:end], text[:arguments], None)

    def ended(self, close: str, between: str | None) -> tuple[TaggedArguments, str, str | None]:
        """Return the arguments, `close` and `between`. Both texts no longer begin with the tail of the arguments.

        Raises:
            UnlearnableFormat: `close` or `between` does not begin with the tail.
        """
        tail = self.arguments.tail
        if not close.startswith(tail) or not (between is None or between.startswith(tail)):
            raise UnlearnableFormat(FormatRequirement.SEPARABLE, "the end of the last argument cannot be found")
        return self.arguments, close[len(tail) :], None if between is None else between[len(tail) :]


def _asked(prober: FormatProber, said: ProbeCall) -> str:
    text = prober.turn(said)
    if text is None:
        raise UnlearnableFormat(FormatRequirement.VALUES, "the template raises on a call with two integer arguments")
    return text


def _between(text: str, words: list[str]) -> Iterator[str]:
    """Yield the text after each of `words`, up to the next word. The iteration ends at a word that is missing."""
    at = text.find(words[0])
    for word, following in zip(words, [*words[1:], None], strict=True):
        if at < 0:
            return
        end = at + len(word)
        at = text.find(following, end) if following is not None else len(text)
        if at >= 0:
            yield text[end:at]


_SAID: Final[Mapping[ValueType, str]] = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number with a fraction",
    "boolean": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}


def _ends(prober: FormatProber, after: str) -> tuple[str, str | None]:
    """Return the text after the last value, and the text that replaces the arguments in a call without arguments.

    The result is ("", None) if the template does not write such a call.
    """
    text = prober.turn(ProbeCall(NAME, {}))
    if text is None or NAME not in text:
        return "", None
    without = text.partition(NAME)[2]
    shared = prober.cut_points.common_suffix([after, without])
    return after[: len(after) - len(shared)], without[: len(without) - len(shared)]


def _styles(prober: FormatProber, head: str, separator: str, open_integer: str) -> dict[ValueType, ValueStyle]:
    styles: dict[ValueType, ValueStyle] = {}
    for values in VALUES.values():
        bodies = [_body(prober, value, separator) for value in values]
        known = [body for body in bodies if body is not None]
        if len(known) < len(bodies):
            continue
        style = _style(prober, values, known, open_integer, separator)
        if style is None:
            why = f"{_SAID[type_of(values[0])]} in a call's arguments is not written in a form that can be read again"
            raise UnlearnableFormat(FormatRequirement.VALUES, why)
        styles[type_of(values[0])] = style
    if "string" not in styles:
        raise UnlearnableFormat(FormatRequirement.VALUES, "no text ends a string in a call's arguments")
    return styles


def _body(prober: FormatProber, value: Any, separator: str) -> str | None:
    """Return the text between a key and the separator for a value; None if the template does not write the value."""
    text = prober.turn(ProbeCall(NAME, {"zqkeyaz": value, "zqkeybz": 80808}))
    parts = [] if text is None else list(_between(text, [NAME, "zqkeyaz", "zqkeybz"]))
    if len(parts) < 3 or not parts[1].endswith(separator):
        return None
    return parts[1][: len(parts[1]) - len(separator)]


def _style(
    prober: FormatProber, values: tuple[Any, ...], bodies: list[str], open_integer: str, separator: str
) -> ValueStyle | None:
    kind = type_of(values[0])
    if kind == "string":
        candidates: list[Notation] = [Json(), Json(ascii=True), Python(), Raw(), Html(), Html(quote=False)]
        if "<![CDATA[" in bodies[1]:
            candidates = [Cdata(_cdata_signs(prober, separator))]
    elif kind in ("array", "object"):
        candidates = object_notations("")
    else:
        candidates = list(SCALARS)
    for notation in candidates:
        style = _fitting(notation, values, bodies)
        if style is not None:
            return style
    if kind in ("array", "object"):
        nested = _learn_nested(lambda value: _body(prober, value, separator), open_integer)
        return None if nested is None else _fitting(nested, values, bodies)
    return None


def _fitting(notation: Notation, values: tuple[Any, ...], bodies: list[str]) -> ValueStyle | None:
    written = [notation.encode(value) for value in values]
    before, found, after = bodies[0].partition(written[0])
    if found and all(f"{before}{text}{after}" == body for text, body in zip(written, bodies, strict=True)):
        return ValueStyle(before, notation, after)
    return None


def _cdata_signs(prober: FormatProber, separator: str) -> str:
    return "".join(sign for sign in "<>&\"'\n\\]" if "CDATA" in (_body(prober, f"a{sign}b", separator) or ""))


def _learn_nested(body: Callable[[Any], str | None], before: str) -> Nested | None:
    """Return the notation of lists and objects; None if `Nested` cannot describe it.

    Args:
        body: returns the text between a key and the separator, for a value.
        before: text at the start of each body.
    """
    texts = [
        body(value)
        for value in ([70707, 80808], [True, False, None, "zqitemz"], {"zqaz": 70707, "zqbz": 80808}, {}, [])
    ]
    if any(text is None or not text.startswith(before) for text in texts):
        return None
    numbers, words, members, no_members, no_items = (text[len(before) :] for text in texts if text is not None)
    open_list, _, rest = numbers.partition("70707")
    item, _, close_list = rest.partition("80808")
    if no_items != open_list + close_list or not item:
        return None
    listed = words[len(open_list) : len(words) - len(close_list)].split(item)
    if len(listed) != 4 or "zqitemz" not in listed[3]:
        return None
    open_string, _, close_string = listed[3].partition("zqitemz")
    opened, _, rest = members.partition("zqaz")
    colon, _, rest = rest.partition("70707")
    between, _, rest = rest.partition("zqbz")
    colon_again, _, close_object = rest.partition("80808")
    open_object = no_members[: len(no_members) - len(close_object)]
    open_key = opened[len(open_object) :]
    if colon != colon_again or not opened.startswith(open_object) or not between.endswith(open_key):
        return None
    member = between[: len(between) - len(open_key)]
    backwards = body({"zqbz": 80808, "zqaz": 70707})
    return Nested(
        open_object, colon, member, close_object, open_list, item, close_list, open_string, close_string,
        open_key, "", listed[0], listed[1], listed[2], backwards == texts[2],
    )  # fmt: skip
