"""Parsing: from a turn's text to reasoning, content and tool calls."""

from __future__ import annotations

from runner.parsing.base import Parsed, ToolFormat
from runner.parsing.detect import detect_format
from runner.parsing.reasoning import split_reasoning

__all__ = ["Parsed", "ToolFormat", "detect_format", "split_reasoning"]
