"""Tools with a `TypedDict` of `typing` or of `typing_extensions`."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, Optional, Required

import pytest
import typing_extensions

from runner import Tool
from runner.errors import BadEnvironment
from runner.tools import typed_dicts


class Place(typing.TypedDict):
    """Somewhere."""

    town: str
    street: NotRequired[str]


class Partial(typing.TypedDict, total=False):
    town: Required[str]
    street: str


class Route(Place):
    stops: list[Place]
    back: Place | None


class OfExtensions(typing_extensions.TypedDict):
    town: str
    street: typing_extensions.NotRequired[str]


@dataclass
class Holder:
    place: Place


class Tree(typing.TypedDict):
    children: list[Tree]


def taking(hint: Any) -> Tool:
    def go(where: Any) -> str:
        """Go."""
        return str(where)

    go.__annotations__ = {"where": hint, "return": str}
    return Tool(go)


def schema_of(hint: Any) -> dict[str, Any]:
    return taking(hint).parameters


def place_in(schema: dict[str, Any], name: str = "Place") -> dict[str, Any]:
    found: dict[str, Any] = schema["$defs"][name]
    return found


@pytest.mark.parametrize("hint", [Place, Partial, OfExtensions])
def test_typed_dict_of_either_module_shows_required_keys(hint: Any) -> None:
    shown = place_in(schema_of(hint), hint.__name__)
    assert list(shown["properties"]) == ["town", "street"]
    assert shown["required"] == ["town"]


@pytest.mark.parametrize(
    "hint",
    [
        list[Place],
        dict[str, Place],
        tuple[Place, ...],
        Place | None,
        Optional[Place],  # noqa: UP045
        typing.List[Place],  # noqa: UP006
        Annotated[Place, "where to"],
        list[Place | int],
        dict[Literal["a", "b"], list[Place]],
    ],
)
def test_a_typed_dict_inside_other_types_is_shown(hint: Any) -> None:
    assert place_in(schema_of(hint))["required"] == ["town"]


def test_nested_typed_dict_is_shown_and_validated() -> None:
    tool = taking(Route)
    assert place_in(tool.parameters, "Route")["required"] == ["town", "stops", "back"]
    arguments = {"where": {"town": "Ulm", "stops": [{"town": "Bonn"}], "back": None}}
    assert tool.arguments(arguments) == arguments
    with pytest.raises(Exception, match="town"):
        tool.arguments({"where": {"stops": [{}], "back": None}})


def test_docstring_of_a_typed_dict_is_its_description() -> None:
    assert place_in(schema_of(Place))["description"] == "Somewhere."


@pytest.mark.skipif(not typed_dicts.IS_NEEDED, reason="this Python's own can be read everywhere")
@pytest.mark.parametrize("hint", [Holder, Tree])
def test_unreadable_typed_dict_is_refused_with_the_fix(hint: Any) -> None:
    with pytest.raises(BadEnvironment, match=r"below Python 3\.12, typing_extensions\.TypedDict"):
        schema_of(hint)


def test_types_without_typed_dicts_are_unchanged() -> None:
    for hint in (int, list[int], dict[str, int | None], Annotated[int, "x"], Literal["a"], Any):
        assert typed_dicts.with_readable_typed_dicts(hint) is hint
