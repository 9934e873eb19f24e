"""Tools from a function and a JSON schema: the call of the function, and refused definitions."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from runner import Conversation, Outcome, Tool
from runner.errors import BadEnvironment
from runner.testing import call
from tests.playing import Plain, play

BOOK = {"type": "object", "properties": {"name": {"type": "string"}, "self": {"type": "integer"}}}


class Server:
    """Tools of a third party, called by name."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{name} {dict(arguments)}"

    def spread(self, name: str, **arguments: Any) -> str:
        return f"{name} {arguments}"

    def one(self, name: str) -> str:
        return name


def book(call: Callable[..., Any], **options: Any) -> Tool:
    return Tool(call, name="book", description="Book a room.", parameters=BOOK, **options)


@pytest.mark.anyio
async def test_raw_tool_gets_one_mapping_with_any_names() -> None:
    class Hotel(Plain):
        def setup(self) -> None:
            self.tools.append(book(partial(Server().call, "book"), raw=True))

    trajectory = await play(Hotel, [call("book", name="Ada", self=1), "Done"])
    assert trajectory.messages[-2]["content"] == "book {'name': 'Ada', 'self': 1}"


def test_raw_tool_validates_arguments() -> None:
    tool = book(partial(Server().call, "book"), raw=True)
    assert (tool.is_async, tool.arguments({"name": "Ada"})) == (True, {"name": "Ada"})
    with pytest.raises(Exception, match=r"name must be a string, got 3\."):
        tool.arguments({"name": 3})


def test_unchecked_tool_passes_arguments_that_break_the_schema() -> None:
    tool = book(partial(Server().call, "book"), raw=True, checked=False)
    assert tool.arguments({"name": 3}) == {"name": 3}
    assert tool.as_openai()["function"]["parameters"] == BOOK


@pytest.mark.parametrize(
    "function",
    [partial(Server().spread, "book"), Server().spread, Server().one, lambda name: name],
    ids=["filled already", "would fill self", "lacks one", "lacks one too"],
)
def test_function_that_cannot_take_its_arguments_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(BadEnvironment, match=r"Tool book: .*'(name|self)'.*give raw=True"):
        book(function)


@pytest.mark.parametrize("make", [Tool, book])
def test_function_without_a_signature_is_refused(make: Callable[..., Tool]) -> None:
    with pytest.raises(BadEnvironment, match=r"no signature .*: write a function with parameters that calls it"):
        make(max)


def test_raw_without_a_schema_is_refused() -> None:
    with pytest.raises(BadEnvironment, match=r"Tool book has raw=True: give parameters=, a JSON schema"):
        Tool(Server().call, name="book", raw=True)


def test_the_schema_of_the_result_can_be_given() -> None:
    def find(word: str) -> str:
        """Find a word."""
        return word

    given = {"type": "object", "properties": {"at": {"type": "integer"}}}
    assert book(partial(Server().call, "book"), raw=True, returns=given).as_openai()["function"]["return"] == given
    assert Tool(find, returns=given).returns == given
    assert Tool(find).returns == {"type": "string"}


# --- equal names


def rooms(number: int) -> list[int]:
    """List the rooms."""
    return list(range(number))


class InSetup(Plain):
    def setup(self) -> None:
        self.tools += [Tool(rooms), Tool(rooms, name="free"), Tool(rooms)]


class ByReplace(Plain):
    async def rollout(self, conversation: Conversation) -> None:
        conversation.replace(tools=[Tool(rooms), Tool(rooms)])


class ForAnother(Plain):
    async def rollout(self, conversation: Conversation) -> None:
        self.episode.conversation("guest", tools=[Tool(rooms), Tool(rooms)])


@pytest.mark.anyio
@pytest.mark.parametrize("environment", [InSetup, ByReplace, ForAnother])
async def test_two_tools_with_one_name_are_refused_with_the_name(environment: type[Plain]) -> None:
    trajectory = await play(environment, ["Done"])
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert "two tools are called 'rooms': rename one of them, by Tool(..., name=)" in trajectory.error


# --- defaults that the schema does not allow


class Colour(enum.Enum):
    RED = "red"


def none(limit: int = None) -> None:  # type: ignore[assignment]  # noqa: RUF013  # refused
    """List."""


def text(limit: int = "ten") -> None:  # type: ignore[assignment]  # refused
    """List."""


def below(limit: Annotated[int, Field(ge=1)] = 0) -> None:
    """List."""


def another(order: Literal["up", "down"] = "side") -> None:  # type: ignore[assignment]  # refused
    """List."""


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (none, "parameter 'limit': its default None does not fit its type: limit must be an integer, got null."),
        (text, "parameter 'limit': its default 'ten' does not fit its type: limit must be an integer, got \"ten\"."),
        (below, "parameter 'limit': its default 0 does not fit its type: limit must be at least 1, got 0."),
        (another, "parameter 'order': its default 'side' does not fit its type: order must be 'up' or 'down', got"),
    ],
)
def test_default_that_a_model_cannot_write_is_refused(function: Callable[..., Any], problem: str) -> None:
    with pytest.raises(BadEnvironment) as caught:
        Tool(function)
    assert problem in str(caught.value)
    assert str(caught.value).endswith(
        "such as limit: int | None = None." if function is none else "take another default."
    )


def test_defaults_that_a_model_can_write_are_accepted() -> None:
    def many(
        number: float = 1,
        words: Sequence[str] = (),
        several: set[int] = frozenset(),  # type: ignore[assignment]  # refused
        colour: Colour = Colour.RED,
        unlimited: float = float("inf"),
        nothing: int | None = None,
        anything: Any = len,
    ) -> None:
        """Take many."""

    assert Tool(many).arguments({}) == {}
