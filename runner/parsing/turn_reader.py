"""Reader of a complete turn: its reasoning, content and calls."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from runner.parsing.call_reader import CallReader, Schemas
from runner.parsing.events import TurnReading
from runner.parsing.turn_format import ReasoningFormat, TurnFormat

__all__ = ["USUAL", "TurnReader", "ends_in_thought", "split_thought"]

USUAL: Final = ReasoningFormat("<think>", "</think>", opened_by_prompt=False)
"""Marks of most reasoning models, for templates that do not show reasoning. No answer begins with such a mark."""


@dataclass(frozen=True)  # no slots: cached properties need a dict
class TurnReader:
    """Reader of turns of one `TurnFormat`, without state except for cached patterns: one object serves every turn."""

    format: TurnFormat

    def read(self, text: str, schemas: Schemas | None = None) -> TurnReading:
        """Return the parts of a turn's text.

        Args:
            text: output of the model.
            schemas: tools that may be called; None if they are unknown.
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
        """Reader of the calls; None if calls cannot be read."""
        return None if self.format.calls is None else CallReader(self.format.calls)

    @property
    def reasoning(self) -> ReasoningFormat:
        return self.format.reasoning or USUAL

    @property
    def content_open(self) -> str:
        """Text before the content."""
        return self.format.content.open

    @property
    def trigger(self) -> str:
        """Text that begins calls; "" if calls begin without such a text, or cannot be read."""
        return "" if self.format.calls is None else self.format.calls.trigger

    @property
    def bare(self) -> bool:
        """True if calls have no trigger."""
        return self.format.calls is not None and not self.format.calls.trigger


def split_thought(text: str, form: ReasoningFormat) -> tuple[str, str]:
    """Return (reasoning, rest) of a turn's text. If reasoning begins and does not close, all text is reasoning."""
    start = text.lstrip()
    if form.open and start.startswith(form.open):
        start = start[len(form.open) :]
    elif not form.opened_by_prompt:
        if start.startswith(form.close):  # some models mark empty reasoning this way
            return "", start[len(form.close) :].lstrip()
        # Without an opening mark, only the close identifies reasoning.
        if form.open or form.close not in text:
            return "", text
    thought, _, said = start.partition(form.close)
    return thought.strip(), said.lstrip()


def ends_in_thought(text: str, form: ReasoningFormat) -> bool:
    """Return True if a turn's text ends inside its reasoning."""
    begun = form.opened_by_prompt or (bool(form.open) and text.lstrip().startswith(form.open))
    return begun and form.close not in text
