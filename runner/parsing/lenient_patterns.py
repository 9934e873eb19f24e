"""Literals of a format as patterns that forgive white space, since models stray there first."""

from __future__ import annotations

import functools
import re
from typing import Final

__all__ = ["FREE", "behind_key", "behind_raw", "compiled", "free_once", "lenient", "searched", "squeezed"]

_PARTS: Final = re.compile(r"<[^<>\s]*>?|\s+|\w+|[^\w\s]")
FREE: Final = r"\s*"
_BRACKETS: Final = frozenset("()[]{}")
_FREE_TWICE: Final = re.compile(r"(?:\\s\*){2,}")


@functools.cache
def lenient(literal: str) -> str:
    """A pattern for `literal` with free white space in front of it, where it has some, around tags and in brackets.

    Between two words white space stays, as it is what tells them apart.
    """
    return (FREE if literal else "") + _body(literal)


def searched(literal: str) -> str:
    """A pattern by which `literal` is searched: the same without the white space in front of it.

    A search that begins with free white space takes the square of the longest run of it.
    """
    return _body(literal.lstrip())


@functools.cache
def compiled(pattern: str) -> re.Pattern[str]:
    """The pattern, as `free_once` has it, for those that a format has."""
    return re.compile(free_once(pattern))


def free_once(pattern: str) -> str:
    """What is free several times made free once, since it is tried in every way of sharing it out."""
    return _FREE_TWICE.sub(lambda _: FREE, pattern)


@functools.cache
def squeezed(literal: str) -> str:
    """The literal without its white space: where these differ, no text can be both of two literals."""
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
