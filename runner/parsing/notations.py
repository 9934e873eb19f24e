"""Notations: the ways in which templates write a value."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from runner.tools.value_shapes import kind_of

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
"""Types of JSON schema."""


def type_of(value: Any) -> ValueType:
    """Return the type of a value that was read from JSON."""
    kind = kind_of(value)
    return "integer" if kind == "number" and isinstance(value, int) else kind


def members_in_order(members: Mapping[str, Any], *, sorted_keys: bool) -> list[tuple[str, Any]]:
    """Return the members of an object in the order in which the template writes them.

    With `sorted_keys`, they are sorted by key without regard to case, as in jinja2's `dictsort`; else unchanged.
    """
    return sorted(members.items(), key=lambda member: member[0].lower()) if sorted_keys else list(members.items())


@dataclass(frozen=True, slots=True)
class Json:
    """JSON with fixed separators."""

    item: str = ", "
    """Text between two members of an object, or two items of a list. If `indent` is set, a line break follows."""
    key: str = ": "
    """Text between a key and its value."""
    ascii: bool = False
    """True if characters outside ASCII are written as escapes."""
    indent: int | None = None
    """Spaces of indentation per level; None for one line."""
    margin: int = 0
    """Spaces of indentation of the line in which a value begins."""
    kind: Literal["json"] = "json"

    def encode(self, value: Any) -> str:
        separators = (self.item, self.key)
        text = json.dumps(value, ensure_ascii=self.ascii, indent=self.indent, separators=separators)
        # Each line break is between members, since JSON strings contain no raw line breaks.
        return text.replace("\n", "\n" + " " * self.margin) if self.indent is not None else text


@dataclass(frozen=True, slots=True)
class JsonText:
    """JSON inside a JSON string, like the arguments in OpenAI's messages."""

    inner: Json
    """Notation of the value itself."""
    kind: Literal["json_text"] = "json_text"

    def encode(self, value: Any) -> str:
        return json.dumps(self.inner.encode(value), ensure_ascii=self.inner.ascii)


@dataclass(frozen=True, slots=True)
class Python:
    """Python literals."""

    kind: Literal["python"] = "python"

    def encode(self, value: Any) -> str:
        return repr(value)


@dataclass(frozen=True, slots=True)
class Raw:
    """A string without quotes or escapes. It ends where the text that follows a value begins."""

    kind: Literal["raw"] = "raw"

    def encode(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class Html:
    """A string whose HTML characters are written as entities."""

    quote: bool = True
    """True if quotation marks are escaped too, as in jinja2's `escape`."""
    kind: Literal["html"] = "html"

    def encode(self, value: Any) -> str:
        text = html.escape(str(value), quote=self.quote)
        return text.replace("&#x27;", "&#39;").replace("&quot;", "&#34;")


@dataclass(frozen=True, slots=True)
class Cdata:
    """A string without escapes, between `<![CDATA[` and `]]>` if it contains one of `signs`."""

    signs: str
    """Characters that require CDATA."""
    kind: Literal["cdata"] = "cdata"

    def encode(self, value: Any) -> str:
        text = str(value)
        return f"<![CDATA[{text}]]>" if any(sign in text for sign in self.signs) else text


@dataclass(frozen=True, slots=True)
class Nested:
    """A notation learnt from renders: nested values, with marks around strings."""

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
    open_string: str
    """Mark before a string."""
    close_string: str
    """Mark after a string; strings cannot contain it."""
    open_key: str
    """Mark before a key; "" for unmarked keys."""
    close_key: str
    true: str
    false: str
    null: str
    sorted_keys: bool = False
    kind: Literal["nested"] = "nested"

    def encode(self, value: Any) -> str:
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
    """Return the possible notations of an object, the most common first. `before` is the text before the object."""
    line = before.rpartition("\n")[2]
    margin = len(line) - len(line.lstrip(" "))
    indented = [Json(item=",", indent=indent, margin=each) for indent in (2, 4, 1) for each in {margin, 0}]
    return [*SPACINGS, Python(), *indented]
