"""Tells a turn's thought from what it said, by the marks that its template writes."""

from __future__ import annotations

from typing import Final

from runner.parsing.turn_format import ReasoningFormat

__all__ = ["USUAL", "ends_in_thought", "split_thought"]

USUAL: Final = ReasoningFormat("<think>", "</think>", opened_by_prompt=False)
"""What most models write that think; for templates that show no thought, since no answer begins so."""


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
