"""Reader of the arguments of one call: an object, or tagged keys and values. The tool's schema decides the types."""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

from runner.parsing.lenient_patterns import after_key, after_raw, compiled, lenient
from runner.parsing.literals import MAX_DEPTH, Unreadable, after_space, read_literal
from runner.parsing.notations import Cdata, Html, Nested, Notation, Raw, type_of
from runner.parsing.turn_format import TaggedArguments, ValueStyle
from runner.tools.modern_schema import modern
from runner.tools.schema_shapes import shapes_for
from runner.tools.validators import validator_of

__all__ = ["WORD", "TaggedArgumentReader", "Undecided", "as_object", "as_typed", "read_object"]

AS_TEXT: Final = (Raw, Html, Cdata)
MAX_UNDECIDED: Final = 6
"""Maximum number of arguments of undecided type for which every combination of types is tried."""
_END: Final = r"\s*\Z"
WORD: Final = r"""[^\s<>{}()\[\]"'`,=|]"""
"""Pattern of one character in the name of a tool or of an argument."""
MAX_NAMED: Final = 256
"""Maximum number of cached readers, one for each set of unusual argument names."""
_USUAL: Final = re.compile(f"{WORD}+")


class Undecided(Exception):
    """A result that later text may change. Raised only for an incomplete text."""


@dataclass(frozen=True)  # no slots: cached properties need a dict
class TaggedArgumentReader:
    format: TaggedArguments
    ends: Sequence[str]
    """Patterns of the text after the arguments: the close of the calls, or the next call."""
    names: tuple[str, ...] = ()
    """Names of arguments with characters that usually end a name, such as `page[size]`."""

    def for_schema(self, schema: Mapping[str, Any]) -> TaggedArgumentReader:
        """Return a reader whose `names` are the argument names in `schema` that contain unusual characters."""
        found = {name for shape in shapes_for(schema).arguments() for name in shape.named if _is_unusual(name)}
        if not found:
            return self
        names = tuple(sorted(found, key=lambda name: (-len(name), name)))
        if names not in self._named:
            if len(self._named) == MAX_NAMED:
                self._named.clear()
            self._named[names] = replace(self, names=names)
        return self._named[names]

    def read(self, text: str, at: int, schema: Mapping[str, Any], *, whole: bool) -> tuple[Mapping[str, Any], int]:
        """Return the arguments that begin at `at`, and the position after them.

        Args:
            text: output of the model.
            at: position at which the arguments begin.
            schema: JSON schema of the tool's parameters.
            whole: True if the text is complete.

        Raises:
            Unreadable: the arguments cannot be read; the message is a clause with the reason.
            Undecided: the end of a value may be in later text.
        """
        head = self._head.match(text, at)
        member = None if head is None else self._member(text, head.end(), schema, {}, whole)
        if member is None:
            return self._without(text, at, begun=head is not None)
        arguments: dict[str, Any] = {}
        while member is not None:
            name, value, at = member
            if name in arguments:
                raise Unreadable(f"{name} is given twice")
            arguments[name] = value
            separator = self._separator.match(text, at)
            member = None if separator is None else self._member(text, separator.end(), schema, arguments, whole)
            # Python allows a trailing comma.
            at = separator.end() if separator is not None and self._typed else at
        tail = self._tail.match(text, at)
        if tail is None:
            raise Unreadable(f"{self.format.tail.strip()!r} is missing after {name}")
        return _settled(arguments, schema), tail.end()

    @cached_property
    def _named(self) -> dict[tuple[str, ...], TaggedArgumentReader]:
        return {}

    def _without(self, text: str, at: int, *, begun: bool) -> tuple[Mapping[str, Any], int]:
        none = None if self._none is None else self._none.match(text, at)
        if none is None:
            missing = "the name of an argument" if begun else repr(self.format.head.strip())
            raise Unreadable(f"{missing} is missing")
        return {}, none.end()

    def _member(
        self, text: str, at: int, schema: Mapping[str, Any], before: Mapping[str, Any], whole: bool
    ) -> tuple[str, Any, int] | None:
        """Return name and value of one argument and the position after it; None if no argument begins at `at`."""
        key = self._key.match(text, at)
        if key is not None:
            name = key["key"]
            return name, *self._value(text, key.end(), name, schema, whole)
        if not self._typed:
            return None
        try:
            value, end = read_literal(text, at)
        except Unreadable:
            return None
        # As in Python, values without names belong to the first parameters.
        names, given = list(schema.get("properties") or ()), len(before)
        if list(before) != names[:given] or not names:
            raise Unreadable(f"the argument {text[at:end].strip():.40} has no name")
        if given == len(names):
            raise Unreadable(f"there are more arguments than the {given} parameters")
        return names[given], value, end

    @cached_property
    def _typed(self) -> bool:
        """True if all values are literals, so that values without names can be read."""
        return not any(isinstance(style.notation, AS_TEXT) for style in self.format.styles.values())

    def _value(self, text: str, at: int, name: str, schema: Mapping[str, Any], whole: bool) -> tuple[Any, int]:
        """Return the value after a key, and the position after its closing text."""
        problem: Unreadable | None = None
        for opening, styles, nested in self._openings:
            opened = opening.match(text, at)
            if opened is None:
                continue
            try:
                if isinstance(styles[0].notation, AS_TEXT):
                    return self._raw(styles, text, opened.end(), name, schema, whole)
                return _literal(styles, nested, text, opened.end())
            except Unreadable as error:
                problem = problem or error
        raise Unreadable(f"the value of {name}: {problem}" if problem else f"the value of {name} is missing")

    def _raw(
        self, styles: Sequence[ValueStyle], text: str, start: int, name: str, schema: Mapping[str, Any], whole: bool
    ) -> tuple[Any, int]:
        """Return an unquoted value, and the position after its closing text.

        The value ends at the first text that may follow a value.
        """
        style = styles[0]
        followed, alone = self._after[style.close]
        found = followed.search(text, start)
        if found is None and not whole:
            raise Undecided
        found = found or alone.search(text, start)
        if found is None:
            raise Unreadable("it is not closed")
        end = found.start()
        closed = compiled(lenient(style.close)).match(text, end)
        written = _decoded(style.notation, text[start:end])
        value: Any = written
        # If strings and other types have the same opening text, only the schema distinguishes them.
        if len(styles) > 1:
            types = shapes_for(schema).types_of_argument(name)
            value = as_typed(written, types)
            if value is not written and (not types or "string" in types) and not isinstance(value, dict | list):
                value = _Typed(value, written)
        return value, end if closed is None else closed.end()

    @cached_property
    def _head(self) -> re.Pattern[str]:
        return compiled(lenient(self.format.head))

    @cached_property
    def _none(self) -> re.Pattern[str] | None:
        return None if self.format.none is None else compiled(lenient(self.format.none))

    @cached_property
    def _separator(self) -> re.Pattern[str]:
        return compiled(lenient(self.format.separator))

    @cached_property
    def _tail(self) -> re.Pattern[str]:
        return compiled(lenient(self.format.tail))

    @cached_property
    def _key(self) -> re.Pattern[str]:
        openings = sorted({lenient(style.open) for style in self.format.styles.values()}, key=len, reverse=True)
        names = "|".join([*map(re.escape, self.names), f"{WORD}+?"])
        return compiled(rf"""\s*(?P<key>{names})(?={"|".join(openings)})""")

    @cached_property
    def _openings(self) -> Sequence[tuple[re.Pattern[str], Sequence[ValueStyle], Nested | None]]:
        """The value styles, grouped by opening text, with the longest opening text first.

        Each group has the pattern of its opening text, its styles (plain text first), and its `Nested` notation or
        None.
        """
        grouped: dict[str, list[ValueStyle]] = {}
        for style in self.format.styles.values():
            grouped.setdefault(style.open, []).append(style)
        result: list[tuple[re.Pattern[str], Sequence[ValueStyle], Nested | None]] = []
        for opening, styles in sorted(grouped.items(), key=lambda item: len(item[0]), reverse=True):
            styles.sort(key=lambda style: not isinstance(style.notation, AS_TEXT))
            raw = isinstance(styles[0].notation, AS_TEXT)
            nested = next((style.notation for style in styles if isinstance(style.notation, Nested)), None)
            result.append((compiled(after_key(opening) if raw else lenient(opening)), styles, nested))
        return result

    @cached_property
    def _after(self) -> Mapping[str, tuple[re.Pattern[str], re.Pattern[str]]]:
        """Two patterns for the end of an unquoted value, by the closing text of the value's style.

        The first pattern requires that the next key or the end of the call follows; the second does not.
        """
        form = self.format
        patterns: dict[str, tuple[re.Pattern[str], re.Pattern[str]]] = {}
        for close in {style.close for style in form.styles.values() if isinstance(style.notation, AS_TEXT)}:
            another = after_raw(close + form.separator) + self._key.pattern
            last = [_joined(close + form.tail, end) for end in self.ends]
            own = after_raw(close + form.tail)
            patterns[close] = compiled("|".join([another, *last])), compiled(own if own else _END)
        return patterns


def _is_unusual(name: str) -> bool:
    return bool(name) and _USUAL.fullmatch(name) is None


class _Typed(NamedTuple):
    """A value without quotes that may also be a string."""

    value: Any
    text: str


def _settled(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the types of values that may also be strings. A value is a string only if no other type fits the schema.

    The type of one argument can depend on another argument, as in `oneOf`. A list or an object is never read as a
    string, so that the model receives a message about the errors in it.
    """
    either = [name for name, value in arguments.items() if isinstance(value, _Typed)]
    made = {name: value.value if isinstance(value, _Typed) else value for name, value in arguments.items()}
    if not either:
        return made
    check = validator_of(modern(schema).schema)
    if check.is_valid(made):
        return made
    for count in range(1, len(either) + 1) if len(either) <= MAX_UNDECIDED else (1, len(either)):
        for names in itertools.combinations(either, count):
            strings = {**made, **{name: arguments[name].text for name in names}}
            if check.is_valid(strings):
                return strings
    return made


def _joined(literal: str, pattern: str) -> str:
    return after_raw(literal) + pattern if literal else pattern.removeprefix(r"\s*")


def _literal(styles: Sequence[ValueStyle], nested: Nested | None, text: str, start: int) -> tuple[Any, int]:
    value, end = _read_nested(nested, text, start) if nested is not None else read_literal(text, start)
    for style in styles:
        closed = compiled(lenient(style.close)).match(text, end)
        if closed is not None:
            return value, closed.end()
    raise Unreadable(f"it is followed by {text[end : end + 10]!r}")


def read_object(text: str, at: int) -> tuple[Mapping[str, Any], int]:
    """Return the arguments that begin at `at`, and the position after them.

    They are written as an object, or as a string that contains an object. The result is empty for `null` and "".

    Raises:
        Unreadable: the arguments have another form.
    """
    value, end = read_literal(text, at)
    return as_object(value), end


def as_object(arguments: Any) -> Mapping[str, Any]:
    """Return the arguments as an object. They may be given as an object or as a string that contains an object.

    The result is empty for None and "".

    Raises:
        Unreadable: the arguments have another form.
    """
    if isinstance(arguments, str) and arguments.strip():
        text = arguments
        try:
            arguments, end = read_literal(text)
        except Unreadable as error:
            raise Unreadable(f"its arguments are a string but not a JSON object: {error}") from None
        if text[end:].strip():
            raise Unreadable(f"its arguments are a string with {text[end:].strip()[:20]!r} after the object")
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, dict):
        raise Unreadable("its arguments must be a JSON object")
    return arguments


def _decoded(notation: Notation, text: str) -> str:
    match notation:
        case Html():
            return html.unescape(text)
        case Cdata() if text.startswith("<![CDATA[") and text.endswith("]]>"):
            return text[len("<![CDATA[") : -len("]]>")]
        case _:
            return text


def as_typed(text: str, types: Set[str]) -> Any:
    """Return the value of an unquoted text.

    A literal, such as `5`, is a string only if strings are allowed and its own type is not. Other text is a string.

    Args:
        text: text of an argument that was written without quotes.
        types: JSON schema types that the argument allows; empty if it allows any type.
    """
    # A text that begins with a plus is a literal only if no string is allowed here, since it may be a telephone number.
    if types == {"string"} or (text.startswith("+") and (not types or "string" in types)):
        return text
    try:
        value, end = read_literal(text)
    except Unreadable:
        return text
    if text[end:].strip() or isinstance(value, str):
        return text
    kind = type_of(value)
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return value if fits or "string" not in types else text


# --- lists and objects in a learnt notation


def _read_nested(notation: Nested, text: str, at: int, depth: int = 0) -> tuple[Any, int]:
    """Return the value at `at`, and the position after it.

    Raises:
        Unreadable: no value begins at `at`.
    """
    at = after_space(text, at)
    if depth > MAX_DEPTH:
        raise Unreadable("it is nested too deeply")
    if text.startswith(notation.open_string, at):
        return _nested_string(notation, text, at + len(notation.open_string))
    if text.startswith(notation.open_object, at):
        return _nested_object(notation, text, at + len(notation.open_object), depth)
    if text.startswith(notation.open_list, at):
        return _nested_list(notation, text, at + len(notation.open_list), depth)
    for word, value in ((notation.true, True), (notation.false, False), (notation.null, None)):
        if text.startswith(word, at):
            return value, at + len(word)
    return read_literal(text, at)


def _nested_string(notation: Nested, text: str, at: int) -> tuple[str, int]:
    end = text.find(notation.close_string, at)
    if end < 0:
        raise Unreadable("a string is not closed")
    return text[at:end], end + len(notation.close_string)


def _nested_object(notation: Nested, text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    members: dict[str, Any] = {}
    at = after_space(text, at)
    while not text.startswith(notation.close_object, at):
        at = _nested_expect(text, notation.open_key, at)
        colon = text.find(notation.close_key + notation.colon, at)
        if colon < 0:
            raise Unreadable("an object is not closed")
        key = text[at:colon].strip()
        members[key], at = _read_nested(notation, text, colon + len(notation.close_key + notation.colon), depth + 1)
        at = _nested_more(text, notation.member, notation.close_object, at)
    return members, at + len(notation.close_object)


def _nested_list(notation: Nested, text: str, at: int, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    at = after_space(text, at)
    while not text.startswith(notation.close_list, at):
        item, at = _read_nested(notation, text, at, depth + 1)
        items.append(item)
        at = _nested_more(text, notation.item, notation.close_list, at)
    return items, at + len(notation.close_list)


def _nested_more(text: str, separator: str, close: str, at: int) -> int:
    at = after_space(text, at)
    return (
        at
        if text.startswith(close, at)
        else after_space(text, _nested_expect(text, separator.strip() or separator, at))
    )


def _nested_expect(text: str, sign: str, at: int) -> int:
    if not text.startswith(sign, at):
        raise Unreadable(f"{sign!r} is missing before {text[at : at + 10]!r}")
    return at + len(sign)
