"""Parsing of a turn's sampled ids into reasoning, text and tool calls. Verification uses the same code."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from runner.episode.model import ChatModel
from runner.messages import Message, ToolCall
from runner.options import ToolChoice
from runner.parsing.spelled_tokens import SpelledTokens, SpelledTokenStream
from runner.tools.tool import Tool
from runner.trajectory import Turn

__all__ = ["ParsedTurn", "checked_call", "closing_length", "text_of"]


def text_of(ids: Sequence[int], chat: ChatModel, *, stopped: bool) -> str:
    """Return the text of a turn's ids.

    If the turn `stopped`, its last id is the stop. The text lacks the stop, and a close of the turn that the model
    wrote before the stop.
    """
    spoken = ids[: len(ids) - stopped]
    return chat.tokenizer.decode(spoken[: len(spoken) - closing_length(spoken, chat)])


def closing_length(spoken: Sequence[int], chat: ChatModel) -> int:
    """Return the number of last ids of `spoken` that equal a beginning of the template's close of a turn; often 0."""
    close = chat.bridger.closes.of_turn
    if not close or close[0] not in (last := list(spoken[-len(close) :])):  # this is true for nearly every turn
        return 0
    return next((n for n in range(len(close), 0, -1) if last[-n:] == close[:n]), 0)


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """The parsed content of a turn."""

    text: str
    """The text without reasoning and calls."""
    reasoning: str
    """The reasoning; "" without any."""
    tool_calls: list[ToolCall]
    """The calls, in order. A call that did not parse has `error` set."""
    ends_in_thought: bool = False
    """True if the turn ends inside its reasoning."""

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
        """Parse the text of a turn with these `ids`.

        The conversation has `before` earlier calls, so the calls are numbered from there on.
        """
        stopped = bool(ids) and ids[-1] in chat.stop_ids
        spelling = SpelledTokens(text, ids[: len(ids) - stopped], chat.parser.marker_tokens, chat.tokenizer)
        parsed = chat.parser.parse(spelling.text, tools, tool_choice, before=before, ids=ids)
        names = {tool.name for tool in tools}
        calls = [checked_call(call, spelling, names, chat) for call in parsed.calls]
        return cls(
            spelling.restored(parsed.content),
            spelling.restored(parsed.reasoning),
            calls,
            chat.parser.ends_in_thought(spelling.text),
        )

    def cut_in_reasoning(self, turn: Turn, chat: ChatModel) -> bool:
        return self.ends_in_thought and chat.closing_stop(turn) is None

    def as_message(self) -> Message:
        """Return the assistant message.

        Calls that did not parse are left out, since templates omit or refuse the answers to such calls.
        """
        message: Message = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        calls = [call.as_message() for call in self.tool_calls if call.error is None]
        if calls:
            message["tool_calls"] = calls
        return message


def checked_call(
    call: ToolCall, spelling: SpelledTokens | SpelledTokenStream, names: Collection[str], chat: ChatModel
) -> ToolCall:
    """Return the call, with an error if its name was invented and would become control ids in a prompt."""
    call = spelling.restored_call(call)
    if call.error is not None or call.name in names:
        return call
    if chat.tokenizer.control_ids.isdisjoint(chat.tokenizer.encode(call.name)):
        return call
    return ToolCall(call.id, "", error="its name holds control text")
