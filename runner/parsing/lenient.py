"""Literals of a format as patterns that forgive white space, since models stray there first."""

from __future__ import annotations

import functools
import re
from typing import Final

__all__ = ["FREE", "behind_key", "behind_raw", "lenient"]

_PARTS: Final = re.compile(r"<[^<>\s]*>?|\s+|\w+|[^\w\s]")
FREE: Final = r"\s*"


@functools.cache
def lenient(literal: str) -> str:
    """A pattern for `literal` with free white space in front of it, where it has some, and around tags.

    Between two words white space stays, as it is what tells them apart.
    """
    return (FREE if literal else "") + _body(literal)


def _body(literal: str) -> str:
    parts = _PARTS.findall(literal)
    pattern: list[str] = []
    for before, part, after in zip(["", *parts], parts, [*parts[1:], ""], strict=False):
        if part.isspace():
            pattern.append(r"\s+" if _is_word(before[-1:]) and _is_word(after[:1]) else FREE)
        else:
            beside_tag = bool(before) and (part.startswith("<") or before.endswith(">")) and not before.isspace()
            pattern.append((FREE if beside_tag else "") + re.escape(part))
    return "".join(pattern)


def _is_word(sign: str) -> bool:
    return sign.isalnum() or sign == "_"


@functools.cache
def behind_key(literal: str) -> str:
    """A pattern for what opens a raw value, which takes no more white space of the value than it has itself."""
    space = literal[len(literal.rstrip()) :]
    return lenient(literal.rstrip()) + _optional(space)


@functools.cache
def behind_raw(literal: str) -> str:
    """A pattern for what stands behind a raw value, which takes no more white space of the value than it has itself."""
    space = literal[: len(literal) - len(literal.lstrip())]
    return _optional(space) + _body(literal.lstrip())


def _optional(space: str) -> str:
    return f"(?:{re.escape(space)})?" if space else ""
