"""Checks that a chat template can serve an environment with tools: it shows definitions, calls and results."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Final

from runner.errors import BadTemplate
from runner.tokens.probe_messages import CALL, QUESTION, RETURNED, TOOL, TOOLS, VALUE, View, result
from runner.tokens.template import Renderer, TemplateRaised

__all__ = [
    "IdUse",
    "ToolProperty",
    "id_use",
    "missing_tool_property",
    "require_tools",
    "shows_calls",
    "shows_results",
    "shows_tools",
]


class ToolProperty(enum.StrEnum):
    """A feature that a template needs for an environment with tools."""

    DEFINITIONS = "tool_definitions"
    CALLS = "tool_calls"
    RESULTS = "tool_results"


_MISSING = {
    ToolProperty.DEFINITIONS: "the template does not show the tools to the model",
    ToolProperty.CALLS: "the template drops the calls of an assistant turn",
    ToolProperty.RESULTS: "the template drops the results of a tool",
}


def require_tools(renderer: Renderer) -> None:
    """Check that a template shows tools, calls and results.

    Raises:
        BadTemplate: the template does not show one of them.
    """
    missing = missing_tool_property(renderer)
    if missing is not None:
        raise BadTemplate(
            f"template {renderer.template.name!r} cannot serve an environment with tools ({missing}): "
            f"{_MISSING[missing]}. Give --template pythonic, --template hermes, or the path of a .jinja file."
        )


def missing_tool_property(renderer: Renderer) -> ToolProperty | None:
    """Return the first feature that the template lacks for an environment with tools; None if it has all.

    The features are found by rendering.
    """
    if not shows_tools(renderer):
        return ToolProperty.DEFINITIONS
    if not shows_calls(renderer):
        return ToolProperty.CALLS
    return None if shows_results(renderer) else ToolProperty.RESULTS


def shows_tools(renderer: Renderer) -> bool:
    """Return True if the render contains the definitions of the tools."""
    return _shown(renderer, TOOL, [QUESTION], tools=True, asking=True)


def shows_calls(renderer: Renderer) -> bool:
    """Return True if the render contains a turn's calls, at the end or before a result, with or without tools."""
    return any(
        _shown(renderer, VALUE, [QUESTION, CALL, *answers], tools=tools)
        for answers in ((), (result(),))
        for tools in (False, True)
    )


def shows_results(renderer: Renderer) -> bool:
    """Return True if the render contains a tool's result."""
    return _shown(renderer, RETURNED, [QUESTION, CALL, result()], tools=True, asking=True)


class IdUse(enum.StrEnum):
    """A template's use of the ids of calls."""

    UNREAD = "unread"
    """The template neither shows nor checks ids."""
    READ = "read"
    """The template shows ids, or raises on some ids."""
    COUNTED = "counted"
    """The template shows calls by their number in the turn, and results by their ids, which must match."""


def id_use(renderer: Renderer) -> IdUse:
    """Return the template's use of the ids of calls, found by rendering."""
    found = IdUse.UNREAD
    for tools in (TOOLS, []):
        try:
            if _ID in renderer.render(_with_id(_ID), tools=tools):
                found = IdUse.READ
            shown = renderer.render(_with_id(f"functions.{TOOL}:7"), tools=tools)
        except TemplateRaised:
            return IdUse.READ
        if f"functions.{TOOL}:7" in shown and f"functions.{TOOL}:0" in shown:
            return IdUse.COUNTED
    return found


_ID: Final = "zqidentifierz"


def _with_id(call_id: str) -> list[View]:
    call: Any = CALL
    called = {**call, "tool_calls": [{**each, "id": call_id} for each in call["tool_calls"]]}
    return [QUESTION, called, {**result(), "tool_call_id": call_id}]


def _shown(renderer: Renderer, word: str, messages: Sequence[View], *, tools: bool, asking: bool = False) -> bool:
    try:
        return word in renderer.render(messages, tools=TOOLS if tools else [], generation_prompt=asking)
    except TemplateRaised:
        return False
