"""Results of tools as a model reads them: text as it is, everything else as JSON."""

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
"""Kinds of results at which nobody has to look."""


def result_text(value: Any) -> str:
    """A tool's result as the model reads it: strings as they are, everything else as JSON, so None as "null".

    The empty string is told as "(empty)", since templates drop a message whose content is empty.
    Sets are sorted, so that the text is the same in every process. A result of the Model Context Protocol is its text.

    Raises:
        ToolError: the server of such a result says that the call failed.
        TypeError: JSON cannot say it; the author should return a string.
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
    """One level of a value that JSON does not know; what is inside comes by in its turn."""
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
