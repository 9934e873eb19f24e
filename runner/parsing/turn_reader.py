"""Reads a whole turn in the format that its template writes: the thought, the content, the calls."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from runner.parsing.call_reader import CallReader, Schemas
from runner.parsing.events import TurnReading
from runner.parsing.turn_format import ReasoningFormat, TurnFormat

__all__ = ["USUAL", "TurnReader", "ends_in_thought", "split_thought"]

USUAL: Final = ReasoningFormat("<think>", "</think>", opened_by_prompt=False)
"""What most models write that think; for templates that show no thought, since no answer begins so."""


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


def split_thought(text: str, form: ReasoningFormat) -> tuple[str, str]:
    """(thought, what was said) of a turn's text; a thought that was never closed leaves nothing said."""
    start = text.lstrip()
    if form.open and start.startswith(form.open):
        start = start[len(form.open) :]
    elif not form.opened_by_prompt:
        if start.startswith(form.close):  # how some models write that they did not think
            return "", start[len(form.close) :].lstrip()
        # Where nothing opens a thought, its close is what tells.
        if form.open or form.close not in text:
            return "", text
    thought, _, said = start.partition(form.close)
    return thought.strip(), said.lstrip()


def ends_in_thought(text: str, form: ReasoningFormat) -> bool:
    """Whether a turn's text ends before its thought does."""
    begun = form.opened_by_prompt or (bool(form.open) and text.lstrip().startswith(form.open))
    return begun and form.close not in text
