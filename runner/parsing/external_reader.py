"""What another library reads of a turn: what such a reader has to do, and its calls as ours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from runner.parsing.call_reader import CallsReading, ReadCall, Schemas
from runner.parsing.literals import Unreadable, read_literal

__all__ = ["ExternalReader", "external_call"]


class ExternalReader(Protocol):
    """Reads calls in a format that the user named, whatever the chat template writes. It has no state."""

    name: str
    """The format as the user named it, such as "vllm:hermes"."""

    def read(self, text: str, ids: Sequence[int], begin: int, schemas: Schemas) -> CallsReading:
        """The content and the calls of a turn, and never an exception: what cannot be read is a call with an error.

        Args:
            text: what the model said.
            ids: the ids that say it; they may go on behind the text.
            begin: where in the text the content begins, behind the thought.
            schemas: the tools that may be called.
        """
        ...


def external_call(name: Any, arguments: Any, call_id: Any = None) -> ReadCall:
    """A call that another library has read; the arguments are an object or the text of one."""
    if not isinstance(name, str) or not name.strip():
        return ReadCall("", error="the name of a tool is missing")
    try:
        read = _as_object(arguments)
    except Unreadable as error:
        return ReadCall(name, error=str(error))
    return ReadCall(name, read, call_id if isinstance(call_id, str) else None)


def _as_object(arguments: Any) -> Mapping[str, Any]:
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if isinstance(arguments, str):
        text = arguments
        arguments, end = read_literal(text)
        if text[end:].strip():
            raise Unreadable(f"{text[end : end + 20].strip()!r} stands behind its arguments")
    if not isinstance(arguments, dict):
        raise Unreadable("its arguments must be a JSON object")
    try:
        json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Unreadable(f"its arguments are no JSON object: {error}") from None
    return arguments
