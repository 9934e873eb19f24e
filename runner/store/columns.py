"""Columns and tables of a run file: name, SQL, meaning, and conversion of values."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, Final, TypeAlias

from runner.store.json_values import decode_json, encode_json

__all__ = [
    "AS_IS",
    "FLAG",
    "JSON",
    "TEXT",
    "Column",
    "Form",
    "Row",
    "Table",
    "decode_text",
    "derived",
    "encode_text",
    "field",
    "insertion",
    "member_of",
    "read_fields",
    "row_maker",
]

Row: TypeAlias = sqlite3.Row | Mapping[str, Any]
"""A row that was read from the file: its values by column name."""


def encode_text(text: str) -> str | bytes:
    """The text for a column; bytes if it contains half of a surrogate pair, which SQLite cannot store as text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def decode_text(value: str | bytes) -> str:
    """Return the text from the value that `encode_text` returned."""
    return value if isinstance(value, str) else value.decode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class Form:
    """The conversion of values of one kind."""

    write: Callable[[Any], Any] | None = None
    """Function that converts a value for storage; None if it is stored unchanged."""
    read: Callable[[Any], Any] | None = None
    """Function that converts a stored value back; None if it is returned unchanged."""
    part: str = ""
    """The attribute that is stored instead of the value, with a leading dot; "" for the value itself."""


AS_IS: Final = Form()
TEXT: Final = Form(encode_text, decode_text)
JSON: Final = Form(encode_json, decode_json)
FLAG: Final = Form(int, bool)


def member_of(enumeration: type[Enum]) -> Form:
    """The form of enum members, which are stored as their values."""
    return Form(read=enumeration, part=".value")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the run file. The functions `field` and `derived` make columns of an object's attributes."""

    name: str
    sql: str
    """The type of the column and its constraint."""
    meaning: str
    """The meaning of the column: a comment in the file's schema, and a line of docs/run-file.md."""
    form: Form = AS_IS
    attribute: str = ""
    """The attribute that the value is read into; "" if it has the column's name."""
    path: str = ""
    """The attribute path of the source value, such as `task.id`; "" if the writer sets the value."""
    is_field: bool = False
    """True if the value is a constructor argument when the object is read."""
    arrow: str = ""
    """The Arrow type in a Parquet export; "" if it is not exported."""

    def read(self, row: Row) -> Any:
        """The value of this column in a stored row."""
        stored, read = row[self.name], self.form.read
        return stored if read is None else read(stored)


def field(name: str, sql: str, meaning: str, form: Form = AS_IS, *, attribute: str = "", arrow: str = "") -> Column:
    """A column that holds a field of an object."""
    return Column(name, sql, meaning, form, attribute, (attribute or name) + form.part, True, arrow)


def derived(name: str, sql: str, meaning: str, path: str, form: Form = AS_IS, *, arrow: str = "") -> Column:
    """A column whose value is computed from the attribute at `path`, and is not used when the object is read."""
    return Column(name, sql, meaning, form, "", path, False, arrow)


def row_maker(columns: Sequence[Column]) -> Callable[[Any], list[Any]]:
    """A function that returns the stored values of these columns for an object."""
    # One attrgetter reads all attributes in C, because this code runs for every turn.
    take = attrgetter(*(column.path for column in columns))
    writes = [(number, column.form.write) for number, column in enumerate(columns) if column.form.write]

    def make(owner: Any) -> list[Any]:
        row = list(take(owner))
        for number, write in writes:
            row[number] = write(row[number])
        return row

    return make


def read_fields(columns: Iterable[Column], row: Row) -> dict[str, Any]:
    """The constructor arguments of an object, by name: the values in `row` of the columns that are its fields."""
    return {column.attribute or column.name: column.read(row) for column in columns if column.is_field}


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A table of the run file."""

    name: str
    meaning: str
    """The meaning of one row: a comment in the file's schema."""
    columns: tuple[Column, ...]
    """The columns, in the order of the values of an inserted row."""
    key: str = ""
    """The SQL constraint if several columns form the primary key, such as "PRIMARY KEY (id, visit)"; otherwise ""."""
    shared: bool = False
    """True if several rows of other tables may refer to the same row. An existing row is then not inserted again."""

    def create(self) -> str:
        """The statement that creates the table, with the meaning of each column as a comment."""
        names, types = ([getattr(each, part) for each in self.columns] for part in ("name", "sql"))
        wide, wider = max(map(len, names)) + 2, max(map(len, types)) + 1
        last = self.columns[-1] if not self.key else None
        lines = [
            f"    {quoted(each.name):{wide}} {each.sql + ',' * (each is not last):{wider}} -- {each.meaning}"
            for each in self.columns
        ]
        key = [f"    {self.key}"] if self.key else []
        return "\n".join([f"CREATE TABLE {self.name} ( -- {self.meaning}", *lines, *key, ")"])


def quoted(name: str) -> str:
    return f'"{name}"'  # `end` is a keyword of SQL


@cache
def insertion(table: Table, count: int) -> str:
    """The statement that inserts `count` rows into a table."""
    verb = "INSERT OR IGNORE" if table.shared else "INSERT"
    names = ", ".join(quoted(column.name) for column in table.columns)
    row = f"({', '.join('?' * len(table.columns))})"
    return f"{verb} INTO {table.name} ({names}) VALUES {', '.join([row] * count)}"
