"""Messages and tool calls in OpenAI's shape: the view of a conversation that people and templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Required, TypeAlias, TypedDict

import orjson

__all__ = [
    "FunctionCall",
    "Message",
    "Prompt",
    "Role",
    "ToolCall",
    "ToolCallMessage",
    "as_messages",
    "canonical_json",
]

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]


class FunctionCall(TypedDict):
    """The function part of a tool call inside a message; `arguments` is an object, not a string."""

    name: str
    arguments: Mapping[str, Any]


class ToolCallMessage(TypedDict):
    """A tool call inside an assistant message."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(TypedDict, total=False):
    """One message, a plain dict in OpenAI's shape."""

    role: Required[Role]
    content: Required[str]
    reasoning_content: str
    tool_calls: Sequence[ToolCallMessage]
    tool_call_id: str
    name: str


Prompt: TypeAlias = str | Message | Sequence[Message]
"""What may be put before a model: a string is a user message."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model made in a turn.

    Attributes:
        id: unique within its conversation.
        name: the tool's name as the model wrote it; "" where it could not be read.
        arguments: the arguments as the model gave them, before they are checked.
        error: what was wrong with a call that does not parse; such a call is answered, not run.
    """

    id: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    def as_message(self) -> ToolCallMessage:
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


def as_messages(prompt: Prompt) -> list[Message]:
    """The messages that `prompt` stands for.

    Raises:
        TypeError: it is neither a string, a message nor a sequence of messages.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, Mapping):
        return [_checked(prompt)]
    if isinstance(prompt, Sequence):
        return [_checked(message) for message in prompt]
    raise TypeError(f"expected a string, a message or a list of messages, got {type(prompt).__name__}: {prompt!r:.80}")


def canonical_json(value: Any) -> str:
    """`value` as JSON with its own key order, non-ASCII kept: what a model reads and what hashes are made of."""
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS, default=str).decode()
    except orjson.JSONEncodeError:  # models write integers past 64 bits
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


def _checked(message: Any) -> Message:
    if not isinstance(message, Mapping):
        raise TypeError(f"a message is a dict with role and content, got {type(message).__name__}: {message!r:.80}")
    if message.get("role") not in ("system", "user", "assistant", "tool"):
        raise TypeError(f"a message's role is system, user, assistant or tool, got {message.get('role')!r}")
    if not isinstance(message.get("content", ""), str | type(None)):
        raise TypeError(f"a message's content is a string, got {type(message['content']).__name__}")
    return {**message, "content": message.get("content") or ""}  # type: ignore[typeddict-item]  # checked above
