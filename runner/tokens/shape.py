"""The shape of an append: what all turns and new messages of one kind have in common, whatever is said in them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson

from runner.messages import Message
from runner.tokens.template import ToolSchema

__all__ = ["Arrival", "Shape", "beginning", "is_plain"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A new message, but for what it says.

    Attributes:
        role: whose it is.
        empty: it says nothing.
        named: it has a name.
    """

    role: str
    empty: bool
    named: bool


@dataclass(frozen=True, slots=True)
class Shape:
    """A turn and what answers it, but for what they say.

    Attributes:
        system: the conversation begins with a system message.
        calls: how many the turn made.
        reasoning: it thought.
        text: it said something.
        new: the messages after it.
        tools: a hash of their schemas.
    """

    system: bool
    calls: int
    reasoning: bool
    text: bool
    new: tuple[Arrival, ...]
    tools: bytes

    @classmethod
    def of(cls, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSchema]) -> Shape:
        """The shape of `new` behind the turn that `history` ends with."""
        turn = history[-1]
        return cls(
            system=history[0]["role"] == "system",
            calls=len(turn.get("tool_calls") or ()),
            reasoning=bool(turn.get("reasoning_content")),
            text=bool(turn["content"]),
            new=tuple(Arrival(message["role"], not message["content"], "name" in message) for message in new),
            tools=hashlib.blake2b(_as_json(tools), digest_size=16).digest(),
        )


def beginning(history: Sequence[Message]) -> Sequence[Message]:
    """The first question and a system message before it, neither empty nor named; nothing where it begins otherwise."""
    length = 2 if history[0]["role"] == "system" else 1
    begun = history[:length]
    if len(history) <= length or begun[-1]["role"] != "user":
        return ()
    return begun if all(message["content"] and "name" not in message for message in begun) else ()


def is_plain(message: Message) -> bool:
    """The message has what messages of its role have, and nothing else that a template could read."""
    keys = message.keys()
    if not keys <= _KEYS[message["role"]]:
        return False
    return bool(message.get("reasoning_content", True)) and bool(message.get("tool_calls", True))


_KEYS: Mapping[str, frozenset[str]] = {
    "system": frozenset({"role", "content", "name"}),
    "user": frozenset({"role", "content", "name"}),
    "assistant": frozenset({"role", "content", "name", "reasoning_content", "tool_calls"}),
    "tool": frozenset({"role", "content", "name", "tool_call_id"}),
}


def _as_json(tools: Sequence[ToolSchema]) -> bytes:
    return orjson.dumps(tools, option=orjson.OPT_NON_STR_KEYS, default=str)
