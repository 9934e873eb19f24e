"""The messages that templates are probed with: plain conversations in words that no template contains.

Code that tests a template renders some of these messages, and searches the output for their words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

from runner.messages import Message

__all__ = [
    "AGAIN",
    "AGAIN_ASKED",
    "ANSWER",
    "ANSWERED",
    "ASKED",
    "CALL",
    "INSTRUCTED",
    "KEY",
    "QUESTION",
    "RETURNED",
    "SYSTEM",
    "THOUGHT",
    "TOOL",
    "TOOLS",
    "VALUE",
    "VARIED",
    "View",
    "call_id",
    "calling",
    "result",
    "tool_named",
]

View: TypeAlias = Mapping[str, Any]
"""A message in OpenAI's form; unlike in a conversation, content may be null and arguments may be text."""

# Each word begins and ends with letters that no word of a language begins or ends with. No word is part of another
# word. The words have no signs, since templates escape signs inside JSON.
ASKED, ANSWERED, AGAIN = "zqquestionz", "zqanswerz", "zqagainz"
THOUGHT, INSTRUCTED, RETURNED = "zqthoughtz", "zqtoldz", "zqreturnedz"
TOOL, KEY, VALUE = "zqtoolz", "zqkeyz", "zqvaluez"

QUESTION: Final[Message] = {"role": "user", "content": ASKED}
AGAIN_ASKED: Final[Message] = {"role": "user", "content": AGAIN}
ANSWER: Final[Message] = {"role": "assistant", "content": ANSWERED}
SYSTEM: Final[Message] = {"role": "system", "content": INSTRUCTED}


def tool_named(name: str) -> dict[str, Any]:
    """Return a tool with one parameter, in OpenAI's form."""
    properties = {KEY: {"type": "string", "description": "A key."}}
    parameters = {"type": "object", "properties": properties, "required": [KEY]}
    return {"type": "function", "function": {"name": name, "description": "zqdescribedz", "parameters": parameters}}


TOOLS: Final[Sequence[dict[str, Any]]] = [tool_named(TOOL)]


def call_id(number: int) -> str:
    """Return the id of a call: nine letters and digits, since Mistral's templates raise on other ids."""
    return f"probe{number:04}"


def calling(arguments: Any, *, count: int = 1, content: str | None = "", name: str = TOOL) -> Any:
    """Return an assistant message with `count` calls of one tool."""
    function = {"name": name, "arguments": arguments}
    calls = [{"id": call_id(number), "type": "function", "function": function} for number in range(count)]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(number: int = 0, content: str = RETURNED) -> Message:
    """Return the tool's result for the call with this number."""
    return {"role": "tool", "content": content, "tool_call_id": call_id(number), "name": TOOL}


CALL: Final = cast("Message", calling({KEY: VALUE}))

VARIED: Final[Sequence[Sequence[View]]] = (
    (QUESTION,),
    (SYSTEM, QUESTION, CALL, result()),
    (QUESTION, {**ANSWER, "reasoning_content": THOUGHT}, AGAIN_ASKED, {**CALL, "reasoning_content": THOUGHT}),
)
"""Conversations that together contain everything a template may depend on."""
