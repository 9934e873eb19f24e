"""Parsers of bundled templates, as episodes have them."""

from __future__ import annotations

import functools

from runner.parsing.learnt import learnt_turn
from runner.parsing.parser import TurnParser
from runner.tokens.template import ChatTemplate

__all__ = ["bundled"]


@functools.cache
def bundled(name: str) -> TurnParser:
    """The parser of the template that comes with the package under that name."""
    return TurnParser(learnt_turn(ChatTemplate.load(name).renderer()).format)
