"""Notations as grammar rules: the expressions for their literals and their strings."""

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
"""Characters that argument names must not contain, so that the end of a name is unambiguous."""

Strings = Callable[[Rules, str], str]
"""Function that adds the rules of a string and returns its expression; it receives the characters that may follow the
string.
"""


@dataclass(frozen=True)
class NotationDialect:
    """Form in which a notation writes values that may contain other values."""

    open_object: str
    colon: str
    """Text between a key and its value."""
    member: str
    """Text between two members of an object."""
    close_object: str
    open_list: str
    item: str
    """Text between two items of a list."""
    close_list: str
    string: Strings
    """Function that adds the rules of any string."""
    key: Strings
    """Function that adds the rules of any key of an object."""
    encode: Callable[[Any, int], str]
    """Function that returns the text of a value, given the value and the number of objects and lists around it."""
    indent: int | None = None
    """Spaces of indentation per level; None for one line."""
    margin: int = 0
    """Spaces of indentation of the line in which a value begins."""
    line_break: str = "\n"
    """Text of a line break between members."""
    sorted_keys: bool = False
    signs_are_tokens: bool = False
    """True if quotes and brackets may be control tokens of the vocabulary."""
    characters: Callable[[Rules], JsonCharacters] | None = None
    """Function that returns the writer of characters in JSON strings; None for notations without JSON strings."""
    other_key: Callable[[Rules, Collection[str]], str] | None = None
    """Function that returns an expression for any key except the given ones; None if the notation has no such rule."""
    free_space: bool = False
    """True if white space may follow punctuation, and precede closing brackets."""

    def line(self, depth: int) -> str:
        """Return the line break before a member at this depth; "" if everything is on one line."""
        return "" if self.indent is None else self.line_break + " " * (self.margin + self.indent * depth)

    @property
    def after_strings(self) -> str:
        """Characters that may follow a string inside an object or a list."""
        after = (self.colon, self.member, self.item, self.close_object, self.close_list)
        space = " \n" if self.free_space else "" if self.indent is None else self.line_break[:1]
        return "".join(text[:1] for text in after) + space

    def signs(self, rules: Rules, text: str) -> str:
        """Return the grammar expression for punctuation, such as a bracket; white space is optional if `free_space`."""
        if not self.free_space:
            return rules.written(text)
        rules.named("space", _SPACE_RULE)
        signs = text.strip()
        if signs in ("}", "]"):
            return f"space {literal(signs)}"
        return " space ".join(map(literal, signs)) + ("" if signs in ("{}", "[]") else " space")


_SPACE_RULE: Final = r'"" | " " | "\n" [ \t]{0,40}'
"""White space around punctuation: enough for compact and indented JSON. Without a limit, a model could fill a turn with
white space.
"""


@functools.cache
def free_json() -> NotationDialect:
    """Return the dialect of JSON on one line or indented."""
    return replace(_json(Json(item=",", key=":"), lambda text: text), free_space=True)


@functools.cache
def dialect_of(notation: Notation) -> NotationDialect | None:
    """Return the dialect of a notation; None for notations of plain text, which only write strings."""
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
    """Add the rules of a string in a notation of plain text, and return its expression.

    Raw strings, and text outside of CDATA, contain none of `ends`. HTML strings contain no unescaped HTML characters.
    """
    match notation:
        case Raw():
            return rules.add("text", text_without(ends))
        case Html():
            return rules.recursive(notation, "text", lambda name: _escaped_for_html(notation, name))
        case Cdata(signs):
            # A model may write text without CDATA if no character requires CDATA. The reader accepts both.
            marked = rules.add("marked", text_without(["]]>"]))
            unmarked = f"{none_of(signs)}*" if all(end[0] in signs for end in ends) else text_without(ends)
            bare = rules.add("bare", unmarked)
            return rules.add("text", f'{bare} | "<![CDATA[" {marked} "]]>"')


def _escaped_for_html(notation: Html, name: str) -> str:
    signs = "<>&" + ("\"'" if notation.quote else "")
    entities = ["lt;", "gt;", "amp;", *(["#34;", "#39;"] if notation.quote else [])]
    return f'{NOTHING} | {none_of(signs)} {name} | "&" {either(map(literal, entities))} {name}'


def _json(notation: Json, written: Callable[[str], str]) -> NotationDialect:
    """Return the dialect of JSON whose text is passed through `written`."""

    def string(rules: Rules, after: str) -> str:
        quote = literal(written('"'))
        key = ("json", notation.ascii, quote, after)
        rest = rules.recursive(key, "string", lambda name: _json_string(notation.ascii, written, name, after))
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


def _json_string(ascii_only: bool, written: Callable[[str], str], name: str, after: str) -> str:
    """Return the rule body after the opening quote of a string.

    The rule uses right recursion over a character class, as xgrammar's own JSON grammar does, so that token masks are
    computed when the grammar is compiled. For a star over a rule, xgrammar matches the whole vocabulary at every token.
    """
    plain = r"[ !#-\[\]-~]" if ascii_only else none_of('"\\', controls=False)
    backslash = literal(written("\\"))
    short = either([literal(written('"')), backslash, "[bfnrt]"])
    units = " | ".join(unit.format(backslash=backslash) for unit in ASCII_UNITS)
    unicode = units if ascii_only else '"u00" [01] [0-9a-f]'
    choices = f"{literal(written(chr(34)))} | {plain} {name} | {backslash} ({short} | {unicode}) {name}"
    return _looking_ahead(choices, after)


def _looking_ahead(choices: str, after: str) -> str:
    """Return `choices`, followed by a lookahead for one of the characters in `after`.

    The lookahead is omitted if `after` is "", which means that the characters after the string are unknown. With a
    lookahead, xgrammar decides at compilation about the tokens that cross the end of the string.
    """
    return f"({choices}) (= {any_of(after)})" if after else choices


_PYTHON_ESCAPE: Final = (
    r'"\\" ([\\nrt"' + r"'] | " + r'"x" [0-9a-f] [0-9a-f] | "u" ([0-9a-ce-f] [0-9a-f] | "d" [0-7]) [0-9a-f] [0-9a-f] '
    r'| "U000" [1-9a-f] [0-9a-f] [0-9a-f] [0-9a-f] [0-9a-f] | "U0010" [0-9a-f] [0-9a-f] [0-9a-f] [0-9a-f])'
)


def _python(rules: Rules, after: str) -> str:
    """Return an expression for a string in single or double quotes.

    `repr` chooses the quotes by the whole string, but a model may use either.
    """

    def rest(quote: str) -> str:
        def body(name: str) -> str:
            plain = none_of(quote + "\\", controls=False)
            return _looking_ahead(f"{literal(quote)} | {plain} {name} | {_PYTHON_ESCAPE} {name}", after)

        return rules.recursive(("python", quote, after), "string", body)

    return either(f"{literal(quote)} {rest(quote)}" for quote in "'\"")


def _nested(notation: Nested) -> NotationDialect:
    def string(rules: Rules, after: str) -> str:
        text = rules.add("text", text_without([notation.close_string]))
        return f"{rules.written(notation.open_string)} {text} {rules.written(notation.close_string)}"

    def key(rules: Rules, after: str) -> str:
        return f"{rules.written(notation.open_key)} {none_of(signs)}+ {rules.written(notation.close_key)}"

    def other_key(rules: Rules, names: Collection[str]) -> str:
        body = text_but(["", *names], rules, literal, lambda each: [character_class(each)], characters_but(signs))
        return f"{rules.written(notation.open_key)} {body} {rules.written(notation.close_key)}"

    # These characters would end a key, or could be confused with the text around it.
    signs = "".join(text[:1] for text in (notation.close_key + notation.colon, *_brackets(notation))) + _SPACE

    return NotationDialect(
        notation.open_object, notation.colon, notation.member, notation.close_object, notation.open_list,
        notation.item, notation.close_list, string, key, lambda value, _: notation.encode(value),
        sorted_keys=notation.sorted_keys, signs_are_tokens=True, other_key=other_key,
    )  # fmt: skip


def _brackets(notation: Nested) -> tuple[str, ...]:
    """Return the texts with which an unmarked key could be confused."""
    brackets = (notation.open_object, notation.close_object, notation.open_list, notation.close_list)
    return (*brackets, notation.member, notation.open_string)


_SPACE: Final = " \t\n\r"
