"""Small conversations whose words no template writes of itself, and a template that is asked to render them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from runner.tokens.template import Renderer, TemplateRaised, ToolSchema

__all__ = [
    "AGAIN",
    "AGAIN_ASKED",
    "ANSWER",
    "ANSWERED",
    "ASKED",
    "CALL",
    "KEY",
    "QUESTION",
    "RETURNED",
    "THOUGHT",
    "TOLD",
    "TOOL",
    "TOOLS",
    "VALUE",
    "VARIED",
    "Probe",
    "View",
    "calling",
    "result",
]

View: TypeAlias = Mapping[str, Any]
"""A message in OpenAI's shape; unlike those of a conversation it may have a null content or arguments as text."""

ASKED, ANSWERED, AGAIN = "zqquestionz", "zqanswerz", "zqagainz"
THOUGHT, TOLD, RETURNED = "zqthoughtz", "zqtoldz", "zqreturnedz"
TOOL, KEY, VALUE = "zqtoolz", "zqkeyz", "zqvaluez"
DESCRIBED = "zqdescribedz"

QUESTION: View = {"role": "user", "content": ASKED}
AGAIN_ASKED: View = {"role": "user", "content": AGAIN}
ANSWER: View = {"role": "assistant", "content": ANSWERED}
TOOLS: Sequence[ToolSchema] = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": DESCRIBED,
            "parameters": {
                "type": "object",
                "properties": {KEY: {"type": "string", "description": "A key."}},
                "required": [KEY],
            },
        },
    },
]


def calling(arguments: Any, *, count: int = 1, content: str | None = "") -> View:
    function = {"name": TOOL, "arguments": arguments}
    # Mistral's templates want ids of nine letters and digits.
    calls = [{"id": f"probe{number:04}", "type": "function", "function": function} for number in range(count)]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(number: int = 0, content: str = RETURNED) -> View:
    return {"role": "tool", "content": content, "tool_call_id": f"probe{number:04}", "name": TOOL}


CALL = calling({KEY: VALUE})
VARIED: Sequence[Sequence[View]] = (
    (QUESTION,),
    ({"role": "system", "content": TOLD}, QUESTION, CALL, result()),
    (QUESTION, {**ANSWER, "reasoning_content": THOUGHT}, AGAIN_ASKED, {**CALL, "reasoning_content": THOUGHT}),
)


class Probe:
    """One template under examination."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer

    def text(self, *messages: View, tools: bool = False, asking: bool = False) -> str | None:
        """The render, or None where the template raises."""
        try:
            # Lists, since templates add lists to them.
            return self.renderer.render([*messages], tools=TOOLS if tools else [], generation_prompt=asking)
        except TemplateRaised:
            return None

    def shows(self, word: str, *messages: View, tools: bool = False, asking: bool = False) -> bool:
        return word in (self.text(*messages, tools=tools, asking=asking) or "")

    def between(self, before: str, after: str, *messages: View, asking: bool = False) -> str:
        """What stands between two words, or behind the first where the second is ""; "" where it is not there."""
        rest = (self.text(*messages, asking=asking) or "").rpartition(before)
        if not rest[1]:
            return ""
        return rest[2].partition(after)[0] if after else rest[2]
