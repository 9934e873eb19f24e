"""Headers with which a client labels its requests: the session, thread or sub-agent, and the purpose."""

from __future__ import annotations

from typing import Any, Final

import orjson

from runner.endpoint.wire_form import Headers

__all__ = ["label_of", "purpose_of"]

_LABELS: Final = (
    "x-deltarunner-thread",
    "x-claude-code-agent-id",
    "thread-id",
    "x-session-id",
    "x-claude-code-session-id",
    "session-id",
)
"""The narrowest first: a sub-agent has the session of its parent agent."""

_MAX_LABEL_CHARACTERS: Final = 200


def label_of(headers: Headers) -> str:
    """Return the client's own name for the caller; "" without one."""
    named = next((headers[name] for name in _LABELS if headers.get(name)), "")
    return (named or _codex_field(headers, "thread_id"))[:_MAX_LABEL_CHARACTERS]


def purpose_of(headers: Headers) -> str:
    """Return the purpose of a request, such as `turn` or `compaction`; "" without one."""
    return (_codex_field(headers, "request_kind") or headers.get("x-openai-subagent", ""))[:_MAX_LABEL_CHARACTERS]


def _codex_field(headers: Headers, name: str) -> str:
    """Return a field of Codex's header with JSON; "" if the header is missing or not JSON."""
    try:
        fields: Any = orjson.loads(headers.get("x-codex-turn-metadata", "null"))
    except orjson.JSONDecodeError:
        return ""
    value = fields.get(name) if isinstance(fields, dict) else None
    return value if isinstance(value, str) else ""
