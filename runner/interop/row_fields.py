"""Fields of data set rows: paths, templates, and conditions."""

from __future__ import annotations

import enum
import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from runner.errors import BadOption

__all__ = ["Row", "RowCondition", "RowTemplate", "RowValueError"]

Row: TypeAlias = Mapping[str, Any]
"""One row of a data set: values by field name."""

_PATH: Final = re.compile(r"([^.\[\]]+)((?:\.[^.\[\]]+|\[\d+\])*)")
_STEP: Final = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_CONDITION: Final = re.compile(r"\s*([^=!<>~\s]+)\s*(==|!=|<=|>=|=|<|>|~)\s*(.*?)\s*", re.DOTALL)
_MEDIA_KEYS: Final = ({"bytes", "path"}, {"array", "path", "sampling_rate"})
"""Keys of the dicts that contain an image or a sound in Hugging Face data sets."""


class RowValueError(ValueError):
    """A field that is missing in a row, or whose value cannot be used. The message continues a text such as "row 3"."""


class ListFormat(enum.StrEnum):
    """Formats of a value in a template, written after a colon: "{choices:letters}"."""

    LETTERS = "letters"
    """A list of at most 26 items as lines "A. first", "B. second"."""
    LETTER = "letter"
    """A number as a letter: 0 is A."""
    LINES = "lines"
    """A list with one value per line."""


@dataclass(frozen=True, slots=True)
class _FieldPath:
    """The path of a value in a row, such as `choices.text[0]`."""

    text: str
    column: str
    steps: tuple[str | int, ...]

    @classmethod
    def of(cls, text: str) -> _FieldPath:
        found = _PATH.fullmatch(text)
        if found is None:
            raise BadOption(f"the field {text!r}: write a name, such as question, or a path, such as choices.text[0].")
        steps = tuple(name or int(number) for name, number in _STEP.findall(found[2]))
        return cls(text, found[1], steps)

    def value(self, row: Row) -> Any:
        if self.column not in row:
            raise RowValueError(f"has no field {self.column!r}; its fields are {', '.join(map(str, row)) or '(none)'}")
        value = row[self.column]
        for step in self.steps:
            try:
                value = value[step]
            except (LookupError, TypeError):
                raise RowValueError(f"has no {self.text!r}: {step!r} is not in {value!r:.60}") from None
        if _is_media(value):
            raise RowValueError(f"has an image or sound in {self.text!r}: only text is supported; leave the row out")
        if value is None:
            raise RowValueError(f"has no value (null) in {self.text!r}")
        return value


def _is_media(value: Any) -> bool:
    if isinstance(value, bytes | bytearray):
        return True
    if isinstance(value, Mapping):
        return set(value) in _MEDIA_KEYS
    return type(value).__module__.split(".")[0] in ("PIL", "torchcodec", "torchvision")


@dataclass(frozen=True, slots=True)
class RowTemplate:
    """A text with fields in braces, such as "{question}"; a text without braces is the name of one field."""

    text: str
    columns: frozenset[str]
    """The names of the fields that the template reads."""
    _parts: tuple[tuple[str, _FieldPath | None, ListFormat | None], ...]

    @classmethod
    def of(cls, text: str, option: str) -> RowTemplate:
        """Parse the template of an option; `option` is the option's name, for errors.

        Raises:
            BadOption: the text is empty or not a template. The message names the option or the invalid field.
        """
        if not isinstance(text, str) or not text:
            raise BadOption(f"{option}={text!r:.60}: give a field's name, or a string such as '{{question}}'.")
        if "{" not in text and "}" not in text:
            path = _FieldPath.of(text)
            return cls(text, frozenset({path.column}), (("", path, None),))
        try:
            parsed = list(string.Formatter().parse(text))
        except ValueError as error:
            raise BadOption(f"{option}={text!r:.60}: {error}; write {{{{ for a brace.") from None
        parts = tuple((before, *_placeholder(name, form, text, option)) for before, name, form, _ in parsed)
        return cls(text, frozenset(path.column for _, path, _ in parts if path is not None), parts)

    def __call__(self, row: Row) -> str:
        """Return the text for a row.

        Raises:
            RowValueError: a field is missing or null, is an image or sound, or does not fit its format.
        """
        return "".join(
            before + ("" if path is None else _as_text(path.value(row), form, path.text))
            for before, path, form in self._parts
        )

    def value(self, row: Row) -> Any:
        """Return the value of the field if the template is one field without a format, else the text.

        Raises:
            RowValueError: as in `__call__`.
        """
        if len(self._parts) == 1 and not self._parts[0][0] and self._parts[0][2] is None:
            path = self._parts[0][1]
            assert path is not None, "an empty text is refused"
            return path.value(row)
        return self(row)


def _placeholder(
    name: str | None, form: str | None, text: str, option: str
) -> tuple[_FieldPath | None, ListFormat | None]:
    if name is None:
        return None, None
    if not name:
        raise BadOption(f"{option}={text!r:.60}: name a field between the braces, such as {{question}}.")
    if form and form not in list(ListFormat):
        raise BadOption(f"{option}={text!r:.60}: the format {form!r} is unknown: give {', '.join(ListFormat)}.")
    return _FieldPath.of(name), ListFormat(form) if form else None


def _as_text(value: Any, form: ListFormat | None, name: str) -> str:
    if form is ListFormat.LETTER:
        if not isinstance(value, int) or not 0 <= value < len(string.ascii_uppercase):
            raise RowValueError(
                f"has {value!r:.60} in {name!r}, which is not a number from 0 to 25: leave its format out"
            )
        return string.ascii_uppercase[value]
    if form is not None:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise RowValueError(f"has {value!r:.60} in {name!r}, which is not a list: leave its format out")
        if form is ListFormat.LINES:
            return "\n".join(_plain(each) for each in value)
        if len(value) > len(string.ascii_uppercase):
            raise RowValueError(f"has {len(value)} items in {name!r}, more than 26 letters: use the format lines")
        return "\n".join(
            f"{letter}. {_plain(each)}" for letter, each in zip(string.ascii_uppercase, value, strict=False)
        )
    return _plain(value)


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping | list | tuple | bool):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


_ORDER: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "<": lambda value, other: value < other,
    "<=": lambda value, other: value <= other,
    ">": lambda value, other: value > other,
    ">=": lambda value, other: value >= other,
}


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class RowCondition:
    """A condition on a row: FIELD, one of = != < <= > >= ~, and a value. ~ searches for a regular expression."""

    text: str
    _path: _FieldPath
    _operator: str
    _value: Any = field(repr=False)

    @classmethod
    def of(cls, text: str) -> RowCondition:
        """Parse a condition.

        Raises:
            BadOption: the text is not a condition, or its regular expression is invalid.
        """
        found = _CONDITION.fullmatch(text)
        if found is None:
            raise BadOption(f"--where {text!r:.60}: write a field, one of = != < <= > >= ~, and a value: level>=4.")
        operator, value = found[2], found[3]
        if operator == "~":
            try:
                return cls(text, _FieldPath.of(found[1]), operator, re.compile(value))
            except re.error as error:
                raise BadOption(f"--where {text!r:.60}: not a regular expression ({error}): correct it.") from None
        return cls(text, _FieldPath.of(found[1]), "=" if operator == "==" else operator, value)

    @property
    def column(self) -> str:
        return self._path.column

    def holds(self, row: Row) -> bool:
        """Return True if the row fulfils the condition.

        A column that is null fulfils only `!=`. An empty text is neither above nor below a number.

        Raises:
            RowValueError: the field is missing, is an image or sound, or cannot be compared with the value of the
                condition; or a value inside a column, such as `choices.text[0]`, is null.
        """
        if self._path.column in row and row[self._path.column] is None:
            return self._operator == "!="
        value = self._path.value(row)
        if self._operator == "~":
            return self._value.search(_plain(value)) is not None
        if self._operator in _ORDER:
            found, wanted = self._ordered(value)
            return found is not None and _ORDER[self._operator](found, wanted)
        return self._equals(value) == (self._operator == "=")

    def _ordered(self, value: Any) -> tuple[Any, Any]:
        """Return the row's value and the condition's value: as numbers if the condition's is a number, else as texts.

        A text with a number, as in CSV files, counts as a number. An empty text of the row becomes None.

        Raises:
            RowValueError: only one of the values is a number.
        """
        wanted = _number(self._value)
        if wanted is None:
            if isinstance(value, int | float):
                raise RowValueError(
                    f"has a number in {self._path.text!r}, compared with {self._value!r}: compare it with a number"
                )
            return _plain(value), self._value
        found = _number(value)
        if found is None and value != "":
            raise RowValueError(
                f"has {_plain(value)!r:.60} in {self._path.text!r}, compared with a number: compare it with a string"
            )
        return found, wanted

    def _equals(self, value: Any) -> bool:
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                return float(value) == float(self._value)
            except ValueError:
                return False
        return str(self._value) == _plain(value)
