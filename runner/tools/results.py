"""Text of tool results for a model: strings unchanged, everything else as JSON."""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_jsonable_python

from runner import wording
from runner.tools.mcp_results import mcp_text

__all__ = ["result_text"]

_NEVER_MCP: Final = frozenset({int, float, bool, type(None), bytes, set, frozenset})
"""Types that cannot be results of the Model Context Protocol."""


def result_text(value: Any) -> str:
    """Return the text of a tool's result: strings unchanged, everything else as JSON, so None becomes "null".

    The empty string becomes "(empty)", since templates drop messages with empty content. Sets are sorted, so that the
    text is the same in every process. Results of the Model Context Protocol become their text.

    Raises:
        ToolError: the server of such a result reports a failed call.
        TypeError: the result has no JSON form; the tool should return a string.
    """
    if isinstance(value, str) and not isinstance(value, enum.Enum):
        return value or wording.EMPTY_RESULT
    if type(value) not in _NEVER_MCP:
        told = mcp_text(value, as_json=result_text)
        if told is not None:
            return told or wording.EMPTY_RESULT
    try:
        return _JSON.encode(value)
    except TypeError:
        return json.dumps(_jsonable(value), ensure_ascii=False)  # keys that are not strings, such as enums and dates


def _plain(value: Any) -> Any:
    """Convert one level of a value that JSON does not support; nested values are converted later."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=result_text)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, BaseModel):
        return value.model_dump()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "tolist"):  # numpy and torch, without importing them
        return value.tolist()
    return _jsonable(value)


_JSON = json.JSONEncoder(ensure_ascii=False, default=_plain)


def _jsonable(value: Any) -> Any:
    try:
        return to_jsonable_python(value)
    except (PydanticSerializationError, UnicodeDecodeError):
        kind = type(value).__name__
        raise TypeError(f"a tool returned a {kind}, which has no JSON form: return a string instead") from None
