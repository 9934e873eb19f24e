"""Reads a whole turn in the format that its template writes: the thought, the content, the calls."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from runner.parsing.events import TurnReading
from runner.parsing.reading import CallReader, Schemas
from runner.parsing.thoughts import USUAL, split_thought
from runner.parsing.turn_format import ReasoningFormat, TurnFormat

__all__ = ["TurnReader"]


@dataclass(frozen=True)  # without slots, since its patterns are kept in it
class TurnReader:
    """Reads what one `TurnFormat` describes. It has no state beside its patterns, so one serves every turn."""

    format: TurnFormat

    def read(self, text: str, schemas: Schemas | None = None) -> TurnReading:
        """What a turn's text says.

        Args:
            text: what the model said.
            schemas: the tools that may be called; None where they are not known.
        """
        reasoning, content = split_thought(text, self.reasoning)
        if self.content_open:
            content = content.lstrip().removeprefix(self.content_open)
        if self.calls is None:
            return TurnReading(reasoning, content, [])
        reading = self.calls.read(content, schemas)
        return TurnReading(reasoning, reading.content, reading.calls)

    @cached_property
    def calls(self) -> CallReader | None:
        """What reads the calls; None where there are none that can be read."""
        return None if self.format.calls is None else CallReader(self.format.calls)

    @property
    def reasoning(self) -> ReasoningFormat:
        """The marks of thoughts."""
        return self.format.reasoning or USUAL

    @property
    def content_open(self) -> str:
        """What stands in front of the content."""
        return self.format.content.open

    @property
    def trigger(self) -> str:
        """What tells that calls begin; "" where nothing does."""
        return "" if self.format.calls is None else self.format.calls.trigger

    @property
    def bare(self) -> bool:
        """Nothing tells that calls begin but the calls themselves."""
        return self.format.calls is not None and not self.format.calls.trigger
