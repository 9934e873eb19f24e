"""What stands in a driver for the engines of other agents, which each worker enters for itself."""

from __future__ import annotations

from typing import Any

from runner.cluster.words import OtherKnown
from runner.engines.base import BaseEngine, DeltaStream, Engine, EngineStats, GenerationRequest
from runner.engines.message_engine import MessageEngine, MessageRequest, MessageStream
from runner.errors import BadControl

__all__ = ["standing_for"]

_ELSEWHERE = "every worker asks an engine of its own here, and this process has none."


def standing_for(known: OtherKnown) -> BaseEngine:
    """An engine that describes itself as those on the workers do, and samples nothing."""
    return _IdsElsewhere(known) if known.ids is not None else _MessagesElsewhere(known)


class _Elsewhere(BaseEngine):
    """Whether one of them can answer, and what it does, its worker says by what comes of the episodes."""

    running = True

    def __init__(self, known: OtherKnown) -> None:
        self._description = known.description
        self.places, self.context = known.places, known.context

    async def __aexit__(self, *_: object) -> None:
        """Nobody enters it."""

    def stats(self) -> EngineStats:
        """Nothing is done here."""
        return EngineStats(open=0)

    async def health(self) -> None:
        """Return: nothing of it is here that could fail."""

    def describe(self) -> dict[str, Any]:
        """What the first worker's says of itself."""
        return dict(self._description)


class _IdsElsewhere(_Elsewhere, Engine):
    def __init__(self, known: OtherKnown) -> None:
        super().__init__(known)
        assert known.ids is not None, "it takes ids"
        self.tokenizer, self.template, self.stop_ids = known.ids.tokenizer, known.ids.template, known.ids.stop_ids
        self.vocabulary = known.ids.vocabulary

    def stream(self, request: GenerationRequest) -> DeltaStream:
        raise BadControl(_ELSEWHERE)


class _MessagesElsewhere(_Elsewhere, MessageEngine):
    def stream(self, request: MessageRequest) -> MessageStream:
        raise BadControl(_ELSEWHERE)
