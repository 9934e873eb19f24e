"""Contract of engines that take and return messages: no ids, no template, no training data.

async with engine.stream(request) as said:           # waits for a place; leaving the block ends the request
    async for piece in said: ...
    said.finish
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from runner.engines.base import BaseEngine, FinishReason
from runner.engines.gate import Session
from runner.messages import Message, ToolCall
from runner.options import Sampling, ToolChoice
from runner.parsing.events import ContentPiece, ReasoningPiece

__all__ = ["MessageEngine", "MessageFinish", "MessagePiece", "MessageRequest", "MessageStream", "Usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of one turn, as a server reports it; a count that the server does not report is None."""

    prompt_tokens: int | None = None
    """Tokens of the prompt."""
    completion_tokens: int | None = None
    """Sampled tokens, including hidden reasoning."""
    cached_tokens: int | None = None
    """Prompt tokens that the server's cache held."""
    reasoning_tokens: int | None = None
    """Reasoning tokens among the sampled ones, hidden or not."""
    cost: float | None = None
    """Price of the turn, in the server's currency."""
    model: str = ""
    """Name of the model's version, as the server reports it; "" without a report."""
    fingerprint: str = ""
    """Server's id of the model's configuration (`system_fingerprint`); "" without a report."""

    @property
    def total_tokens(self) -> int:
        """Sum of prompt and sampled tokens; an unknown count is 0."""
        return (self.prompt_tokens or 0) + (self.completion_tokens or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRequest:
    """Request for one turn."""

    name: str
    """Name of the turn for errors and logs, "episode/agent/turn"."""
    messages: Sequence[Message]
    """All messages of the conversation so far."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools that may be called, in OpenAI's form."""
    tool_choice: ToolChoice = "auto"
    """"auto", "none" or "required", or the name of the tool that the turn must call."""
    sampling: Sampling
    """Sampling parameters; every field is set."""
    seed: int | None = None
    """Seed of this turn; None leaves it to the server."""
    session: Session | None = None
    """Conversation of the turn; None for a single request, which counts as a first turn."""


MessagePiece: TypeAlias = ReasoningPiece | ContentPiece | ToolCall
"""Piece of a turn. A tool call is one piece, sent when it is complete; a call that cannot be read has `error` set."""


@dataclass(frozen=True, slots=True)
class MessageFinish:
    """Finish of a turn."""

    reason: FinishReason
    """Reason for the end."""
    stop: str | None = None
    """Stop string that ended the turn, if known, or the text of an error; otherwise None."""
    usage: Usage | None = None
    """Usage that the server reported; None without a report."""


class MessageStream(AbstractAsyncContextManager["MessageStream", None]):
    """Pieces of one turn; use it as `async with` around `async for`.

    Entering waits for a place and for the beginning of the answer. The episode's clocks stop during waits for a place
    or a retry, but not while the server works. Leaving always ends the request.

    Raises (entering or iterating):
        PromptTooLong: the server reports that the history does not fit the model's context.
        RequestRejected: the server refuses this request.
        EngineError: the request failed.
        EngineDead: the server cannot be used any more.
    """

    finish: MessageFinish | None
    """Finish of the turn; None before its end. Leaving the block early sets the finish ABORT."""
    waited: float
    """Seconds that the request waited for a place or a retry."""
    seed: int | None
    """Seed that was sent to the server; None if none was sent."""

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> MessagePiece: ...


class MessageEngine(BaseEngine):
    """Engine that takes messages and returns a message.

    The server applies the template and the tokenizer, so turns have no token ids, and training cannot use these turns.
    """

    @abstractmethod
    def stream(self, request: MessageRequest) -> MessageStream:
        """Return the pieces of one turn; nothing happens before the block is entered."""
