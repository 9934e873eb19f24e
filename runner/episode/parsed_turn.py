"""A turn as it is read: what its sampled ids say, as reasoning, text and tool calls. Verification reads alike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from runner.episode.model import ChatModel
from runner.messages import Message, ToolCall
from runner.options import ToolChoice
from runner.tools.tool import Tool
from runner.trajectory import Turn

__all__ = ["ParsedTurn", "cut_in_reasoning", "text_of"]


def text_of(ids: Sequence[int], chat: ChatModel, *, stopped: bool) -> str:
    """The text of a turn's ids, of which the last is its stop where it `stopped`.

    The stop is left out, and a close of the template's that the model wrote before it.
    """
    spoken = ids[: len(ids) - stopped]
    close = chat.bridger.closes.of_turn
    written = next((n for n in range(len(close), 0, -1) if list(spoken[-n:]) == close[:n]), 0)
    return chat.tokenizer.decode(spoken[: len(spoken) - written])


def cut_in_reasoning(turn: Turn, text: str, chat: ChatModel) -> bool:
    """Whether the turn was cut inside its reasoning; `text` is what it said from the beginning of its message on."""
    return chat.closing_stop(turn) is None and chat.parser.ends_in_thought(text)


def triggers(text: str, ids: Sequence[int], chat: ChatModel) -> frozenset[int] | None:
    """Where `text`, which begins with what `ids` say, has the control token that announces calls.

    None where the vocabulary has none of it, so that only the text tells. Where the model spelt its name with letters
    it speaks of it.
    """
    if chat.trigger_id is None:
        return None
    name = chat.tokenizer.decode([chat.trigger_id])
    found = [match.start() for match in re.finditer(re.escape(name), text)]
    sampled = [index for index, token_id in enumerate(ids) if token_id == chat.trigger_id]
    if len(found) == len(sampled):
        return frozenset(found)
    # The text of a prefix may end inside a character, so the nearest place is meant.
    ends = [len(chat.tokenizer.decode(ids[: index + 1])) - len(name) for index in sampled]
    return frozenset(min(found, key=lambda at: abs(at - end)) for end in ends if found)


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """What a turn said."""

    text: str
    """The text of the turn without its reasoning and its calls."""
    reasoning: str
    """The reasoning of the turn, or ""."""
    tool_calls: list[ToolCall]
    """Its calls, in order; one that did not parse has `error` set."""

    @classmethod
    def of(
        cls,
        text: str,
        ids: Sequence[int],
        chat: ChatModel,
        tools: Sequence[Tool],
        *,
        before: int,
        tool_choice: ToolChoice,
    ) -> ParsedTurn:
        """Read a turn's text, which is that of `ids`.

        Its calls are numbered from `before` on, how many its conversation had before.
        """
        # Whoever was made to call spelt the mark with letters because the grammar lets it.
        announced = triggers(text, ids, chat) if tools and tool_choice == "auto" else None
        parsed = chat.parser.parse(text, tools, tool_choice, before=before, triggers=announced, ids=ids)
        names = {tool.name for tool in tools}
        calls = [call if call.name in names else _without_control_text(call, chat) for call in parsed.calls]
        return cls(parsed.content, parsed.reasoning, calls)

    def as_message(self) -> Message:
        """The assistant message. A call that did not parse is none: templates drop or refuse what would answer it."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        calls = [call.as_message() for call in self.tool_calls if call.error is None]
        if calls:
            message["tool_calls"] = calls
        return message


def _without_control_text(call: ToolCall, chat: ChatModel) -> ToolCall:
    """The call, or an error where the name that the model made up would become control ids behind its turn."""
    ids = chat.tokenizer.encode(call.name)
    if call.error is not None or chat.tokenizer.control_ids.isdisjoint(ids):
        return call
    return ToolCall(call.id, "", error="its name holds control text")
