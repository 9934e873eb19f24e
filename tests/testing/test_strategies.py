"""The strategies produce what they promise: valid calls, and conversations that templates accept."""

from __future__ import annotations

import enum
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner import BadOption, Environment, Message, ToolCall, reward, tool
from runner.engines.scripted.script import check_chunks
from runner.testing.strategies import awkward_text, chunkings, conversations, tool_calls
from runner.tokens.template import ChatTemplate
from runner.tools.schema import check_by_schema


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Tools(Environment):
    @tool
    def many(
        self,
        number: int,
        share: float,
        name: str,
        sure: bool,
        kind: Literal["a", "b"],
        colour: Colour,
        several: list[int],
        named: dict[str, int],
        perhaps: int | None = None,
    ) -> None:
        """Take all kinds."""

    @reward
    def none(self) -> None:
        return None


TOOLS = Tools().bound_tools()


@settings(deadline=None)
@given(tool_calls(TOOLS))
def test_calls_of_tools_fit_their_schemas(call: ToolCall) -> None:
    assert check_by_schema(TOOLS[0].parameters, "many")(call.arguments) == call.arguments


def test_calls_of_no_tool_are_refused() -> None:
    with pytest.raises(BadOption, match=r"tool_calls\(\[\]\): give at least one tool"):
        tool_calls([])


@pytest.mark.parametrize("template", ["pythonic", "hermes"])
@settings(deadline=None)
@given(messages=conversations())
def test_conversations_render_and_every_call_is_answered(template: str, messages: list[Message]) -> None:
    assert ChatTemplate.load(template).renderer().render(messages)
    assert messages[-1]["role"] != "assistant"
    calls = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    assert calls == [message["tool_call_id"] for message in messages if message["role"] == "tool"]


@settings(deadline=None)
@given(chunkings())
def test_chunkings_can_be_cut(chunks: object) -> None:
    check_chunks(chunks)  # type: ignore[arg-type]  # any object


@settings(deadline=None)
@given(awkward_text())
def test_awkward_text_can_be_encoded(text: str) -> None:
    assert text.encode().decode() == text


@settings(deadline=None)
@given(st.data())
def test_text_of_ones_own_is_used(data: st.DataObject) -> None:
    messages = data.draw(conversations(text=st.just("mine"), max_messages=3))
    assert {message["content"] for message in messages} == {"mine"}
