"""xgrammar's EBNF: literals, classes of characters, texts without some marks, and rules that are written once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Final

__all__ = ["NOTHING", "Rules", "any_of", "either", "literal", "none_of", "text_without"]

NOTHING: Final = '""'


def literal(text: str) -> str:
    """`text` as an EBNF literal."""
    return '"' + "".join(_ESCAPES.get(char) or _char(char) for char in text) + '"'


def any_of(chars: str) -> str:
    """Any one of these characters."""
    return f"[{_class(chars)}]"


def none_of(chars: str, *, controls: bool = True) -> str:
    """Any one character but these; with `controls` False none of ASCII's control characters either."""
    return f"[^{_class(chars)}{'' if controls else _CONTROLS}]"


def text_without(marks: Iterable[str]) -> str:
    """A rule's body for any text in which none of `marks` stands.

    The library follows the marks with an automaton of its own, which compiles thirty times faster than the same one
    written as rules; it may only stand alone in a rule.
    """
    excluded = ", ".join(literal(mark) for mark in dict.fromkeys(marks))
    return f"TagDispatch(loop_after_dispatch=false, excludes=({excluded}))"


def either(choices: Iterable[str]) -> str:
    """An expression for any of `choices`, in parentheses where there are several."""
    different = list(dict.fromkeys(choices))
    return different[0] if len(different) == 1 else f"({' | '.join(different)})"


class Rules:
    """The rules of one grammar; equal ones are written once."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {}
        self._by_body: dict[str, str] = {}
        self._by_key: dict[Hashable, str] = {}
        self._counts = Counter[str]()

    def add(self, hint: str, body: str) -> str:
        """The name of a rule with this body."""
        if body not in self._by_body:
            self._by_body[body] = self._new_name(hint)
            self._bodies[self._by_body[body]] = body
        return self._by_body[body]

    def named(self, name: str, body: str) -> None:
        """Add a rule under a name that no hint has."""
        self._bodies[name] = body

    def recursive(self, key: Hashable, hint: str, body_of: Callable[[str], str]) -> str:
        """The name of the rule with this key, whose body may hold its own name: it is named before it is written."""
        if key not in self._by_key:
            name = self._by_key[key] = self._new_name(hint)
            self._bodies[name] = body_of(name)
        return self._by_key[key]

    def grammar(self, root: str) -> str:
        """The grammar's text, with `root` as what a whole turn must match."""
        return "\n".join(f"{name} ::= {body}" for name, body in {"root": root, **self._bodies}.items()) + "\n"

    def _new_name(self, hint: str) -> str:
        self._counts[hint] += 1
        name = f"{hint}{self._counts[hint]}"
        self._bodies[name] = ""
        return name


_ESCAPES: Final = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_CLASS_ESCAPES: Final = {"]": "\\]", "[": "\\[", "^": "\\^", "-": "\\-", "\\": "\\\\", "\n": "\\n"}
_CONTROLS: Final = "\\x00-\\x1f"


def _char(char: str) -> str:
    return char if char >= " " else f"\\x{ord(char):02x}"


def _class(chars: str) -> str:
    return "".join(_CLASS_ESCAPES.get(char) or _char(char) for char in dict.fromkeys(chars))
