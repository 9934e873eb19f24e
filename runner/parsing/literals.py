"""Reader of literals as models write them: JSON, or any mixture of JSON and Python."""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any, Final

__all__ = ["Unreadable", "after_space", "read_literal"]

MAX_DEPTH: Final = 200
"""Maximum depth of nested lists and objects that are not plain JSON. For JSON, Python's decoder has its own limit."""


class Unreadable(ValueError):
    """Text that cannot be read as a value; the message is a clause with the reason."""


def read_literal(text: str, start: int = 0) -> tuple[Any, int]:
    """Return the value at `start`, and the position after it.

    White space before the value is skipped. In addition to JSON, common deviations are accepted: `True` and `None`,
    single quotes, Python's escapes, line breaks in strings, tuples, keys without quotes, a plus before a number, and a
    trailing comma. Numbers that JSON does not allow are refused, since `007` and `1_2` may be meant as text.

    Raises:
        Unreadable: the text at `start` cannot be read as a value.
    """
    start = after_space(text, start)
    try:
        value, end = _SCANNER(text, start)
    except StopIteration:
        return _LiteralReader(text).value(start, 0)
    except json.JSONDecodeError:
        return _LiteralReader(text).value(start, 0)
    except RecursionError:
        raise Unreadable("it is nested too deeply") from None
    except ValueError as error:
        raise Unreadable(str(error)) from None
    if isinstance(value, int | float) and _IN_NUMBERS.match(text, end):
        return _LiteralReader(text).value(start, 0)
    return value, end


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:  # the number has more digits than Python converts
        raise ValueError(f"the number {text[:20]}... has too many digits") from None


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


# This is the standard library's decoder, since orjson turns integers of more than 64 bits into floats.
_DECODER: Final = json.JSONDecoder(parse_float=_finite, parse_int=_integer, parse_constant=_no_constant)
_SCANNER: Final = _DECODER.scan_once  # type: ignore[attr-defined]  # the type stubs lack it
_SPACE: Final = re.compile(r"\s*")
_IN_NUMBERS: Final = re.compile(r"[\d_.]")
_LIKE_A_NUMBER: Final = re.compile(r"[-+]?\.?\d(?:[eE][-+]|[\w.])*")
_NUMBER: Final = re.compile(r"[-+]?(?:0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?", re.ASCII)
_WORD: Final = re.compile(r"[A-Za-z_]\w*")
_WORDS: Final = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_PLAIN: Final = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_LOW_HALF: Final = re.compile(r"\\u(d[c-f][0-9a-f]{2})", re.IGNORECASE)
_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}
_HEX: Final = re.compile(r"[0-9a-fA-F]*")
_KEY: Final = re.compile(r"[\w.$-]+")


def after_space(text: str, at: int) -> int:
    """Return the position of the next character that is not white space."""
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]  # the pattern also matches the empty text


class _LiteralReader:
    """Reader of one value by recursive descent."""

    def __init__(self, text: str) -> None:
        self.text = text

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        at = after_space(self.text, at)
        sign = self.text[at : at + 1]
        if depth > MAX_DEPTH:
            raise Unreadable("it is nested too deeply")
        if sign == "{":
            return self._object(at, depth)
        if sign in ("[", "("):
            return self._list(at, depth)
        if sign in _PLAIN and sign:
            return self._string(at)
        word = _WORD.match(self.text, at)
        if word is not None and word[0] in _WORDS:
            return _WORDS[word[0]], word.end()
        return self._number(at)

    def _number(self, at: int) -> tuple[int | float, int]:
        like = _LIKE_A_NUMBER.match(self.text, at)
        if like is None:
            shown = self.text[at : at + 20].split("\n")[0]
            raise Unreadable(f"no value begins at {shown!r}" if shown else "it is missing")
        number = _NUMBER.fullmatch(like[0])
        if number is None:
            raise Unreadable(f"{like[0][:20]} is not a JSON number")
        try:
            whole = number[1] is None and number[2] is None
            return (_integer(number[0]) if whole else _finite(number[0])), number.end() + at
        except ValueError as error:
            raise Unreadable(str(error)) from None

    def _string(self, at: int) -> tuple[str, int]:
        quote, at = self.text[at], at + 1
        parts: list[str] = []
        while True:
            plain = _PLAIN[quote].match(self.text, at)
            assert plain is not None  # the pattern also matches the empty text
            parts.append(plain[0])
            at = plain.end()
            if at >= len(self.text):
                raise Unreadable("a string is not closed")
            if self.text[at] == quote:
                return "".join(parts), at + 1
            char, at = self._escape(at + 1)
            parts.append(char)

    def _escape(self, at: int) -> tuple[str, int]:
        char = self.text[at : at + 1]
        if char in _HEX_DIGITS:
            wanted = _HEX_DIGITS[char]
            digits = _HEX.match(self.text, at + 1, at + 1 + wanted)[0]  # type: ignore[index]  # it matches "" too
            after = at + 1 + wanted
            if len(digits) < wanted:
                raise Unreadable(f"\\{char} in a string needs {wanted} hexadecimal digits after it, but has {digits!r}")
            code = int(digits, 16)
            if (low := _LOW_HALF.match(self.text, after)) and 0xD800 <= code < 0xDC00:
                code = 0x10000 + (code - 0xD800 << 10) + int(low[1], 16) - 0xDC00
                after = low.end()
            if code > sys.maxunicode:
                raise Unreadable(f"\\{char}{digits} in a string is not a character")
            return chr(code), after
        # As in Python, the backslash of an unknown escape is kept.
        return _ESCAPES.get(char, char if char in "'\"\\/" else "\\" + char), at + 1

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        members: dict[str, Any] = {}
        at = after_space(self.text, at + 1)
        while not self.text.startswith("}", at):
            key, at = self._key(at)
            at = self._expect(":", at)
            members[key], at = self.value(at, depth + 1)
            at = self._comma("}", at)
        return members, at + 1

    def _key(self, at: int) -> tuple[str, int]:
        if self.text[at : at + 1] in _PLAIN and self.text[at : at + 1]:
            return self._string(at)
        word = _KEY.match(self.text, at)
        if word is None:
            raise Unreadable("a key is missing in an object" if at < len(self.text) else "an object is not closed")
        return word[0], word.end()

    def _list(self, at: int, depth: int) -> tuple[list[Any], int]:
        close = "]" if self.text[at] == "[" else ")"
        items: list[Any] = []
        at = after_space(self.text, at + 1)
        separated = False
        while not self.text.startswith(close, at):
            item, end = self.value(at, depth + 1)
            items.append(item)
            at = self._comma(close, end)
            separated = at > after_space(self.text, end)
        if close == ")" and len(items) == 1 and not separated:
            raise Unreadable("parentheses around one value are not a list")
        return items, at + 1

    def _comma(self, close: str, at: int) -> int:
        """Return the position after a comma, or the position of the close."""
        at = after_space(self.text, at)
        if self.text.startswith(close, at):
            return at
        return after_space(self.text, self._expect(",", at))

    def _expect(self, sign: str, at: int) -> int:
        at = after_space(self.text, at)
        if not self.text.startswith(sign, at):
            shown = self.text[at : at + 10].split("\n")[0]
            raise Unreadable(f"{sign!r} is missing before {shown!r}" if shown else f"{sign!r} is missing at the end")
        return at + 1
