"""What stands in for a model in a scripted engine: it is asked for each turn's reply."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from runner.engines.scripted.script import ModelCall, Reply

__all__ = ["EncodedReply", "ScriptedModel"]


@dataclass(frozen=True, slots=True)
class EncodedReply:
    """A reply and its ids."""

    reply: Reply
    """The reply as it was given."""
    ids: list[int]
    """The ids of its text and calls; not copied, since nobody changes them."""


class ScriptedModel(ABC):
    """What stands in for a model: it gives the reply to each turn."""

    async def open(self) -> None:  # noqa: B027  # most have nothing to open
        """Read what must be read before the first turn."""

    @abstractmethod
    def reply(self, call: ModelCall) -> EncodedReply | Awaitable[EncodedReply]:
        """What is said in this turn.

        Raises:
            RequestRejected: nothing is.
        """

    @abstractmethod
    def describe(self) -> Any:
        """What a run's header keeps of it, as JSON."""
