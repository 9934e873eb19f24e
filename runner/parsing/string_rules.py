"""Grammar rules for JSON strings that have a limited length or match a pattern."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, TypeAlias

from runner.parsing.ebnf import NOTHING, Rules, either, literal
from runner.tools.ecma_patterns import python_pattern

__all__ = [
    "ASCII_UNITS",
    "EVERY",
    "FORMATS",
    "JsonCharacters",
    "UnsupportedPattern",
    "character_class",
    "characters_but",
    "pattern_rule",
    "text_but",
]

Characters: TypeAlias = Sequence[tuple[int, int]]
"""Ranges of code points, sorted."""

_MAX_CODE_POINT: Final = 0x10FFFF
_SURROGATES: Final = (0xD800, 0xDFFF)
EVERY: Final[Characters] = ((0, _SURROGATES[0] - 1), (_SURROGATES[1] + 1, _MAX_CODE_POINT))
"""All characters except surrogates."""

MAX_REPEATED: Final = 128
"""Maximum number of repetitions in a rule. Larger numbers are left to validation, since they enlarge the grammar."""

_YEAR: Final = "[0-9]{4}"
_DATE: Final = (
    rf"{_YEAR}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|{_YEAR}-(0[13-9]|1[0-2])-(29|30)|{_YEAR}-(0[13578]|1[02])-31"
)
_TIME: Final = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE: Final = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL: Final = "[A-Za-z0-9]([A-Za-z0-9\\-]{0,30}[A-Za-z0-9])?"
FORMATS: Final = {
    "date": f"^({_DATE})$",
    "time": f"^{_TIME}$",
    "date-time": f"^({_DATE})T{_TIME}$",
    "uuid": "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$",
    "ipv4": rf"^{_BYTE}(\.{_BYTE}){{3}}$",
    "email": rf"^[A-Za-z0-9_+\-]+(\.[A-Za-z0-9_+\-]+)*@{_LABEL}(\.{_LABEL})+$",
}
"""Enforced formats, each with a pattern that matches only valid values."""


class UnsupportedPattern(Exception):
    """No grammar exists for a pattern; the message is a clause with the reason."""


class JsonCharacters:
    """Writer of grammar expressions for characters in a JSON string."""

    def __init__(self, rules: Rules, *, ascii_only: bool, written: Callable[[str], str]) -> None:
        """Write characters for the grammar of `rules`.

        Args:
            rules: rules of the grammar.
            ascii_only: True if characters outside ASCII are written as escapes.
            written: converts JSON text to the text of the notation, such as JSON inside a JSON string.
        """
        self._rules = rules
        self._ascii = ascii_only
        self._written = written

    def text(self, text: str) -> str:
        return literal(self._written(json.dumps(text, ensure_ascii=self._ascii)[1:-1]))

    def one_of(self, ranges: Characters) -> str:
        return either(self.choices(ranges))

    def choices(self, ranges: Characters) -> list[str]:
        """Return expressions that together match any one of these characters; none of them contains alternatives.

        With `ascii_only`, characters outside ASCII are left out if there are more than 64, since each needs its own
        escape. They are kept if `ranges` contains all characters that need an escape.

        Raises:
            UnsupportedPattern: no character is left, or `ranges` is empty.
        """
        plain: list[tuple[int, int]] = []
        escaped: list[int] = []
        for first, last in ranges:
            for low, high in _PLAIN if not self._ascii else _PLAIN_ASCII:
                if max(first, low) <= min(last, high):
                    plain.append((max(first, low), min(last, high)))
            escaped += [each for each in _ESCAPED if first <= each <= last]
        choices = [character_class(plain)] if plain else []
        every_escape = len(escaped) == len(_ESCAPED)
        wide = [each for each in ranges if each[1] > 0x7E] if self._ascii else []
        every_wide = (0x7F, EVERY[0][1]) in [(max(first, 0x7F), last) for first, last in wide] and EVERY[1] in wide
        if every_escape:
            choices += self._escapes(wide=every_wide)
        else:
            choices += [self.text(chr(each)) for each in escaped]
        if wide and not (every_escape and every_wide):
            if sum(last - max(first, 0x7F) + 1 for first, last in wide) <= 64:
                choices += [self.text(chr(each)) for first, last in wide for each in range(max(first, 0x7F), last + 1)]
            elif not choices:
                raise UnsupportedPattern("its characters would have to be escaped")
        if not choices:
            raise UnsupportedPattern("it matches no character")
        return choices

    def _escapes(self, *, wide: bool) -> list[str]:
        """Return expressions for the escapes of the quote, the backslash and control characters.

        With `wide`, the expressions also match the escapes of all characters outside ASCII.
        """
        backslash = literal(self._written("\\"))
        short = [literal(self._written("\\" + sign)) for sign in ('"', "\\")]
        found = [*short, f"{backslash} [bfnrt]"]
        units = ASCII_UNITS if wide else ('"u00" [01] [0-9a-f]',)
        return [*found, *(f"{backslash} {unit.format(backslash=backslash)}" for unit in units)]

    def but(self, names: Collection[str]) -> str:
        """Return an expression for any text except `names`."""
        return text_but(names, self._rules, self.text, self.choices)

    def at_most(self, most: int, quote: str) -> str:
        """Return an expression for the rest of a string: at most `most` characters, and the closing quote."""
        rule = self._rules.add("end", quote)
        for _ in range(most):
            rule = self._rules.add("end", " | ".join([quote, *(f"{each} {rule}" for each in self.choices(EVERY))]))
        return rule


def repeated(rules: Rules, choices: Sequence[str], least: int, most: int | None) -> str:
    """Return an expression for `least` to `most` repetitions of any of `choices`; without a limit if `most` is None.

    The expression uses right recursion over each choice, since for a star over a rule xgrammar matches the whole
    vocabulary at every token.
    """
    if most is None:
        key = ("repeated", *choices)
        more = rules.recursive(key, "repeated", lambda name: _or_nothing(choices, name))
    else:
        more = NOTHING
        for _ in range(most - least):
            more = rules.add("repeated", _or_nothing(choices, more))
    return " ".join([*[either(choices)] * least, *([] if more == NOTHING and least else [more])])


def _or_nothing(choices: Sequence[str], more: str) -> str:
    return " | ".join([NOTHING, *(f"{each} {more}" for each in choices)])


# These rules exclude unpaired surrogates, since a string with one could not be encoded.
ASCII_UNITS: Final = (
    '"u" [0-9a-ce-f] [0-9a-f] [0-9a-f] [0-9a-f]',
    '"ud" [0-7] [0-9a-f] [0-9a-f]',
    '"ud" [89ab] [0-9a-f] [0-9a-f] {backslash} "ud" [c-f] [0-9a-f] [0-9a-f]',
)


def text_but(
    names: Collection[str],
    rules: Rules,
    text: Callable[[str], str],
    choices_of: Callable[[Characters], list[str]],
    every: Characters = EVERY,
) -> str:
    """Return an expression for any text except `names`.

    Args:
        names: texts that do not match.
        rules: rules of the grammar.
        text: returns the expression for a text.
        choices_of: returns expressions that together match any one of some characters.
        every: characters that the matching texts may contain.
    """
    anything = repeated(rules, choices_of(every), 0, None)

    def after(left: Collection[str]) -> str:
        """Return a rule for the rest of a text that may still become one of `left`."""
        choices = [] if "" in left else [NOTHING]
        firsts = sorted({name[0] for name in left if name})
        if others := _without(every, [(ord(first), ord(first)) for first in firsts]):
            choices += [f"{each} {anything}" for each in choices_of(others)]
        for first in firsts:
            choices.append(f"{text(first)} {after({name[1:] for name in left if name[:1] == first})}")
        return rules.add("name", either(choices))

    return after(set(names))


_PLAIN: Final = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, _MAX_CODE_POINT))
_PLAIN_ASCII: Final = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E))
_ESCAPED: Final = (0x22, 0x5C, *range(0x20))


def _range(first: int, last: int) -> str:
    one, other = _in_class(first), _in_class(last)
    return one if first == last else f"{one}-{other}"


def _in_class(code: int) -> str:
    char = chr(code)
    if char in "]^-[\\":
        return "\\" + char
    return char if 0x20 <= code < 0x7F else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def characters_but(signs: str) -> Characters:
    """Return the ranges of all characters except `signs`, U+0000 to U+001F, and surrogates."""
    return _complement([(0, 0x1F), *((ord(sign), ord(sign)) for sign in signs)])


def character_class(ranges: Characters) -> str:
    return f"[{''.join(_range(*each) for each in ranges)}]"


def pattern_rule(pattern: str, characters: JsonCharacters, rules: Rules) -> str:
    """Return an expression for the strings that a pattern matches, without their quotes.

    Raises:
        UnsupportedPattern: no grammar can express the pattern.
    """
    parser: Any = importlib.import_module("re._parser")
    parsed = list(parser.parse(python_pattern(pattern).pattern))
    return _PatternWriter(characters, rules).found(parsed)


class _PatternWriter:
    """Writer of a pattern as rules, from the parse tree of Python's `re`."""

    def __init__(self, characters: JsonCharacters, rules: Rules) -> None:
        self._characters = characters
        self._rules = rules

    def found(self, parsed: Sequence[Any], *, begins: bool = False, ends: bool = False) -> str:
        """Return an expression for the strings in which a parsed pattern is found.

        With `begins`, the match must be at the start of the string; with `ends`, at its end.
        """
        body = list(parsed)
        while body and _is_at(body[0], "AT_BEGINNING", "AT_BEGINNING_STRING"):
            body, begins = body[1:], True
        while body and _is_at(body[-1], "AT_END", "AT_END_STRING"):
            body, ends = body[:-1], True
        if len(body) == 1 and _anchored(body):
            name, value = str(body[0][0]), body[0][1]
            if name == "BRANCH":
                return either(self.found(list(each), begins=begins, ends=ends) for each in value[1])
            if name == "SUBPATTERN" and not value[1] and not value[2]:
                return self.found(list(value[3]), begins=begins, ends=ends)
        anything = repeated(self._rules, self._characters.choices(EVERY), 0, None)
        parts = ("" if begins else anything, self.sequence(body), "" if ends else anything)
        return " ".join(filter(None, parts))

    def sequence(self, parsed: Sequence[Any]) -> str:
        return " ".join(self.one(each) for each in parsed) or NOTHING

    def _choices(self, parsed: Sequence[Any]) -> list[str]:
        """Return expressions for the alternatives of a repeated part: several for a character class, otherwise one."""
        if len(parsed) == 1 and _is(parsed[0], "IN"):
            return self._characters.choices(_class(parsed[0][1]))
        if len(parsed) == 1 and _is(parsed[0], "ANY"):
            return self._characters.choices(_complement([(10, 10)]))
        return [self.sequence(parsed)]

    def one(self, item: Any) -> str:
        name, value = str(item[0]), item[1]
        match name:
            case "LITERAL":
                return self._characters.text(chr(value))
            case "NOT_LITERAL":
                return self._characters.one_of(_complement([(value, value)]))
            case "ANY":
                return self._characters.one_of(_complement([(10, 10)]))
            case "IN":
                return self._characters.one_of(_class(value))
            case "BRANCH":
                return either(self.sequence(list(each)) for each in value[1])
            case "SUBPATTERN" if not value[1] and not value[2]:
                return f"({self.sequence(list(value[3]))})"
            case "MAX_REPEAT" | "MIN_REPEAT":
                low, high, inner = value
                most = None if str(high) == "MAXREPEAT" else int(high)
                if max(low, most or 0) > MAX_REPEATED:
                    raise UnsupportedPattern(f"it repeats something more than {MAX_REPEATED} times")
                return repeated(self._rules, self._choices(list(inner)), low, most)
        raise UnsupportedPattern(f"no grammar can express the part {name.lower()!r} of a pattern")


def _is(item: Any, name: str) -> bool:
    return str(item[0]) == name


def _is_at(item: Any, *names: str) -> bool:
    return str(item[0]) == "AT" and str(item[1]) in names


def _anchored(parsed: Any) -> bool:
    """Return whether the pattern, or one of its alternatives, begins or ends with an anchor."""
    items = list(parsed)
    if len(items) == 1 and _is(items[0], "BRANCH"):
        return any(_anchored(each) for each in items[0][1][1])
    if len(items) == 1 and _is(items[0], "SUBPATTERN"):
        return _anchored(items[0][1][3])
    return bool(items) and (_is(items[0], "AT") or _is(items[-1], "AT"))


def _class(items: Sequence[Any]) -> Characters:
    found: list[tuple[int, int]] = []
    negated = False
    for item in items:
        name, value = str(item[0]), item[1]
        match name:
            case "NEGATE":
                negated = True
            case "LITERAL":
                found.append((value, value))
            case "RANGE":
                found.append(tuple(value))
            case "CATEGORY" if str(value) in _CATEGORIES:
                found += _CATEGORIES[str(value)]
            case _:
                raise UnsupportedPattern(f"no grammar can express the part {str(value).lower()!r} of a pattern")
    found.sort()
    return _complement(found) if negated else found


def _complement(ranges: Characters) -> Characters:
    return _without(EVERY, ranges)


def _without(every: Characters, ranges: Characters) -> Characters:
    """Return the characters of `every` that are not in `ranges`."""
    found: list[tuple[int, int]] = []
    for low, high in every:
        at = low
        for first, last in sorted(ranges):
            if last < at or first > high:
                continue
            if first > at:
                found.append((at, first - 1))
            at = max(at, last + 1)
        if at <= high:
            found.append((at, high))
    return found


_SPACES: Final = ((9, 13), (32, 32))
_OTHER_SPACES: Final = (
    (0x1C, 0x1F), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000),
)  # fmt: skip
_CATEGORIES: Final[dict[str, Characters]] = {
    "CATEGORY_SPACE": _SPACES,
    "CATEGORY_NOT_SPACE": _complement([*_SPACES, *_OTHER_SPACES]),
}
