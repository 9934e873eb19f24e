"""Tasks: one problem each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runner.messages import Prompt

__all__ = ["Task"]


@dataclass(frozen=True)
class Task:
    """One problem; subclass it for typed fields.

    Attributes:
        id: unique within a run.
        prompt: the first messages; a string is a user message.
        answer: reference data for scoring.
        info: anything else, JSON.
    """

    id: str
    prompt: Prompt = ()
    answer: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)
