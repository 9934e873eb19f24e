"""Regular expressions of JSON schemas (ECMA-262): translation to Python's `re`, and matching in linear time."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Sequence
from typing import Any, Final

from pydantic_core import SchemaError, SchemaValidator, core_schema

__all__ = ["BadPattern", "matches", "python_pattern"]


class BadPattern(ValueError):
    """A pattern that Python cannot match; the message is a clause with the reason."""


@functools.lru_cache(maxsize=4096)
def python_pattern(pattern: str) -> re.Pattern[str]:
    r"""Return the pattern for Python, compiled: `\d` and `\w` are ASCII, `$` is the very end of the text.

    Raises:
        BadPattern: Python has no equal pattern, as for `[\p{L}]`.
    """
    parts: list[str] = []
    inside = False  # True inside brackets
    at = 0
    while at < len(pattern):
        match = _PART.match(pattern, at)
        assert match is not None, "the last alternative is any character"
        text, at = match.group(), match.end()
        parts.append(_translated(text, inside=inside))
        if not inside and text.startswith("["):
            inside = text not in _WHOLE_CLASSES
        elif inside and text == "]":
            inside = False
    try:
        return re.compile("".join(parts))
    except (re.error, OverflowError, RecursionError) as error:
        raise BadPattern(f"Python has no pattern {pattern!r:.60}: {error}") from None


_PART: Final = re.compile(
    r"\\[pP]\{[^}]*\}|\\u\{[0-9A-Fa-f]+\}|\\k<\w+>|\\c[A-Za-z]|\\.|\(\?<(?![=!])|\[\^\]|\[\]|\[\^?|.", re.DOTALL
)
_WHOLE_CLASSES: Final = {"[^]": r"[\s\S]", "[]": r"(?!)"}
_SETS: Final = {r"\d": "0-9", r"\w": "A-Za-z0-9_"}
_OUTSIDE: Final = {r"\D": "[^0-9]", r"\W": "[^A-Za-z0-9_]", "(?<": "(?P<", "$": r"\Z", **_WHOLE_CLASSES}
_LETTERS: Final = {r"\p{L}": r"[^\W\d_]", r"\p{Letter}": r"[^\W\d_]", r"\p{N}": r"\d", r"\p{Nd}": r"\d"}


def _translated(text: str, *, inside: bool) -> str:
    if text.startswith((r"\p", r"\P")) and len(text) > 2:
        if inside or text not in _LETTERS:
            raise BadPattern(f"Python has no {text} in a pattern")
        return _LETTERS[text]
    if text.startswith(r"\u{"):
        return f"\\U{int(text[3:-1], 16):08x}"
    if text.startswith(r"\k<"):
        return f"(?P={text[3:-1]})"
    if re.fullmatch(r"\\c[A-Za-z]", text):
        return f"\\x{ord(text[2]) % 32:02x}"
    if text in _SETS:
        return _SETS[text] if inside else f"[{_SETS[text]}]"
    if inside:
        return f"\\{text}" if text in "[&~|" else text  # a pair of these characters may become an operator in Python
    return _OUTSIDE.get(text, text)


def matches(pattern: re.Pattern[str], text: str) -> bool:
    r"""Return whether a pattern is found in a text that a model wrote.

    Python's `re` tries every way to match: `^(a+)+$` takes hours for forty letters, and blocks the event loop of all
    episodes. Rust's `regex`, which pydantic contains, matches in linear time, so it is used instead. `re` is used
    only for patterns with features that Rust's `regex` lacks (look-around, back references, `\b`, flags), and for texts
    with an unpaired surrogate.
    """
    linear = _linear(pattern)
    if linear is None or not _is_unicode(text):
        return pattern.search(text) is not None
    return linear.isinstance_python(text)


@functools.lru_cache(maxsize=4096)
def _linear(pattern: re.Pattern[str]) -> SchemaValidator | None:
    """Return a validator of texts in which a pattern is found; None if Rust cannot match it as Python does."""
    if pattern.flags != re.UNICODE:
        return None
    parser: Any = importlib.import_module("re._parser")
    try:
        written = _in_rust(parser.parse(pattern.pattern))
        return SchemaValidator(core_schema.str_schema(pattern=written, regex_engine="rust-regex", strict=True))
    except (_NotInRust, SchemaError, RecursionError):
        return None


def _is_unicode(text: str) -> bool:
    """Return whether a text has no unpaired surrogate, which Rust cannot store."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _NotInRust(Exception):
    """A pattern with a part that Rust's `regex` lacks, or interprets differently."""


def _in_rust(parsed: Sequence[Any]) -> str:
    """Return a pattern for Rust, from the parse tree of Python's `re`."""
    return "".join(_item_in_rust(str(name), value) for name, value in parsed)


def _item_in_rust(name: str, value: Any) -> str:
    match name:
        case "LITERAL":
            return _code(value)
        case "NOT_LITERAL":
            return f"[^{_code(value)}]"
        case "ANY":
            return r"[^\n]"
        case "IN":
            return f"[{''.join(_class_in_rust(str(kind), each) for kind, each in value)}]"
        case "BRANCH":
            return f"(?:{'|'.join(_in_rust(each) for each in value[1])})"
        case "SUBPATTERN" if not value[1] and not value[2]:
            return f"(?:{_in_rust(value[3])})"
        case "MAX_REPEAT" | "MIN_REPEAT":
            low, high, inner = value
            most = "" if str(high) == "MAXREPEAT" else high
            return f"(?:{_in_rust(inner)}){{{low},{most}}}"
        case "AT" if str(value) in _PLACES:
            return _PLACES[str(value)]
    raise _NotInRust


def _class_in_rust(name: str, value: Any) -> str:
    match name:
        case "NEGATE":
            return "^"
        case "LITERAL":
            return _code(value)
        case "RANGE":
            return f"{_code(value[0])}-{_code(value[1])}"
        case "CATEGORY" if str(value) in _CLASSES:
            return _CLASSES[str(value)]
    raise _NotInRust


def _code(code: int) -> str:
    return f"\\x{{{code:x}}}"


_PLACES: Final = {"AT_BEGINNING": r"\A", "AT_BEGINNING_STRING": r"\A", "AT_END_STRING": r"\z"}
# Python's white space has four control characters that Rust's white space lacks.
_CLASSES: Final = {"CATEGORY_SPACE": r"\s\x1c-\x1f", "CATEGORY_NOT_SPACE": r"[^\s\x1c-\x1f]"}
