"""Text of tool results for a model: strings unchanged, everything else as JSON."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_jsonable_python

from runner import wording
from runner.errors import ToolError

__all__ = ["result_text"]

_NEVER_MCP: Final = frozenset({int, float, bool, type(None), bytes, set, frozenset})
"""Types that cannot be results of the Model Context Protocol."""


def result_text(value: Any) -> str:
    """Return the text of a tool's result: strings unchanged, everything else as JSON, so None becomes "null".

    The empty string becomes "(empty)", since templates drop messages with empty content. Sets are sorted, so that the
    text is the same in every process. Results of the Model Context Protocol become their text.

    Raises:
        ToolError: a result of the Model Context Protocol reports a failed call.
        TypeError: the result has no JSON form; the tool should return a string.
    """
    if isinstance(value, str) and not isinstance(value, enum.Enum):
        return value or wording.EMPTY_RESULT
    if type(value) not in _NEVER_MCP:
        text = _mcp_text(value)
        if text is not None:
            return text or wording.EMPTY_RESULT
    try:
        return _JSON.encode(value)
    except TypeError:
        return json.dumps(_jsonable(value), ensure_ascii=False)  # some keys are not strings, such as enums and dates


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
    if hasattr(value, "tolist"):  # values of numpy and torch, recognised without importing these libraries
        return value.tolist()
    return _jsonable(value)


_JSON = json.JSONEncoder(ensure_ascii=False, default=_plain)


def _jsonable(value: Any) -> Any:
    try:
        return to_jsonable_python(value)
    except (PydanticSerializationError, UnicodeDecodeError):
        kind = type(value).__name__
        raise TypeError(f"a tool returned a {kind}, which has no JSON form: return a string instead") from None


# --- results of the Model Context Protocol, recognised by their form, so that any client's results work

_MCP_KINDS: Final = frozenset({"text", "image", "audio", "resource", "resource_link"})
_NOTHING: Final = object()


def _mcp_text(value: Any) -> str | None:
    """Return the text of an MCP tool result, of content blocks, or of a resource that was read; None for other values.

    Text is kept, with one paragraph per block. Images, audio and links are described, since a text model cannot use
    them. Structured content is appended unless the text has the same value.

    Raises:
        ToolError: the server reports a failed call; the error has the result's text.
    """
    if _is_list(value):
        return _joined(value) if value and all(map(_is_content, value)) else None
    if _is_content(value):
        return _joined([value])
    resources = _get(value, "contents")
    if _is_list(resources) and not isinstance(value, Mapping) and all(_get(each, "uri") for each in resources):
        return "\n\n".join(map(_of_resource, resources))
    content, is_error = _get(value, "content"), _get(value, "is_error", "isError")
    if not isinstance(is_error, bool) or not _is_list(content) or not all(map(_is_block, content)):
        return None
    text = _joined(content)
    structured = _get(value, "structured_content", "structuredContent")
    if structured is not _NOTHING and structured is not None and not _equals_structured(content, structured):
        text = "\n\n".join(filter(None, [text, result_text(structured)]))
    if is_error:
        raise ToolError(text or "the server gave no reason")
    return text


def _joined(blocks: Sequence[Any]) -> str:
    return "\n\n".join(map(_of_block, blocks))


def _of_block(block: Any) -> str:
    match kind := _get(block, "type"):
        case "text":
            return str(_get(block, "text"))
        case "resource":
            return _of_resource(_get(block, "resource"))
        case "resource_link":
            said = [_get(block, name) for name in ("name", "uri", "description")]
            return f"[resource {': '.join(str(each) for each in said if each is not _NOTHING and each)}]"
        case _:
            return f"[{kind}, {_media(block)}]"


def _of_resource(resource: Any) -> str:
    text = _get(resource, "text")
    return text if isinstance(text, str) else f"[resource {_get(resource, 'uri')}, {_media(resource)}]"


def _media(block: Any) -> str:
    data = _get(block, "data", "blob")
    size = len(data) * 3 // 4 if isinstance(data, str) else 0  # bytes of the data, from its base64 text
    kind = _get(block, "mime_type", "mimeType")
    return f"{kind if isinstance(kind, str) else 'of unknown type'}, {size:,} bytes"


def _equals_structured(content: Sequence[Any], structured: Any) -> bool:
    """Return whether the text blocks have the same value as the structured content.

    Servers wrap lists, texts and numbers as `{"result": value}`; then the blocks may also have the value alone.
    """
    said = list(_values(content))
    wrapped = [structured["result"]] if isinstance(structured, Mapping) and list(structured) == ["result"] else []
    return any(said in ([each], each) for each in (structured, *wrapped))


def _values(content: Sequence[Any]) -> Iterator[Any]:
    for block in content:
        text = _get(block, "text")
        try:
            yield json.loads(text)
        except (TypeError, ValueError):
            yield text


def _is_content(value: Any) -> bool:
    """Return whether a value is a content block; other objects with a `type` are excluded."""
    return _is_block(value) and _get(value, "type") in _MCP_KINDS and hasattr(value, "annotations")


def _is_block(value: Any) -> bool:
    kind = _get(value, "type")
    return isinstance(_get(value, "text") if kind == "text" else kind, str)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _get(value: Any, *names: str) -> Any:
    """Return the value for the first of these names that an object or a mapping has; `_NOTHING` if it has none."""
    for name in names:
        found = value.get(name, _NOTHING) if isinstance(value, Mapping) else getattr(value, name, _NOTHING)
        if found is not _NOTHING:
            return found
    return _NOTHING
