"""The contract of engines that take messages and give messages: no ids, no template, and nothing to train on.

async with engine.stream(request) as said:           # waits for a place; the request is gone on leaving the block
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
    """What a server says that one turn took; None where it does not say."""

    prompt_tokens: int | None = None
    """Tokens of the prompt, by the server's count."""
    completion_tokens: int | None = None
    """Tokens that were sampled, those of hidden reasoning included."""
    cached_tokens: int | None = None
    """Tokens of the prompt that were cached."""
    reasoning_tokens: int | None = None
    """Tokens of the reasoning among those that were sampled, shown or not."""
    cost: float | None = None
    """What the server charges for the turn, in its own currency."""
    model: str = ""
    """The version of the model that answered, as the server calls it."""
    fingerprint: str = ""
    """What the server says of the configuration that the model ran in (`system_fingerprint`)."""

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompt and of the turn, as far as the server says."""
        return (self.prompt_tokens or 0) + (self.completion_tokens or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRequest:
    """One turn that a server of messages is asked for."""

    name: str
    """Names the turn in errors and logs, as "episode/agent/turn"."""
    messages: Sequence[Message]
    """The whole history."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The tools that may be called, in OpenAI's form."""
    tool_choice: ToolChoice = "auto"
    """Whether it may, must or must not call a tool, or the name of the tool that it must call."""
    sampling: Sampling
    """How to sample, every field set."""
    seed: int | None = None
    """The seed of this turn; None leaves it to the server."""
    session: Session | None = None
    """The conversation that the turn belongs to; None for a single request, which counts as first."""


MessagePiece: TypeAlias = ReasoningPiece | ContentPiece | ToolCall
"""What a server says of a turn, in order; a call comes once it is whole, and has its `error` set if it is none."""


@dataclass(frozen=True, slots=True)
class MessageFinish:
    """How a turn ended."""

    reason: FinishReason
    """Why it ended."""
    stop: str | None = None
    """The stop string that ended it, where the server says, or the text of an error."""
    usage: Usage | None = None
    """The usage that the server says; None where it says none."""


class MessageStream(AbstractAsyncContextManager["MessageStream", None]):
    """What one turn says, piece by piece; use it as `async with` around `async for`.

    Entering waits for a place and until the server begins to answer; the clocks of the episode stand still while it
    waits for a place or to send the request again, and not while the server thinks. Leaving, in whatever way, ends the
    request.

    Raises (entering or iterating):
        PromptTooLong: the history does not fit the model's context, as the server says.
        RequestRejected: the server refuses this request.
        EngineError: it failed.
        EngineDead: it can answer no more.
    """

    finish: MessageFinish | None
    """How the turn ended; None while it goes on, and for one that was left before its end."""
    waited: float
    """Seconds for which the request waited for a place, or to be sent again."""
    seed: int | None
    """The seed that the server was given."""

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> MessagePiece: ...


class MessageEngine(BaseEngine):
    """Turns messages into a message. Templates and tokens are the server's, so nothing that it says is trained on."""

    @abstractmethod
    def stream(self, request: MessageRequest) -> MessageStream:
        """What one turn says; nothing happens before the block is entered."""
