"""By which header a client says who of it asks, a session, a thread, a sub-agent, and what for."""

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
"""The narrowest first: a sub-agent has the session of the agent that it serves."""

_MAX_LABEL_CHARACTERS: Final = 200


def label_of(headers: Headers) -> str:
    """The client's own name for who asks; "" where it says nothing."""
    named = next((headers[name] for name in _LABELS if headers.get(name)), "")
    return (named or _told_by_codex(headers, "thread_id"))[:_MAX_LABEL_CHARACTERS]


def purpose_of(headers: Headers) -> str:
    """What the client says that it asks for, such as `turn` or `compaction`; "" where it says nothing."""
    return (_told_by_codex(headers, "request_kind") or headers.get("x-openai-subagent", ""))[:_MAX_LABEL_CHARACTERS]


def _told_by_codex(headers: Headers, name: str) -> str:
    """What Codex says of a turn in a header that holds JSON; a header that holds none says nothing."""
    try:
        told: Any = orjson.loads(headers.get("x-codex-turn-metadata", "null"))
    except orjson.JSONDecodeError:
        return ""
    value = told.get(name) if isinstance(told, dict) else None
    return value if isinstance(value, str) else ""
