"""A sampled turn with the messages that answer it, and its shape: what is left of that whatever is said in it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson

from runner.messages import Message
from runner.tokens.template import ToolSchema

__all__ = ["AnsweredTurn", "Arrival", "Shape", "is_plain"]


@dataclass(frozen=True, slots=True)
class AnsweredTurn:
    """A turn of the model and the messages that answer it: what a bridge is made for."""

    history: Sequence[Message]
    """Everything up to the turn, which is its last message."""
    new: Sequence[Message]
    """The messages after the turn."""
    tools: Sequence[ToolSchema] = ()
    """The tools that are shown to the model, in OpenAI's form, as their author wrote them."""
    number: int = 0
    """The turn's number in its conversation."""
    plain: bool | None = None
    """Whether `is_plain` holds for all of the history, where that is known; None lets it be looked up."""

    @property
    def turn(self) -> Message:
        """The model's message."""
        return self.history[-1]

    @property
    def shape(self) -> Shape:
        """What all answered turns of one kind have in common."""
        turn = self.turn
        return Shape(
            system=self.history[0]["role"] == "system",
            calls=len(turn.get("tool_calls") or ()),
            reasoning=bool(turn.get("reasoning_content")),
            text=bool(turn["content"]),
            new=tuple(Arrival(message["role"], not message["content"], "name" in message) for message in self.new),
            tools=hashlib.blake2b(_as_json(self.tools), digest_size=16).digest(),
            bare=not all(call["function"]["arguments"] for call in turn.get("tool_calls") or ()),
        )

    def stand_in(self) -> list[Message] | None:
        """The beginning of the history and the turn, or None where the messages are not such that these could do.

        They could where nothing but the usual is in any message, and no new one refers to what would be left out.
        """
        beginning = _beginning(self.history)
        if not beginning or "name" in self.turn:
            return None
        if not (all(map(is_plain, self.history)) if self.plain is None else self.plain):
            return None
        # An answer to an earlier call is looked up by its id in the history.
        ids = {call["id"] for call in self.turn.get("tool_calls") or ()}
        answers = (message.get("tool_call_id") for message in self.new if message["role"] == "tool")
        if not all(map(is_plain, self.new)) or not ids.issuperset(answers):
            return None
        return [*beginning, self.turn]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A new message, whatever it says."""

    role: str
    """Whose message it is."""
    empty: bool
    """Whether it says nothing."""
    named: bool
    """Whether it has a name."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A turn and what answers it, whatever they say."""

    system: bool
    """Whether the conversation begins with a system message."""
    calls: int
    """How many calls the turn made."""
    reasoning: bool
    """Whether the turn has reasoning."""
    text: bool
    """Whether the turn has content."""
    new: tuple[Arrival, ...]
    """The messages after the turn."""
    tools: bytes
    """A hash of the schemas of the tools."""
    bare: bool = False
    """Whether one of the calls has no arguments."""


def is_plain(message: Message) -> bool:
    """The message has what messages of its role have, and nothing else that a template could read."""
    if not message.keys() <= _KEYS[message["role"]]:
        return False
    return bool(message.get("reasoning_content", True)) and bool(message.get("tool_calls", True))


_KEYS: Mapping[str, frozenset[str]] = {
    "system": frozenset({"role", "content", "name"}),
    "user": frozenset({"role", "content", "name"}),
    "assistant": frozenset({"role", "content", "name", "reasoning_content", "tool_calls"}),
    "tool": frozenset({"role", "content", "name", "tool_call_id"}),
}


def _beginning(history: Sequence[Message]) -> Sequence[Message]:
    """The first question and a system message before it, neither empty nor named; nothing where it begins otherwise."""
    length = 2 if history[0]["role"] == "system" else 1
    begun = history[:length]
    if len(history) <= length or begun[-1]["role"] != "user":
        return ()
    return begun if all(message["content"] and "name" not in message for message in begun) else ()


def _as_json(tools: Sequence[ToolSchema]) -> bytes:
    # Schemas are the author's own: they may have numbers for keys, and defaults that JSON does not know.
    return orjson.dumps(tools, option=orjson.OPT_NON_STR_KEYS, default=str)
