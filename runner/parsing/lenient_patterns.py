"""Regular expressions that match a format's literals even if the white space differs.

Models deviate from a format in white space more often than in anything else.
"""

from __future__ import annotations

import functools
import re
from typing import Final

__all__ = [
    "FREE",
    "after_key",
    "after_raw",
    "compiled",
    "lenient",
    "merge_optional_space",
    "search_pattern",
    "without_space",
]

_PARTS: Final = re.compile(r"<[^<>\s]*>?|\s+|\w+|[^\w\s]")
FREE: Final = r"\s*"
_BRACKETS: Final = frozenset("()[]{}")
_FREE_TWICE: Final = re.compile(r"(?:\\s\*){2,}")


@functools.cache
def lenient(literal: str) -> str:
    """Return a pattern for `literal` that accepts other white space.

    White space is optional before the literal, at each white space of the literal, around tags, and between brackets.
    Between two words it is required, since it separates them.
    """
    return (FREE if literal else "") + _body(literal)


def search_pattern(literal: str) -> str:
    """Return the lenient pattern for a search for `literal`, without white space before it.

    A search for a pattern that begins with optional white space takes quadratic time in a run of white space.
    """
    return _body(literal.lstrip())


@functools.cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern after `merge_optional_space`. Compiled patterns are cached."""
    return re.compile(merge_optional_space(pattern))


def merge_optional_space(pattern: str) -> str:
    """Merge adjacent patterns of optional white space, since `re` tries every way to divide white space among them."""
    return _FREE_TWICE.sub(lambda _: FREE, pattern)


@functools.cache
def without_space(literal: str) -> str:
    """Return the literal without white space. If two literals differ in this form, no text matches both."""
    return "".join(literal.split())


def _body(literal: str) -> str:
    parts = _PARTS.findall(literal)
    pattern: list[str] = []
    for before, part, after in zip(["", *parts], parts, [*parts[1:], ""], strict=False):
        if part.isspace():
            pattern.append(r"\s+" if _is_word(before[-1:]) and _is_word(after[:1]) else FREE)
        else:
            beside_tag = bool(before) and (part.startswith("<") or before.endswith(">")) and not before.isspace()
            brackets = before in _BRACKETS and part in _BRACKETS
            pattern.append((FREE if beside_tag or brackets else "") + re.escape(part))
    return "".join(pattern)


def _is_word(sign: str) -> bool:
    return sign.isalnum() or sign == "_"


@functools.cache
def after_key(literal: str) -> str:
    """Return a pattern for the text before an unquoted value. White space of the value itself does not match."""
    space = literal[len(literal.rstrip()) :]
    return lenient(literal.rstrip()) + _optional(space)


@functools.cache
def after_raw(literal: str) -> str:
    """Return a pattern for the text after an unquoted value. White space of the value itself does not match."""
    space = literal[: len(literal) - len(literal.lstrip())]
    return _optional(space) + _body(literal.lstrip())


def _optional(space: str) -> str:
    return f"(?:{re.escape(space)})?" if space else ""
