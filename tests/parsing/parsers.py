"""Parsers of bundled templates, as episodes have them."""

from __future__ import annotations

import functools

from runner.parsing.format_cache import cached_format
from runner.parsing.parser import TurnParser
from runner.tokens.template import ChatTemplate

__all__ = ["bundled"]


@functools.cache
def bundled(name: str) -> TurnParser:
    """The parser of the template that comes with the package under that name."""
    return TurnParser(cached_format(ChatTemplate.load(name).renderer()).format)
