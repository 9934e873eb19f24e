"""What a column and a table of the run file are: a name, its SQL, its meaning, and how values go in and come back."""

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
"""A row that was read, by column."""


def encode_text(text: str) -> str | bytes:
    """`text` for a column; bytes where it holds half a surrogate pair, which SQLite's text cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def decode_text(value: str | bytes) -> str:
    """What `encode_text` was given."""
    return value if isinstance(value, str) else value.decode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class Form:
    """How values of one kind are stored."""

    write: Callable[[Any], Any] | None = None
    """Makes the stored value; None where the value is stored as it is."""
    read: Callable[[Any], Any] | None = None
    """Makes the value again of what is stored."""
    part: str = ""
    """The attribute of the value that is stored in its stead, after a full stop; "" for the value itself."""


AS_IS: Final = Form()
TEXT: Final = Form(encode_text, decode_text)
JSON: Final = Form(encode_json, decode_json)
FLAG: Final = Form(int, bool)


def member_of(enumeration: type[Enum]) -> Form:
    """The form of an enum's members, which are stored by their values."""
    return Form(read=enumeration, part=".value")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the run file, whose value the writer gives; see `field` and `derived` for the others."""

    name: str
    """The name of the column in the file."""
    sql: str
    """The type of the column and its constraint."""
    meaning: str
    """What the column holds: a comment in the file's schema, and a line of docs/run-file.md."""
    form: Form = AS_IS
    """How the value is stored."""
    attribute: str = ""
    """The name under which the value is read back; "" where that is the name of the column."""
    path: str = ""
    """The attribute of an object that the value is made of, such as `task.id`; "" where the writer gives the value."""
    is_field: bool = False
    """Whether the value is given to the constructor when the object is made again."""
    arrow: str = ""
    """The type of the column in a Parquet export; "" where it is in none."""

    def read(self, row: Row) -> Any:
        """The value that a stored row has here."""
        stored, read = row[self.name], self.form.read
        return stored if read is None else read(stored)


def field(name: str, sql: str, meaning: str, form: Form = AS_IS, *, attribute: str = "", arrow: str = "") -> Column:
    """A column that holds a field of an object."""
    return Column(name, sql, meaning, form, attribute, (attribute or name) + form.part, True, arrow)


def derived(name: str, sql: str, meaning: str, path: str, form: Form = AS_IS, *, arrow: str = "") -> Column:
    """A column that is made of what an object has at `path`, and is not read back as a field."""
    return Column(name, sql, meaning, form, "", path, False, arrow)


def row_maker(columns: Sequence[Column]) -> Callable[[Any], list[Any]]:
    """A function that makes of an object what these columns store of it, in their order."""
    # One attrgetter takes all of them in C: this runs for every turn of a run.
    take = attrgetter(*(column.path for column in columns))
    writes = [(number, column.form.write) for number, column in enumerate(columns) if column.form.write]

    def make(owner: Any) -> list[Any]:
        row = list(take(owner))
        for number, write in writes:
            row[number] = write(row[number])
        return row

    return make


def read_fields(columns: Iterable[Column], row: Row) -> dict[str, Any]:
    """What `row` holds for the constructor of the object that it was made of."""
    return {column.attribute or column.name: column.read(row) for column in columns if column.is_field}


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A table of the run file."""

    name: str
    """The name of the table."""
    meaning: str
    """What one row is; a comment in the file's schema."""
    columns: tuple[Column, ...]
    """The columns, in the order in which rows are inserted."""
    key: str = ""
    """The constraint on several columns that makes its key; "" where one column is the key."""
    shared: bool = False
    """Whether many rows of other tables refer to one row of this one, so that it may be there already."""

    def create(self) -> str:
        """The statement that makes the table, with the meaning of each column as a comment."""
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
    return f'"{name}"'  # `end` is a word of SQL


@cache
def insertion(table: Table, count: int) -> str:
    """The statement that inserts `count` rows."""
    verb = "INSERT OR IGNORE" if table.shared else "INSERT"
    names = ", ".join(quoted(column.name) for column in table.columns)
    row = f"({', '.join('?' * len(table.columns))})"
    return f"{verb} INTO {table.name} ({names}) VALUES {', '.join([row] * count)}"
