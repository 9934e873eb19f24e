"""The pythonic form of tool calls: `[add(a=17, b=25)]`, the last thing in a turn."""

from __future__ import annotations

import ast
import itertools
import json
import math
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from runner.messages import ToolCall
from runner.parsing.base import CallParameters, Signatures, ToolFormat
from runner.parsing.grammar import PYTHON, GrammarWriter, literal

__all__ = ["Pythonic"]

_NAME: Final = r"[A-Za-z_][A-Za-z0-9_.\-]*"
_OPENING: Final = re.compile(rf"\[\s*({_NAME})\(")
_HEAD: Final = re.compile(rf"\s*({_NAME})\(")
_KEYWORD: Final = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_\-]*)\s*=(?!=)")
_INTEGER: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")
_INTERESTING: Final = re.compile(r"""[\[\](){},"']""")
_STRING_END: Final = {
    '"': re.compile(r'[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL),
    "'": re.compile(r"[^'\\]*(?:\\.[^'\\]*)*'", re.DOTALL),
}
_CLOSES: Final = {"(": ")", "[": "]", "{": "}"}

DEEPEST: Final = 64
"""Levels of brackets that a call may have; Python's own parser gives up at about 100."""


class Pythonic(ToolFormat):
    """`[add(a=17, b=25)]` at the end of a turn, several calls with commas between, text before them.

    Brackets that hold no calls (`[1, 2]`, `[citation needed]`, a link) are content. So are calls of names that are no
    tool, unless all of their arguments are literals: those are answered with "no tool named".
    """

    name: ClassVar[str] = "pythonic"

    def render(self, calls: Sequence[ToolCall]) -> str:
        return f"[{', '.join(_rendered(call) for call in calls)}]"

    def _parse(self, text: str, parameters: CallParameters | None) -> tuple[str, list[ToolCall]]:
        position, openings, last = 0, _OPENING, len(text.rstrip())
        while (opening := openings.search(text, position)) is not None:
            known = parameters is None or opening[1] in parameters
            block = _Block(text, opening.start())
            if block.complete and block.end < last:
                position = block.end  # it is not the last thing in the turn
                continue
            calls = block.calls(parameters)
            if known or all(call.error is None for call in calls):
                return text[: opening.start()].strip(), calls
            if block.complete:
                position = block.end
            else:
                # From here on only names of tools count, so that no text is scanned more than twice.
                position, openings = opening.end(), _known_openings(parameters)
        return text, []

    def _grammar(self, signatures: Signatures, many: bool) -> str:
        writer = GrammarWriter(PYTHON)
        calls = [
            f'{literal(name + "(")} {writer.arguments_list(json.loads(schema))} ")"' for name, schema in signatures
        ]
        call = writer.rule("call", " | ".join(calls))
        return writer.finish(f'"[" {call} (", " {call})* "]"' if many else f'"[" {call} "]"')


def _known_openings(parameters: CallParameters | None) -> re.Pattern[str]:
    return re.compile(rf"\[\s*({'|'.join(map(re.escape, parameters or ()))})\(")


def _rendered(call: ToolCall) -> str:
    return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"


class _Unreadable(ValueError):
    """Text that opens a call and does not parse; says what is wrong."""


class _Block:
    """The bracketed list that begins at `start`, scanned once from left to right."""

    __slots__ = ("_items", "_text", "end", "error")

    def __init__(self, text: str, start: int) -> None:
        self._text = text
        # Of each item: where it begins, its commas between arguments, where it ends.
        self._items = [[start + 1]]
        self.end = len(text)
        """One past the closing bracket; the end of the text where the list is not closed."""
        self.error = self._scan(start)
        """Why the list is not complete; "" where it is."""

    @property
    def complete(self) -> bool:
        return not self.error

    def calls(self, parameters: CallParameters | None) -> list[ToolCall]:
        """One call per item; one that does not parse has its error, so has the last of a list that is not closed."""
        calls = [_read_call(self._text, cuts, parameters) for cuts in self._items[:-1]]
        if self.error:
            return [*calls, ToolCall("", _name_at(self._text, self._items[-1][0]), error=self.error)]
        return [*calls, _read_call(self._text, self._items[-1], parameters)]

    def _scan(self, start: int) -> str:
        text, position = self._text, start
        stack: list[str] = []
        while (match := _INTERESTING.search(text, position)) is not None:
            char, position = match[0], match.end()
            if char in _STRING_END:
                closing = _STRING_END[char].match(text, position)
                if closing is None:
                    return f"a string that begins with {char} is not closed"
                position = closing.end()
            elif char in _CLOSES:
                if len(stack) == DEEPEST:
                    return f"it is nested more than {DEEPEST} levels deep"
                stack.append(_CLOSES[char])
            elif char == ",":
                self._cut(match.start(), len(stack))
            elif stack.pop() != char:
                return f"a {char} does not close what was opened before it"
            if not stack:
                self._items[-1].append(match.start())
                self.end = position
                return ""
        return f"{''.join(reversed(stack))} is missing at its end"

    def _cut(self, position: int, depth: int) -> None:
        if depth <= 2:
            self._items[-1].append(position)
        if depth == 1:
            self._items.append([position + 1])


def _name_at(text: str, position: int) -> str:
    head = _HEAD.match(text, position)
    return head[1] if head else ""


def _read_call(text: str, cuts: Sequence[int], parameters: CallParameters | None) -> ToolCall:
    start, *commas, end = cuts
    head = _HEAD.match(text, start, end)
    if head is None:
        return ToolCall("", "", error=f"{text[start:end].strip()[:40]!r} is no call such as name(argument=value)")
    name = head[1]
    item = text[start:end].rstrip()
    try:
        if not item.endswith(")"):
            raise _Unreadable(f"{name}(...) must end with )")
        borders = [head.end(), *(comma + 1 for comma in commas), start + len(item)]
        pieces = [text[first : last - 1] for first, last in itertools.pairwise(borders)]
        known = None if parameters is None else parameters.get(name, _NUMBERED)
        return ToolCall("", name, _arguments(pieces, known))
    except _Unreadable as error:
        return ToolCall("", name, error=str(error))


class _Numbered(Sequence[str]):
    """Names for the positional arguments of a tool that is not there: the call is answered, not run."""

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: Any) -> Any:
        return str(index)


_NUMBERED: Final = _Numbered()


def _arguments(pieces: Sequence[str], names: Sequence[str] | None) -> dict[str, Any]:
    if not pieces[-1].strip():
        pieces = pieces[:-1]  # no arguments, or a comma after the last one
    arguments: dict[str, Any] = {}
    named = False
    for index, piece in enumerate(pieces):
        keyword = _KEYWORD.match(piece)
        if keyword is not None:
            named, name, value = True, keyword[1], piece[keyword.end() :]
        else:
            name, value = _positional_name(index, piece, named, names), piece
        if name in arguments:
            raise _Unreadable(f"{name} is given twice")
        arguments[name] = _value(value.strip(), name)
    return arguments


def _positional_name(index: int, piece: str, named: bool, names: Sequence[str] | None) -> str:
    shown = piece.strip()[:40]
    if not shown:
        raise _Unreadable("an argument is missing before a comma")
    if names is None or named:
        raise _Unreadable(f"the argument {shown} has no name: write name={shown}")
    if index >= len(names):
        raise _Unreadable(f"there are more arguments than the {len(names)} parameters")
    return names[index]


_KEYWORDS: Final = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_PLAIN_STRING: Final = re.compile(r"""'[^'\\\n]*'|"[^"\\\n]*\"""")


def _value(text: str, name: str) -> Any:
    """The value of a literal; the common kinds without a syntax tree."""
    if text in _KEYWORDS:
        return _KEYWORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _PLAIN_STRING.fullmatch(text):
        return text[1:-1]
    try:
        return _literal(_syntax_tree(text))
    except _Unreadable as error:
        raise _Unreadable(f"the value of {name} {error}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # No Python, a null character, too many digits, or operators past the depth of Python's parser.
        raise _Unreadable(f"the value of {name} is no literal") from None


def _syntax_tree(text: str) -> ast.expr:
    # Python warns of "\d"; a warning is for who wrote the code, and here that is the model.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text, mode="eval").body


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | None as value):
            return value
        case ast.Constant(value=float(value)) if math.isfinite(value):
            return value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as value)):
            if math.isinf(value):
                raise _Unreadable("is too large")
            return -value if isinstance(sign, ast.USub) else value
        case ast.Constant(value=float()):
            raise _Unreadable("is too large")
        case ast.Name(id=name) if name in _KEYWORDS:
            return _KEYWORDS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
        case _:
            raise _Unreadable("is no literal")


def _key(node: ast.expr | None) -> str:
    match node:
        case ast.Constant(value=str(key)):
            return key
        case ast.Constant(value=int(key)) if not isinstance(key, bool):
            return str(key)  # as JSON would have it
        case _:
            raise _Unreadable("has a key that is no string")
