"""Interface for sources of scripted replies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from runner.engines.scripted.script import ModelCall, Reply

__all__ = ["EncodedReply", "ScriptedModel"]


@dataclass(frozen=True, slots=True)
class EncodedReply:
    """Reply with its ids."""

    reply: Reply
    ids: list[int]
    """Ids of its text and calls. Turns share the list, since it is never changed."""


class ScriptedModel(ABC):
    """Source of the replies of a scripted engine."""

    async def open(self) -> None:  # noqa: B027  # most have nothing to open
        """Load data before the first turn."""

    @abstractmethod
    def reply(self, call: ModelCall) -> EncodedReply | Awaitable[EncodedReply]:
        """Return the reply of a turn.

        Raises:
            RequestRejected: the model has no reply.
        """

    @abstractmethod
    def describe(self) -> Any:
        """Return the description of the model for the engine's `describe`, as JSON."""
