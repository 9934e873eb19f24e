"""By which header a client says who of it asks: a session, a thread, a sub-agent."""

from __future__ import annotations

from typing import Final

from runner.endpoint.wire import Headers

__all__ = ["label_of"]

_LABELS: Final = (
    "x-deltarunner-thread",
    "x-claude-code-agent-id",
    "thread-id",
    "x-session-id",
    "x-claude-code-session-id",
    "session-id",
)
"""The narrowest first: a sub-agent has the session of the agent that it serves."""


def label_of(headers: Headers) -> str:
    """The client's own name for who asks; "" where it says nothing."""
    return next((headers[name] for name in _LABELS if headers.get(name)), "")[:200]
