"""The nested columns of a Parquet export: messages, scores, tasks and sampling as lists and structs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from runner.messages import Message
from runner.options import Sampling
from runner.store.json_values import encode_standard_json
from runner.tasks import Task
from runner.trajectory import Turn

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "as_array",
    "message_type",
    "message_values",
    "sampling_type",
    "sampling_values",
    "scores_type",
    "task_type",
    "task_values",
    "tools_value",
]


def as_text(value: Any) -> str:
    """Any value as standard JSON text."""
    return encode_standard_json(value).decode()


def as_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array[Any]:
    """The values as an Arrow array. Half of a surrogate pair, which Arrow cannot store as text, becomes U+FFFD."""
    import pyarrow as pa

    if pa.types.is_null(kind):
        return pa.nulls(len(values))
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        return pa.array([_encodable(value) for value in values], kind)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, Mapping):
        return {name: _encodable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(inner) for inner in value]
    return value


# --- messages

_TEXTS: Final = ("role", "content", "reasoning_content", "tool_call_id", "name")
_KNOWN: Final = frozenset({*_TEXTS, "tool_calls"})


def message_type() -> pa.DataType:
    """The type of a message in OpenAI's form; further keys are JSON in `extra`."""
    import pyarrow as pa

    text = pa.string()
    function = pa.struct([("name", text), ("arguments", text)])
    call = pa.struct([("id", text), ("type", text), ("function", function)])
    fields = [("role", text), ("content", text), ("reasoning_content", text), ("tool_calls", pa.list_(call))]
    return pa.struct([*fields, ("tool_call_id", text), ("name", text), ("extra", text)])


def message_values(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """The values of messages; absent keys are null."""
    return [_message(message) for message in messages]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {name: message[name] for name in _TEXTS if isinstance(message.get(name), str)}
    if message.get("tool_calls"):
        made["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    # `extra` also has the keys of `_TEXTS` whose value is not text.
    extra = {name: value for name, value in message.items() if name not in made and value is not None}
    extra.pop("tool_calls", None)
    if extra:
        made["extra"] = as_text(extra)
    return made


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {
        "id": call.get("id"),
        "type": call.get("type", "function"),
        # The arguments are text. In a struct, each call would have the arguments of all other tools, as nulls.
        "function": {"name": function["name"], "arguments": as_text(function["arguments"])},
    }


def tools_value(tools: Sequence[Any]) -> str | None:
    """The schemas of tools as JSON, unchanged; None without tools."""
    return as_text(list(tools)) if tools else None


# --- scores


def scores_type(names: Iterable[str]) -> pa.DataType:
    """A struct with a number per name; the null type without names, since Parquet has no empty struct."""
    import pyarrow as pa

    fields = [(name, pa.float64()) for name in names]
    return pa.struct(fields) if fields else pa.null()


# --- tasks


def task_type() -> pa.DataType:
    """The type of a task; `info` is JSON text."""
    import pyarrow as pa

    text = pa.string()
    return pa.struct([("id", text), ("prompt", pa.list_(message_type())), ("answer", text), ("info", text)])


def task_values(task: Task, prompt: Iterable[Message]) -> dict[str, Any]:
    """The values of a task; fields that the author's class adds are in `info`."""
    own = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    for name in ("id", "prompt", "answer"):
        del own[name]
    info = {**own.pop("info"), **own}
    return {"id": task.id, "prompt": message_values(prompt), "answer": task.answer, "info": as_text(info)}


# --- sampling

_LISTS: Final = {"stop": "string", "bad_words": "string", "choice": "string", "stop_ids": "int64"}
_KINDS: Final = {"int": "int64", "float": "float64", "bool": "bool"}


def sampling_type() -> pa.DataType:
    """The type of a turn's sampling, with the fields of `Sampling`."""
    import pyarrow as pa

    def kind(field: dataclasses.Field[Any]) -> pa.DataType:
        named: Any = _LISTS.get(field.name) or _KINDS.get(str(field.type).partition(" ")[0], "string")
        plain: pa.DataType = pa.type_for_alias(named)
        return pa.list_(plain) if field.name in _LISTS else plain

    return pa.struct([(field.name, kind(field)) for field in dataclasses.fields(Sampling)])


def sampling_values(turn: Turn) -> dict[str, Any] | None:
    """The sampling of a turn; None if no run sampled the turn."""
    if turn.sampling is None:
        return None
    given = turn.sampling.given()
    for name, value in given.items():
        if isinstance(value, Mapping):
            given[name] = as_text(value)
        elif name in _LISTS and value is not None:
            given[name] = list(value)
    return given
