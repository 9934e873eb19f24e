"""Dialects: notations as grammars see them, each literal and each kind of string as it stands in a turn's text."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Final

from runner.parsing.ebnf import NOTHING, Rules, any_of, either, literal, none_of, text_without
from runner.parsing.notations import Cdata, Html, Json, JsonText, Nested, Notation, Python, Raw
from runner.parsing.string_rules import ASCII_UNITS, JsonCharacters, character_class, characters_but, text_but

__all__ = ["NOT_IN_KEYS", "NotationDialect", "dialect_of", "free_json", "plain_text"]

NOT_IN_KEYS: Final = " \t\n\r<>{}()[]\"'`,=|"
"""What no name of an argument has, so that one can be told from what stands behind it."""

Strings = Callable[[Rules, str], str]
"""Adds the rules of a string and gives the expression for it; takes the characters that may stand behind one."""


@dataclass(frozen=True)
class NotationDialect:
    """How a notation writes values that may hold others."""

    open_object: str
    """The begin of an object."""
    colon: str
    """The text between a key and its value."""
    member: str
    """The text between two members of an object."""
    close_object: str
    """The end of an object."""
    open_list: str
    """The begin of a list."""
    item: str
    """The text between two items of a list."""
    close_list: str
    """The end of a list."""
    string: Strings
    """Any string."""
    key: Strings
    """Any key of an object."""
    encode: Callable[[Any, int], str]
    """The text of a value that stands inside as many objects and lists as the second argument says."""
    indent: int | None = None
    """By how many spaces what is inside is indented."""
    margin: int = 0
    """The indentation of the line that a value begins in."""
    line_break: str = "\n"
    """How a line break between members is written."""
    sorted_keys: bool = False
    """Whether members stand in the order of their keys."""
    signs_are_tokens: bool = False
    """Whether a vocabulary may have control tokens for quotes and brackets."""
    characters: Callable[[Rules], JsonCharacters] | None = None
    """What writes single characters of a string in JSON's quotes; None where strings are written otherwise."""
    other_key: Callable[[Rules, Collection[str]], str] | None = None
    """Any key but these; None where none can be told from others."""
    free_space: bool = False
    """Whether white space may stand behind signs, and in front of those that close."""

    def line(self, depth: int) -> str:
        """The line break in front of what stands at this depth; "" where all is on one line."""
        return "" if self.indent is None else self.line_break + " " * (self.margin + self.indent * depth)

    @property
    def behind_strings(self) -> str:
        """The characters that may stand behind a string inside of an object or a list."""
        behind = (self.colon, self.member, self.item, self.close_object, self.close_list)
        space = " \n" if self.free_space else "" if self.indent is None else self.line_break[:1]
        return "".join(text[:1] for text in behind) + space

    def signs(self, rules: Rules, text: str) -> str:
        """An expression for signs of the notation, such as a bracket or what stands between members."""
        if not self.free_space:
            return rules.written(text)
        rules.named("space", _SPACE_RULE)
        signs = text.strip()
        if signs in ("}", "]"):
            return f"space {literal(signs)}"
        return " space ".join(map(literal, signs)) + ("" if signs in ("{}", "[]") else " space")


_SPACE_RULE: Final = r'"" | " " | "\n" [ \t]{0,40}'
"""Enough for JSON on one line, or indented; a model could spend a turn on more."""


@functools.cache
def free_json() -> NotationDialect:
    """JSON on one line or indented, as a model likes it."""
    return replace(_json(Json(item=",", key=":"), lambda text: text), free_space=True)


@functools.cache
def dialect_of(notation: Notation) -> NotationDialect | None:
    """The dialect of a notation; None for those of plain text, which only strings have."""
    match notation:
        case Json():
            return _json(notation, lambda text: text)
        case JsonText(inner):
            return _json(inner, lambda text: json.dumps(text, ensure_ascii=False)[1:-1])
        case Python():
            return NotationDialect("{", ": ", ", ", "}", "[", ", ", "]", _python, _python, lambda value, _: repr(value))
        case Nested():
            return _nested(notation)
        case _:
            return None


def plain_text(notation: Raw | Html | Cdata, rules: Rules, ends: tuple[str, ...]) -> str:
    """Adds the rules of any string in one of the notations of plain text, in which none of `ends` stands."""
    match notation:
        case Raw():
            return rules.add("text", text_without(ends))
        case Html():
            return rules.recursive(notation, "text", lambda name: _escaped_for_html(notation, name))
        case Cdata(signs):
            # Marked text may be free of the signs that make a template mark it: it reads the same.
            marked = rules.add("marked", text_without(["]]>"]))
            unmarked = f"{none_of(signs)}*" if all(end[0] in signs for end in ends) else text_without(ends)
            bare = rules.add("bare", unmarked)
            return rules.add("text", f'{bare} | "<![CDATA[" {marked} "]]>"')


def _escaped_for_html(notation: Html, name: str) -> str:
    signs = "<>&" + ("\"'" if notation.quote else "")
    entities = ["lt;", "gt;", "amp;", *(["#34;", "#39;"] if notation.quote else [])]
    return f'{NOTHING} | {none_of(signs)} {name} | "&" {either(map(literal, entities))} {name}'


def _json(notation: Json, written: Callable[[str], str]) -> NotationDialect:
    """JSON whose text is passed through `written` before it stands in the turn."""

    def string(rules: Rules, behind: str) -> str:
        quote = literal(written('"'))
        key = ("json", notation.ascii, quote, behind)
        rest = rules.recursive(key, "string", lambda name: _json_string(notation.ascii, written, name, behind))
        return f"{quote} {rest}"

    def characters(rules: Rules) -> JsonCharacters:
        return JsonCharacters(rules, ascii_only=notation.ascii, written=written)

    def other_key(rules: Rules, names: Collection[str]) -> str:
        quote = literal(written('"'))
        return f"{quote} {characters(rules).but(names)} {quote}"

    def encode(value: Any, depth: int) -> str:
        if notation.indent is None:
            return written(notation.encode(value))
        margin = notation.margin + notation.indent * depth
        return written(Json(notation.item, notation.key, notation.ascii, notation.indent, margin).encode(value))

    item, key = notation.item, notation.key
    return NotationDialect(
        "{", key, item, "}", "[", item, "]", string, string, encode,
        indent=notation.indent, margin=notation.margin, line_break=written("\n"),
        characters=characters, other_key=other_key,
    )  # fmt: skip


def _json_string(ascii_only: bool, written: Callable[[str], str], name: str, behind: str) -> str:
    """What stands behind the opening quote of a string.

    Right recursion over a class of characters, as in xgrammar's own JSON: its masks are ready when the grammar is
    compiled. Of a star over a rule the library would match the whole vocabulary at every id.
    """
    plain = r"[ !#-\[\]-~]" if ascii_only else none_of('"\\', controls=False)
    backslash = literal(written("\\"))
    short = either([literal(written('"')), backslash, "[bfnrt]"])
    units = " | ".join(unit.format(backslash=backslash) for unit in ASCII_UNITS)
    unicode = units if ascii_only else '"u00" [01] [0-9a-f]'
    choices = f"{literal(written(chr(34)))} | {plain} {name} | {backslash} ({short} | {unicode}) {name}"
    return _looking_ahead(choices, behind)


def _looking_ahead(choices: str, behind: str) -> str:
    """Told what stands behind a string, the library sorts the ids that go past its end when it compiles, not later."""
    return f"({choices}) (= {any_of(behind)})" if behind else choices


_PYTHON_ESCAPE: Final = (
    r'"\\" ([\\nrt"' + r"'] | " + r'"x" [0-9a-f] [0-9a-f] | "u" ([0-9a-ce-f] [0-9a-f] | "d" [0-7]) [0-9a-f] [0-9a-f] '
    r'| "U000" [1-9a-f] [0-9a-f] [0-9a-f] [0-9a-f] [0-9a-f] | "U0010" [0-9a-f] [0-9a-f] [0-9a-f] [0-9a-f])'
)


def _python(rules: Rules, behind: str) -> str:
    """A string in either quotes: which ones `repr` takes is told by all of the string, so a model may take both."""

    def rest(quote: str) -> str:
        def body(name: str) -> str:
            plain = none_of(quote + "\\", controls=False)
            return _looking_ahead(f"{literal(quote)} | {plain} {name} | {_PYTHON_ESCAPE} {name}", behind)

        return rules.recursive(("python", quote, behind), "string", body)

    return either(f"{literal(quote)} {rest(quote)}" for quote in "'\"")


def _nested(notation: Nested) -> NotationDialect:
    def string(rules: Rules, behind: str) -> str:
        text = rules.add("text", text_without([notation.close_string]))
        return f"{rules.written(notation.open_string)} {text} {rules.written(notation.close_string)}"

    def key(rules: Rules, behind: str) -> str:
        return f"{rules.written(notation.open_key)} {none_of(signs)}+ {rules.written(notation.close_key)}"

    def other_key(rules: Rules, names: Collection[str]) -> str:
        body = text_but(["", *names], rules, literal, lambda each: [character_class(each)], characters_but(signs))
        return f"{rules.written(notation.open_key)} {body} {rules.written(notation.close_key)}"

    # What would end a key, or be confused with what stands around it.
    signs = "".join(text[:1] for text in (notation.close_key + notation.colon, *_brackets(notation))) + _SPACE

    return NotationDialect(
        notation.open_object, notation.colon, notation.member, notation.close_object, notation.open_list,
        notation.item, notation.close_list, string, key, lambda value, _: notation.encode(value),
        sorted_keys=notation.sorted_keys, signs_are_tokens=True, other_key=other_key,
    )  # fmt: skip


def _brackets(notation: Nested) -> tuple[str, ...]:
    """What a key that stands without marks would be confused with."""
    brackets = (notation.open_object, notation.close_object, notation.open_list, notation.close_list)
    return (*brackets, notation.member, notation.open_string)


_SPACE: Final = " \t\n\r"
