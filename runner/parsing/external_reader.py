"""Interface for call parsers of other libraries, and conversion of their calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from runner.parsing.call_reader import CallsReading, ReadCall, Schemas
from runner.parsing.literals import Unreadable, read_literal

__all__ = ["ExternalReader", "external_call"]


class ExternalReader(Protocol):
    """Stateless reader of calls in a format that the user named. It does not depend on the chat template."""

    name: str
    """Format as the user named it, such as "vllm:hermes"."""

    def read(self, text: str, ids: Sequence[int], begin: int, schemas: Schemas) -> CallsReading:
        """Return the content and the calls of a turn. An unreadable call has an error; nothing is raised.

        Args:
            text: output of the model.
            ids: token ids of the text; further ids, such as a stop token, may follow.
            begin: position in the text at which the content begins, after the reasoning.
            schemas: tools that may be called.
        """
        ...


def external_call(name: Any, arguments: Any, call_id: Any = None) -> ReadCall:
    """Return a call that another library has read. `arguments` is an object, the JSON text of an object, or empty.

    If the name or the arguments are invalid, the call has its `error` set.
    """
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
            raise Unreadable(f"{text[end : end + 20].strip()!r} follows its arguments")
    if not isinstance(arguments, dict):
        raise Unreadable("its arguments must be a JSON object")
    try:
        json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Unreadable(f"its arguments are not a JSON object: {error}") from None
    return arguments
