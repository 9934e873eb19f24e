"""Numbers with their nouns, for people."""

from __future__ import annotations

import re

__all__ = ["counted"]


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 task", "2 tasks", "1,000 trajectories"."""
    if number == 1:
        return f"1 {noun}"
    plural = f"{noun[:-1]}ies" if re.search("[^aeiou]y$", noun) else f"{noun}s"
    return f"{number:,} {plural}"
