"""The fixed texts that are sent back to a model. Training data contains them, so each change needs a new version."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

__all__ = [
    "EMPTY_RESULT",
    "WORDING_VERSION",
    "malformed_call",
    "missing",
    "must_be",
    "not_a_parameter",
    "not_finite",
    "took_longer",
    "tool_error",
    "unknown_tool",
    "wrong_arguments",
]

WORDING_VERSION: Final = 2
"""The version of all texts of this module, kept in the header of every run. Increase it with each change of a text."""

EMPTY_RESULT: Final = "(empty)"
"""The text for a tool that returned the empty string: templates drop a message whose content is empty."""


def unknown_tool(name: str, known: Iterable[str]) -> str:
    """Text for a call of a tool that does not exist."""
    names = ", ".join(known)
    return f"There is no tool named {name}. " + (f"The tools are: {names}." if names else "There are no tools.")


def wrong_arguments(name: str, problems: Sequence[str]) -> str:
    """Text for a call whose arguments do not fit the tool; each problem is a clause without its full stop."""
    return f"Wrong arguments for {name}: {'; '.join(problems)}."


def took_longer(name: str, seconds: float) -> str:
    """Text for a tool that was still running at its deadline."""
    return f"{name} took longer than {seconds:g} s."


def tool_error(text: str) -> str:
    """Text for a tool that raised `ToolError`: the text of the error, or a fixed text if it is empty."""
    return text or "The tool failed."


def malformed_call(error: str) -> str:
    """Text for a call that cannot be parsed."""
    return f"That tool call could not be read: {error}."


def missing(path: str) -> str:
    """Clause for an argument that is needed and was not given."""
    return f"{path} is missing"


def not_a_parameter(path: str) -> str:
    """Clause for an argument that the tool does not take."""
    return f"there is no {path}"


def must_be(path: str, expected: Sequence[str], got: str) -> str:
    """Clause for an argument that has none of the allowed types."""
    return f"{path} must be {' or '.join(expected)}, got {got}"


def not_finite() -> str:
    """Clause for a number that is infinite or NaN, which JSON cannot hold."""
    return "numbers must be finite"
