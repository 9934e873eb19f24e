"""Notations: the known ways in which templates write a value, each able to write it and to say whether it is typed."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

__all__ = [
    "Cdata",
    "Html",
    "Json",
    "JsonText",
    "Nested",
    "Notation",
    "Python",
    "Raw",
    "ValueType",
    "members_in_order",
    "type_of",
]

ValueType: TypeAlias = Literal["string", "integer", "number", "boolean", "null", "array", "object"]
"""The types of JSON schema."""


def type_of(value: Any) -> ValueType:
    """The type of a value that came from JSON."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case int():
            return "integer"
        case float():
            return "number"
        case Mapping():
            return "object"
        case _:
            return "array"


def members_in_order(members: Mapping[str, Any], *, sorted_keys: bool) -> list[tuple[str, Any]]:
    """The members of an object in the order in which a template writes them; it sorts as jinja2's `dictsort` does."""
    return sorted(members.items(), key=lambda member: member[0].lower()) if sorted_keys else list(members.items())


@dataclass(frozen=True, slots=True)
class Json:
    """JSON with one spacing."""

    item: str = ", "
    """What stands between two members."""
    key: str = ": "
    """What stands between a key and its value."""
    ascii: bool = False
    """Whether other characters than ASCII's are written as escapes."""
    indent: int | None = None
    """By how many spaces what is inside is indented; None where it stands on one line."""
    margin: int = 0
    """The indentation of the line that a value begins in."""
    kind: Literal["json"] = "json"

    def encode(self, value: Any) -> str:
        """The text of `value`."""
        separators = (self.item, self.key)
        text = json.dumps(value, ensure_ascii=self.ascii, indent=self.indent, separators=separators)
        # No string holds a line break of its own.
        return text.replace("\n", "\n" + " " * self.margin) if self.indent is not None else text


@dataclass(frozen=True, slots=True)
class JsonText:
    """JSON inside a JSON string, as OpenAI's messages have arguments."""

    inner: Json
    """How the value itself is written."""
    kind: Literal["json_text"] = "json_text"

    def encode(self, value: Any) -> str:
        """The text of `value`."""
        return json.dumps(self.inner.encode(value), ensure_ascii=self.inner.ascii)


@dataclass(frozen=True, slots=True)
class Python:
    """Python's literals."""

    kind: Literal["python"] = "python"

    def encode(self, value: Any) -> str:
        """The text of `value`."""
        return repr(value)


@dataclass(frozen=True, slots=True)
class Raw:
    """A string as it is; what stands behind it ends it."""

    kind: Literal["raw"] = "raw"

    def encode(self, value: Any) -> str:
        """The text of `value`."""
        return str(value)


@dataclass(frozen=True, slots=True)
class Html:
    """A string with the signs of HTML written as entities."""

    quote: bool = True
    """Whether quotation marks are among them, as in jinja2's `escape`."""
    kind: Literal["html"] = "html"

    def encode(self, value: Any) -> str:
        """The text of `value`."""
        text = html.escape(str(value), quote=self.quote)
        return text.replace("&#x27;", "&#39;").replace("&quot;", "&#34;")


@dataclass(frozen=True, slots=True)
class Cdata:
    """A string as it is, inside `<![CDATA[` where it holds one of some signs."""

    signs: str
    """The signs that make it so."""
    kind: Literal["cdata"] = "cdata"

    def encode(self, value: Any) -> str:
        """The text of `value`."""
        text = str(value)
        return f"<![CDATA[{text}]]>" if any(sign in text for sign in self.signs) else text


@dataclass(frozen=True, slots=True)
class Nested:
    """A notation of a template's own, learnt from its renders: values inside each other, strings in marks."""

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
    open_string: str
    """The mark in front of a string."""
    close_string: str
    """The mark behind a string, which no string can hold."""
    open_key: str
    """The mark in front of a key; "" where keys stand bare."""
    close_key: str
    """The mark behind a key."""
    true: str
    """The word for true."""
    false: str
    """The word for false."""
    null: str
    """The word for null."""
    sorted_keys: bool = False
    """Whether members stand in the order of their keys."""
    kind: Literal["nested"] = "nested"

    def encode(self, value: Any) -> str:
        """The text of `value`."""
        match value:
            case None:
                return self.null
            case bool():
                return self.true if value else self.false
            case str():
                return f"{self.open_string}{value}{self.close_string}"
            case Mapping():
                members = (
                    f"{self.open_key}{key}{self.close_key}{self.colon}{self.encode(each)}"
                    for key, each in members_in_order(value, sorted_keys=self.sorted_keys)
                )
                return self.open_object + self.member.join(members) + self.close_object
            case list() | tuple():
                return self.open_list + self.item.join(map(self.encode, value)) + self.close_list
            case _:
                return str(value)


Notation: TypeAlias = Json | JsonText | Python | Raw | Html | Cdata | Nested

SPACINGS: Final = (
    Json(),
    Json(item=",", key=":"),
    Json(ascii=True),
    Json(item=",", key=":", ascii=True),
    Json(item=", ", key=":"),
    Json(item=",", key=": "),
)


def object_notations(before: str) -> list[Notation]:
    """The notations that an object may have, the likeliest first; `before` is the text in front of it."""
    line = before.rpartition("\n")[2]
    margin = len(line) - len(line.lstrip(" "))
    indented = [Json(item=",", indent=indent, margin=each) for indent in (2, 4, 1) for each in {margin, 0}]
    return [*SPACINGS, Python(), *indented]
