"""Kinds of arguments that authors give their tools: from type hints, and from schemas as tool servers write them."""

from __future__ import annotations

import datetime
import decimal
import enum
import functools
import pathlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from runner.tools.tool import Tool

__all__ = ["KINDS", "kinds"]


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 101
    HIGH = 102


class Unit(enum.StrEnum):
    METRE = "metre"
    FOOT = "foot"


class Period(BaseModel):
    """A period of days."""

    begin: str = Field(description="The first day.")
    days: int = Field(1, ge=1, le=31)


class Place(BaseModel):
    name: str
    unit: Unit = Unit.METRE
    period: Period | None = None


class Trip(BaseModel):
    places: list[Place]
    notes: dict[str, str] = {}


class Node(BaseModel):
    value: int
    children: list[Node] = []


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    breed: str


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]


@dataclass
class Point:
    x: float
    y: float


class Options(TypedDict):
    depth: int
    follow: NotRequired[bool]


TYPED: Mapping[str, Any] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "str or null": str | None,
    "int or null": int | None,
    "bool or null": bool | None,
    "list of str": list[str],
    "list of int or null": list[int] | None,
    "list of lists": list[list[int]],
    "dict": dict[str, int],
    "dict of lists": dict[str, list[str]],
    "tuple": tuple[int, str],
    "tuple of any length": tuple[float, ...],
    "set": set[str],
    "literal": Literal["north", "south"],
    "literal of numbers": Literal[311, 312],
    "literal of both": Literal["auto", 313],
    "literal or null": Literal["north", "south"] | None,
    "literal of one": Literal["north"],
    "enum": Colour,
    "enum of numbers": Level,
    "enum of strings": Unit,
    "enum or null": Colour | None,
    "list of enum": list[Colour],
    "model": Period,
    "model or null": Period | None,
    "nested model": Place,
    "model of models": Trip,
    "recursive model": Node,
    "list of models": list[Period],
    "list of models or null": list[Period] | None,
    "dict of models": dict[str, Period],
    "dataclass": Point,
    "dataclass or null": Point | None,
    "list of dataclasses": list[Point],
    "typed dict": Options,
    "list of typed dicts": list[Options],
    "int or str": int | str,
    "int, str or null": int | str | None,
    "str or list of str": str | list[str],
    "model or str": Period | str,
    "union of models": Cat | Dog,
    "discriminated union": Pet,
    "list of a union": list[int | str],
    "datetime": datetime.datetime,
    "date or null": datetime.date | None,
    "uuid": uuid.UUID,
    "decimal": decimal.Decimal,
    "path": pathlib.Path,
    "constrained int": Annotated[int, Field(ge=0, le=9, description="A digit.")],
    "described str": Annotated[str, "What to look for."],
}

_SORT = {"type": "object", "properties": {"by": {"$ref": "#/definitions/By"}}, "required": ["by"]}
WRITTEN: Mapping[str, Any] = {
    "any of with null": {"anyOf": [{"type": "string", "enum": ["asc", "desc"]}, {"type": "null"}]},
    "one of objects": {
        "oneOf": [
            {"type": "object", "properties": {"url": {"type": "string"}}, "required": ["url"]},
            {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]},
        ]
    },
    "all of one reference": {"allOf": [{"$ref": "#/definitions/Sort"}], "description": "How to sort."},
    "types in a list": {"type": ["string", "null"], "enum": ["open", "closed", None]},
}
DEFINITIONS = {"Sort": _SORT, "By": {"type": "string", "enum": ["name", "size"]}}


@functools.cache
def kinds() -> Mapping[str, Mapping[str, Any]]:
    """Return a tool in OpenAI's form for each kind of argument, by the usual name of the kind."""
    return {
        **{name: _typed(hint) for name, hint in TYPED.items()},
        **{name: _written(each) for name, each in WRITTEN.items()},
    }


KINDS = (*TYPED, *WRITTEN)


def _typed(hint: Any) -> Mapping[str, Any]:
    def look(given: Any) -> None:
        """Look it up."""

    look.__annotations__ = {"given": hint}
    return Tool(look).as_openai()


def _written(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = {"type": "object", "properties": {"given": schema}, "required": ["given"], "definitions": DEFINITIONS}
    return Tool(lambda given: None, name="look", description="Look it up.", parameters=parameters).as_openai()
