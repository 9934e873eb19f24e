"""Parsers of bundled templates, as in episodes."""

from __future__ import annotations

import functools

from runner.parsing.format_cache import cached_format
from runner.parsing.parser import TurnParser
from runner.tokens.template import ChatTemplate

__all__ = ["bundled"]


@functools.cache
def bundled(name: str) -> TurnParser:
    """Return the parser of the bundled template with this name."""
    return TurnParser(cached_format(ChatTemplate.load(name).renderer()).format)
