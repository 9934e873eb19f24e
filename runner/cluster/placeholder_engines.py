"""Placeholders in the driver for engines of other agents, which run only on the workers."""

from __future__ import annotations

from typing import Any

from runner.cluster.protocol import OtherKnown
from runner.engines.base import BaseEngine, DeltaStream, Engine, EngineStats, GenerationRequest
from runner.engines.message_engine import MessageEngine, MessageRequest, MessageStream
from runner.errors import BadControl

__all__ = ["placeholder_for"]

_PLACEHOLDER_ERROR = "every worker asks an engine of its own here, and this process has none."


def placeholder_for(known: OtherKnown) -> BaseEngine:
    """Return an engine that describes itself as those on the workers do, and samples nothing."""
    return _TokenPlaceholder(known) if known.ids is not None else _MessagePlaceholder(known)


class _Placeholder(BaseEngine):
    """Placeholder for an engine that exists only on the workers. Its failures show up as episode outcomes."""

    running = True

    def __init__(self, known: OtherKnown) -> None:
        self._description = known.description
        self.places, self.context = known.places, known.context

    async def __aexit__(self, *_: object) -> None:
        """Nothing to close."""

    def stats(self) -> EngineStats:
        """Empty statistics."""
        return EngineStats(open=0)

    async def health(self) -> None:
        """Return at once: nothing here can fail."""

    def describe(self) -> dict[str, Any]:
        """The description by the first worker."""
        return dict(self._description)


class _TokenPlaceholder(_Placeholder, Engine):
    def __init__(self, known: OtherKnown) -> None:
        super().__init__(known)
        assert known.ids is not None, "it takes ids"
        self.tokenizer, self.template, self.stop_ids = known.ids.tokenizer, known.ids.template, known.ids.stop_ids
        self.vocabulary = known.ids.vocabulary

    def stream(self, request: GenerationRequest) -> DeltaStream:
        raise BadControl(_PLACEHOLDER_ERROR)


class _MessagePlaceholder(_Placeholder, MessageEngine):
    def stream(self, request: MessageRequest) -> MessageStream:
        raise BadControl(_PLACEHOLDER_ERROR)
