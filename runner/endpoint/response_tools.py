"""Tools of OpenAI's Responses: functions, custom tools, and namespaces of both. Other tools are dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.endpoint.request_body import bad, inner_field, listed
from runner.endpoint.response_items import CUSTOM_PARAMETERS, flat_name
from runner.options import ToolChoice

__all__ = ["OfferedTool", "OfferedTools", "read_tool_choice", "read_tools"]


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool as the client named it."""

    name: str
    """Name of the tool, without its namespace."""
    namespace: str = ""
    """Namespace of the tool; "" without one."""
    custom: bool = False
    """True if the tool takes a text instead of arguments."""


@dataclass(slots=True)
class OfferedTools:
    """The tools of a request."""

    tools: list[dict[str, Any]] = field(default_factory=list)
    """The tools that a model can call, in OpenAI's nested form."""
    by_name: dict[str, OfferedTool] = field(default_factory=dict)
    """The client's tools, by their names for the model."""
    dropped: list[str] = field(default_factory=list)
    """Types of the tools that are left out, since a provider would run them."""


def read_tools(given: Sequence[Mapping[str, Any]]) -> OfferedTools:
    """Read the tools of a request.

    Raises:
        Refused: a tool has no name, or a part of it has the wrong type; the message has its index.
    """
    offered = OfferedTools()
    for index, tool in enumerate(given):
        _read(offered, tool, f"tools[{index}]", "")
    return offered


def _read(offered: OfferedTools, tool: Mapping[str, Any], where: str, namespace: str) -> None:
    match tool.get("type"):
        case "function" | "custom" as kind:
            made = OfferedTool(_name(tool, where), namespace, custom=kind == "custom")
            flat = flat_name(made.name, namespace)
            description = inner_field(tool, where, "description", str, "")
            if made.custom:
                description, parameters = description + _grammar(tool, where), dict(CUSTOM_PARAMETERS)
            else:
                parameters = inner_field(tool, where, "parameters", dict, {})
            function = {"name": flat, "description": description, "parameters": parameters}
            offered.tools.append({"type": "function", "function": function})
            offered.by_name[flat] = made
        case "namespace" if not namespace:
            name = _name(tool, where)
            for index, inner in enumerate(inner_field(tool, where, "tools", list, [])):
                if not isinstance(inner, Mapping):
                    bad(f"{where}.tools[{index}]: give an object, not {inner!r:.60}.")
                _read(offered, inner, f"{where}.tools[{index}]", name)
        case str(kind) if kind:
            offered.dropped.append(kind)
        case other:
            bad(f"{where}.type: give the type of a tool, such as function, not {other!r:.60}.")


def _name(tool: Mapping[str, Any], where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        bad(f'{where}.name: give the name beside the type, as {{"type": "function", "name": ..., "parameters": ...}}.')
    return name


def _grammar(tool: Mapping[str, Any], where: str) -> str:
    """Return a text to append to a custom tool's description, with the grammar of its input; "" without a grammar."""
    form = inner_field(tool, where, "format", dict, {})
    definition = form.get("definition")
    if form.get("type") != "grammar" or not isinstance(definition, str):
        return ""
    return f"\n\nThe input is written by this {form.get('syntax')} grammar:\n{definition}"


def read_tool_choice(given: Any, not_granted: dict[str, Any]) -> ToolChoice | None:
    """Return the tool choice: "auto", "none", "required" or the name of a tool; None if the value is None.

    Raises:
        Refused: the value is not a valid choice between tools that a model can call.
    """
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind in ("function", "custom"):
        return _chosen(given, "tool_choice")
    if kind == "allowed_tools":
        return _allowed(given, not_granted)
    if given not in (None, "auto", "none", "required"):
        bad(
            "tool_choice: give auto, none, required, "
            f'{{"type": "function", "name": ...}} or {{"type": "allowed_tools", ...}}, not {given!r:.80}.'
        )
    return None if given is None else str(given)


def _chosen(given: Mapping[str, Any], where: str) -> str:
    namespace = given.get("namespace")
    return flat_name(_name(given, where), namespace if isinstance(namespace, str) else "")


def _allowed(given: Mapping[str, Any], not_granted: dict[str, Any]) -> ToolChoice:
    """Return the name of the allowed tool if there is only one and a call is required; otherwise, return the mode.

    In the second case, the list of allowed tools is recorded as not granted.
    """
    mode = given.get("mode")
    if mode not in ("auto", "required"):
        bad(f"tool_choice.mode: give auto or required, not {mode!r:.60}.")
    allowed = [
        _chosen(tool, f"tool_choice.tools[{index}]")
        for index, tool in enumerate(listed(given, "tools"))
        if tool.get("type") in ("function", "custom")
    ]
    if mode == "required" and len(allowed) == 1:
        return allowed[0]
    not_granted["allowed_tools"] = allowed
    return str(mode)
