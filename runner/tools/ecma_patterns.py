"""Translation of the regular expressions of JSON schemas (ECMA-262) to Python's `re`."""

from __future__ import annotations

import functools
import re
from typing import Final

__all__ = ["BadPattern", "python_pattern"]


class BadPattern(ValueError):
    """A pattern that Python cannot match; the message is a clause with the reason."""


@functools.lru_cache(maxsize=4096)
def python_pattern(pattern: str) -> re.Pattern[str]:
    r"""Return the compiled pattern: `\d` and `\w` are ASCII, `$` is the very end, groups are `(?P<name>...)`.

    Raises:
        BadPattern: Python has no such pattern, such as `[\p{L}]`.
    """
    parts: list[str] = []
    inside = False  # inside brackets
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
        return r"\[" if text == "[" else text
    return _OUTSIDE.get(text, text)
