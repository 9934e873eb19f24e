"""Reads tools, tool choices and calls of Chat Completions: functions, and custom tools with a text argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from runner.endpoint.refusals import Refused
from runner.endpoint.request_body import bad, field_of, listed
from runner.endpoint.response_items import CUSTOM_PARAMETERS, custom_arguments, minted
from runner.options import ToolChoice

__all__ = ["read_chat_choice", "read_chat_messages", "read_chat_tools"]

T = TypeVar("T")


def read_chat_tools(
    body: Mapping[str, Any], not_granted: dict[str, Any]
) -> tuple[list[dict[str, Any]], frozenset[str]]:
    """Return the tools of a request, all as functions, and the names of those that are custom tools.

    Tools that a provider would run are left out, and recorded as not granted.

    Raises:
        Refused: a custom tool has no name, or a part of it has the wrong type; the message has its index.
    """
    tools, custom = list[dict[str, Any]](), set[str]()
    for index, tool in enumerate(listed(body, "tools")):
        kind = tool.get("type")
        if kind is None and isinstance(tool.get("function"), dict):
            kind, tool = "function", {**tool, "type": "function"}
        if isinstance(kind, str) and kind and kind not in ("function", "custom"):
            not_granted.setdefault("tools", []).append(kind)
            continue
        if kind != "custom":
            tools.append(tool)
            continue
        where = f"tools[{index}].custom"
        given = _inner(tool, f"tools[{index}]", "custom", dict, {})
        name = given.get("name")
        if not isinstance(name, str) or not name:
            bad(f"{where}.name: give the tool's name, not {name!r:.60}.")
        description = _inner(given, where, "description", str, "") + _grammar(given, where)
        function = {"name": name, "description": description, "parameters": dict(CUSTOM_PARAMETERS)}
        tools.append({"type": "function", "function": function})
        custom.add(name)
    return tools, frozenset(custom)


def _grammar(given: Mapping[str, Any], where: str) -> str:
    """Return the part of a custom tool's description with the grammar of its text."""
    form = _inner(given, where, "format", dict, {})
    grammar = _inner(form, f"{where}.format", "grammar", dict, {})
    definition = grammar.get("definition")
    if form.get("type") != "grammar" or not isinstance(definition, str):
        return ""
    return f"\n\nThe input is written by this {grammar.get('syntax')} grammar:\n{definition}"


def read_chat_choice(body: Mapping[str, Any], not_granted: dict[str, Any]) -> ToolChoice | None:
    """Return the tool choice: "auto", "none", "required" or the name of a tool.

    Raises:
        Refused: it is not a choice between tools.
    """
    given = body.get("tool_choice")
    if given is None or given in ("auto", "none", "required"):
        return given
    if isinstance(given, Mapping) and given.get("type") == "allowed_tools":
        return _allowed(_inner(given, "tool_choice", "allowed_tools", dict, {}), not_granted)
    name = _chosen(given)
    if not name:
        bad(
            "tool_choice: give auto, none, required, "
            '{"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", "allowed_tools": ...}, '
            f"not {given!r:.80}."
        )
    return name


def _chosen(given: Any) -> str:
    """Return the name of the chosen tool, or ""."""
    for kind in ("function", "custom"):
        tool = given.get(kind) if isinstance(given, Mapping) else None
        name = tool.get("name") if isinstance(tool, Mapping) else None
        if isinstance(name, str):
            return name
    return ""


def _allowed(given: Mapping[str, Any], not_granted: dict[str, Any]) -> ToolChoice:
    """Return the mode. The list of allowed tools is enforced only if it requires a single one."""
    mode = given.get("mode")
    if mode not in ("auto", "required"):
        bad(f"tool_choice.allowed_tools.mode: give auto or required, not {mode!r:.60}.")
    allowed = [
        name for tool in _inner(given, "tool_choice.allowed_tools", "tools", list, []) if (name := _chosen(tool))
    ]
    if mode == "required" and len(allowed) == 1:
        return allowed[0]
    not_granted["allowed_tools"] = allowed
    return str(mode)


def read_chat_messages(messages: Sequence[Any]) -> list[Any]:
    """Return the messages with calls of custom tools as calls of functions, and with a refusal as content."""
    return [_message(each) if isinstance(each, dict) else each for each in messages]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if role == "tool" and isinstance(message.get("tool_call_id"), str):
        answered = minted(message["tool_call_id"])
        return message if answered == message["tool_call_id"] else {**message, "tool_call_id": answered}
    return _assistant(message) if role == "assistant" else message


def _assistant(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if isinstance(calls, list) and any(isinstance(call, dict) and call.get("type") == "custom" for call in calls):
        message = {**message, "tool_calls": [_call(call) for call in calls]}
    for name in ("reasoning", "reasoning_content"):
        thought = message.get(name)
        if thought is not None and not isinstance(thought, str):
            message = {**message, name: _text_of(thought)}
    if not message.get("content") and isinstance(message.get("refusal"), str):
        message = {**message, "content": message["refusal"], "refusal": None}
    return message


def _text_of(parts: Any) -> str | None:
    """Return the text of reasoning that came in parts; None without any, so that the turn is recognized without it."""
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "".join(text for text in texts if isinstance(text, str)) or None


def _call(call: Any) -> Any:
    custom = call.get("custom") if isinstance(call, dict) and call.get("type") == "custom" else None
    if not isinstance(custom, dict) or not isinstance(custom.get("input"), str) or not isinstance(call.get("id"), str):
        return call
    function = {"name": custom.get("name"), "arguments": custom_arguments(call["id"], custom["input"])}
    return {"id": minted(call["id"]), "type": "function", "function": function}


def _inner(holder: Mapping[str, Any], where: str, name: str, kind: type[T], default: T) -> T:
    """Return a field of an object that is itself a field."""
    try:
        return field_of(holder, name, kind, default)
    except Refused as refused:
        bad(f"{where}.{refused.message}")
