"""Reasoning: what a model thought, told apart from what it said."""

from __future__ import annotations

from typing import Final

__all__ = ["CLOSE", "OPEN", "is_open", "split_reasoning"]

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


def split_reasoning(text: str, opened: bool = False) -> tuple[str, str]:
    """(reasoning, content) of a turn's text; reasoning is "" where there is none.

    Reasoning that was never closed, because the turn was cut, leaves no content.

    Args:
        text: what the model said.
        opened: the generation prompt already ended inside a reasoning block.
    """
    start = text.lstrip()
    if start.startswith(OPEN):
        start = start[len(OPEN) :]
    elif not opened:
        return "", text
    reasoning, _, content = start.partition(CLOSE)
    return reasoning.strip(), content.lstrip()


def is_open(text: str, opened: bool = False) -> bool:
    """Whether a turn's text ends inside its reasoning; the arguments are those of `split_reasoning`."""
    return (opened or text.lstrip().startswith(OPEN)) and CLOSE not in text
