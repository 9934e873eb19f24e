"""A sampled turn with the messages that answer it, and its shape: roles, call count and flags, without any text."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import orjson

from runner.messages import Message
from runner.tokens.template import ToolSchema

__all__ = ["AnsweredTurn", "Arrival", "TurnShape", "is_plain"]


@dataclass(frozen=True, slots=True)
class AnsweredTurn:
    """A turn of the model and the messages that answer it: the input of a bridge."""

    history: Sequence[Message]
    """All messages up to and including the turn."""
    new: Sequence[Message]
    tools: Sequence[ToolSchema] = ()
    """The tools that are shown to the model, in OpenAI's form, as their author wrote them."""
    number: int = 0
    plain: bool | None = None
    """True if `is_plain` is true of every message of `history` and `new`; None if it is not known yet."""

    @property
    def turn(self) -> Message:
        """The model's message."""
        return self.history[-1]

    @property
    def shape(self) -> TurnShape:
        """The shape of the turn and its answers: roles, call count and flags, without any text."""
        turn = self.turn
        calls = turn.get("tool_calls") or ()
        return TurnShape(
            system=self.history[0]["role"] == "system",
            calls=len(calls),
            reasoning=bool(turn.get("reasoning_content")),
            text=bool(turn["content"]),
            new=tuple([Arrival(message["role"], not message["content"], "name" in message) for message in self.new]),
            tools=hashlib.blake2b(_as_json(self.tools), digest_size=16).digest(),
            bare=not all(call["function"]["arguments"] for call in calls),
        )

    def stand_in(self) -> list[Message] | None:
        """Return the beginning of the history and the turn, if these are enough for a bridge; otherwise None.

        They are enough if each message has only the usual fields, and if no new message refers to a message that is not
        among them.
        """
        beginning, turn = _beginning(self.history), self.turn
        if not beginning or "name" in turn:
            return None
        plain = all(map(is_plain, chain(self.history, self.new))) if self.plain is None else self.plain
        # A template may look for the call of a result in the history, so the call must be in the turn.
        ids = {call["id"] for call in turn.get("tool_calls") or ()}
        answers = (message.get("tool_call_id") for message in self.new if message["role"] == "tool")
        return [*beginning, turn] if plain and ids.issuperset(answers) else None


# The shapes are named tuples, which are fast, since a shape is made and looked up at every turn.


class Arrival(NamedTuple):
    """A new message, without its text."""

    role: str
    empty: bool
    """True if the content is empty."""
    named: bool


class TurnShape(NamedTuple):
    """The shape of a turn: roles, call count and flags, without any text. Proofs about bridges are cached per shape."""

    system: bool
    """True if the conversation begins with a system message."""
    calls: int
    reasoning: bool
    text: bool
    """True if the turn has content."""
    new: tuple[Arrival, ...]
    tools: bytes
    """A hash of the schemas of the tools."""
    bare: bool = False
    """True if one of the calls has no arguments."""


def is_plain(message: Message) -> bool:
    """Return True if a message has only the usual fields of its role, and no empty reasoning or list of calls."""
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
    """Return the system message, if any, and the first user message; () if the history begins differently.

    Each of these messages needs content and must not have a name. A further message must follow.
    """
    length = 2 if history[0]["role"] == "system" else 1
    begun = history[:length]
    if len(history) <= length or begun[-1]["role"] != "user":
        return ()
    return begun if all(message["content"] and "name" not in message for message in begun) else ()


def _as_json(tools: Sequence[ToolSchema]) -> bytes:
    # An author's schemas may have numbers as keys, and defaults that JSON cannot represent.
    return orjson.dumps(tools, option=orjson.OPT_NON_STR_KEYS, default=str)
