"""Placeholder until the grammar lands."""

from __future__ import annotations
from collections.abc import Sequence
from runner.options import Constraint, ToolChoice
from runner.parsing.turn_format import CallFormat
from runner.tools.tool import Tool


def constraint(
    form: CallFormat,
    tools: Sequence[Tool],
    tool_choice: ToolChoice,
    *,
    parallel: bool = True,
    thought_close: str | None = None,
) -> Constraint | None:
    return None
