"""The fixed words that go back to a model. They are training data: a change of any raises `WORDING_VERSION`."""

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
"""The version of the words, kept in the header of every run."""

EMPTY_RESULT: Final = "(empty)"
"""The text for a tool that returned the empty string: templates drop a message whose content is empty."""


def unknown_tool(name: str, known: Iterable[str]) -> str:
    """The model called a tool that does not exist."""
    names = ", ".join(known)
    return f"There is no tool named {name}. " + (f"The tools are: {names}." if names else "There are no tools.")


def wrong_arguments(name: str, problems: Sequence[str]) -> str:
    """The model called a tool with arguments that do not fit; each problem is a clause without its full stop."""
    return f"Wrong arguments for {name}: {'; '.join(problems)}."


def took_longer(name: str, seconds: float) -> str:
    """The tool was still running at its deadline."""
    return f"{name} took longer than {seconds:g} s."


def tool_error(text: str) -> str:
    """The tool raised `ToolError`: its own text."""
    return text or "The tool failed."


def malformed_call(error: str) -> str:
    """The model opened a tool call that does not parse."""
    return f"That tool call could not be read: {error}."


def missing(path: str) -> str:
    """A clause: an argument that is needed was not given."""
    return f"{path} is missing"


def not_a_parameter(path: str) -> str:
    """A clause: an argument was given that the tool does not take."""
    return f"there is no {path}"


def must_be(path: str, expected: Sequence[str], got: str) -> str:
    """A clause: an argument does not have any of the allowed types."""
    return f"{path} must be {' or '.join(expected)}, got {got}"


def not_finite() -> str:
    """A clause: a number is infinite or NaN, which JSON cannot hold."""
    return "numbers must be finite"
