"""Words of a recording that filler does not replace: words of wire formats in their places, and identifiers."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["IDENTIFIER", "KEPT", "STAYS"]

IDENTIFIER: Final = re.compile(r"[$@-]?[A-Za-z_][\w.-]{0,39}", re.ASCII)
"""A key: one word, without spaces."""

_TYPES: Final = frozenset(
    {
        "text",
        "thinking",
        "redacted_thinking",
        "tool_use",
        "tool_result",
        "function",
        "function_call",
        "function_call_output",
        "message",
        "reasoning",
        "custom",
        "custom_tool_call",
        "custom_tool_call_output",
        "namespace",
        "web_search",
        "input_text",
        "output_text",
        "reasoning_text",
        "summary_text",
        "refusal",
        "object",
        "string",
        "number",
        "integer",
        "boolean",
        "array",
        "null",
        "ephemeral",
        "adaptive",
        "enabled",
        "disabled",
        "auto",
        "any",
        "tool",
        "none",
        "json_schema",
        "json_object",
        "grammar",
    }
)

KEPT: Final[dict[str, frozenset[str]]] = {
    "type": _TYPES,
    "role": frozenset({"system", "developer", "user", "assistant", "tool"}),
    "status": frozenset({"completed", "incomplete", "in_progress"}),
    "tool_choice": frozenset({"auto", "none", "required"}),
    "include": frozenset({"reasoning.encrypted_content", "message.output_text.logprobs"}),
    "request_kind": frozenset({"turn", "compaction"}),
    "effort": frozenset({"minimal", "low", "medium", "high"}),
    "syntax": frozenset({"lark", "regex"}),
}
"""The words that stay, by the key whose value they are."""

STAYS: Final[dict[str, re.Pattern[str]]] = {
    "required": IDENTIFIER,
    "$ref": re.compile(r"#(/[$\w]{1,40}){1,4}", re.ASCII),
}
"""Pattern of the values that stay, by their key in a schema."""
