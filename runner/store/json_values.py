"""JSON for run files: encoding of any value, and decoding."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import BaseModel

__all__ = ["class_name", "decode_json", "encode_json", "encode_standard_json"]


def encode_json(value: Any) -> str:
    """The value as JSON. A value that JSON cannot hold becomes text.

    NaN and infinities become `NaN`, `Infinity` and `-Infinity`, which Python's JSON decoder reads.
    """
    try:
        data = orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS)
    except (TypeError, ValueError):
        # Python's encoder takes half a surrogate pair, and integers of more than 64 bits.
        return json.dumps(_with_text_keys(value))
    if b"null" in data and _has_strange_float(value):
        return json.dumps(_with_text_keys(value), ensure_ascii=False)
    return data.decode()


def encode_standard_json(value: Any) -> bytes:
    """The value as standard JSON: NaN and infinities are null."""
    try:
        return orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS)
    except (TypeError, ValueError):
        finite = json.loads(json.dumps(_with_text_keys(value)), parse_constant=lambda _: None)
        return json.dumps(finite).encode()


def decode_json(text: str) -> Any:
    """Return the value from the result of `encode_json`. orjson is not used: it rounds integers above 64 bits."""
    return json.loads(text)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    # orjson refuses subclasses of float and tuple, such as numpy.float64 and named tuples.
    if isinstance(value, float):
        return float(value)
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    # The text of a bare object holds its address, which differs from one process to the next.
    bare = f" at {id(value):#x}>" in (text := str(value))
    return f"<{class_name(type(value))}>" if bare else text


def _with_text_keys(value: Any) -> Any:
    """The value with text keys in all mappings; Python's encoder takes few other keys."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {_key(name): _with_text_keys(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_text_keys(item) for item in value]
    return _with_text_keys(_plain(value))


def _key(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value if isinstance(value, tuple) else _plain(value))


def _has_strange_float(value: Any) -> bool:
    if value is None or isinstance(value, str | int):  # nearly all values have these types; the code below is slow
        return False
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, Mapping):
        return any(map(_has_strange_float, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_strange_float, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(_has_strange_float(getattr(value, field.name)) for field in dataclasses.fields(value))
    return False


def class_name(cls: type) -> str:
    """The name of the class as `module:Class`, as the command line takes it."""
    return f"{cls.__module__}:{cls.__qualname__}"
