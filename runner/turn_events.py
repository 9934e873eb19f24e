"""Events of a turn while it is sampled: its start, its ids, and its text, reasoning and tool calls piece by piece."""

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
    """A complete tool call of the model. Later ids of the turn do not change it."""

    call: ToolCall
    """The call, as in `Turn.tool_calls`. A call that cannot be parsed has its `error` set."""


@dataclass(frozen=True, slots=True)
class TurnRestarted:
    """The turn is sampled again, since its engine cut it for its trainer. Discard all earlier events of the turn."""


TurnEvent: TypeAlias = ReasoningPiece | ContentPiece | ToolCalled | TurnRestarted
"""An event of a turn while it is sampled."""


@dataclass(frozen=True, slots=True)
class TurnAdmitted:
    """The engine admitted the request of the turn and starts to sample it."""

    handle: str
    """Id of the turn for a client; "" if it has none."""
    prompt_ids: Sequence[int]
    calls_before: int = 0
    """Number of calls that the message already has if the turn continues a cut turn; else 0."""


@dataclass(frozen=True, slots=True)
class IdsSampled:
    """Newly sampled ids. The events of their text may come later."""

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None
    """Log-probability of each id in nats; None if the engine does not return them."""
    top: TopLogprobs | None
    """The most likely ids at each position; None if they were not requested."""


TurnProgress: TypeAlias = TurnAdmitted | IdsSampled | TurnEvent
"""Everything that is sent about a turn while it is sampled."""


DeliverTurn: TypeAlias = Callable[[Turn, Turn | None], Awaitable[None]]
"""Function that delivers a finished turn to its client. Its second argument is the cut turn that this turn continues,
or None.
"""


class TurnEventSink(Protocol):
    """Receiver of the events of a turn while it is sampled. The sampling never waits for the receiver."""

    def put(self, progress: TurnProgress, /) -> None: ...

    def close(self) -> None:
        """End the queue: no more events follow."""
        ...

    async def forward(self) -> None:
        """Send queued events until the queue is closed."""
        ...
