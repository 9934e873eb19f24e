"""What is told of a turn while it is sampled: where it begins, its ids, and what they say, piece by piece."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from runner.messages import ToolCall
from runner.parsing.events import ContentPiece, ReasoningPiece
from runner.tokens.top_logprobs import TopLogprobs
from runner.trajectory import Turn

__all__ = [
    "DeliverTurn",
    "IdsSampled",
    "ToolCalled",
    "TurnAdmitted",
    "TurnEvent",
    "TurnEventSink",
    "TurnProgress",
    "TurnRestarted",
]


@dataclass(frozen=True, slots=True)
class ToolCalled:
    """The model has called a tool; nothing that it still says changes this call."""

    call: ToolCall
    """The call as `Turn.tool_calls` will have it; one that cannot be read has its `error` set."""


@dataclass(frozen=True, slots=True)
class TurnRestarted:
    """The turn is sampled anew, since its engine cut it for its trainer: nothing counts that was told of it before."""


TurnEvent: TypeAlias = ReasoningPiece | ContentPiece | ToolCalled | TurnRestarted
"""Something that a turn said while it is sampled."""


@dataclass(frozen=True, slots=True)
class TurnAdmitted:
    """The engine took the turn's request: from here on it is sampled."""

    handle: str
    """What names the turn to a client; "" where nothing does."""
    prompt_ids: Sequence[int]
    """All that the model sees."""
    calls_before: int = 0
    """How many calls the message has already, where the turn goes on with one that was cut."""


@dataclass(frozen=True, slots=True)
class IdsSampled:
    """These ids were sampled next; what they say may be told later."""

    token_ids: Sequence[int]
    """The ids."""
    logprobs: Sequence[float] | None
    """The log-probability of each of them in nats; None where the engine tells none."""
    top: TopLogprobs | None
    """The likeliest ids at their positions; None where none were asked for."""


TurnProgress: TypeAlias = TurnAdmitted | IdsSampled | TurnEvent
"""All that is told of a turn to whoever passes it on."""


DeliverTurn: TypeAlias = Callable[[Turn, Turn | None], Awaitable[None]]
"""Hands a turn over to its client; the second one is the cut turn with which it goes on, or None."""


class TurnEventSink(Protocol):
    """Passes a turn on while it is sampled. The sampling never waits for it."""

    def put(self, progress: TurnProgress, /) -> None:
        """Take what has come of the turn."""
        ...

    def close(self) -> None:
        """Take note that nothing more comes."""
        ...

    async def forward(self) -> None:
        """Pass on what comes until nothing more does."""
        ...
