"""Files of traces that other libraries wrote: OpenEnv's TrainingTrace, episodes of verifiers, and rows like TRL's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from runner.errors import BadBatch
from runner.quantities import counted
from runner.trainers.openenv import read_training_trace
from runner.trainers.traced_call import TracedCall, ids_of, list_of, logprobs_of, mask_of

__all__ = ["Trace", "read_traces"]

VERIFIERS_VERSION: Final = 1
"""The version of verifiers' trace schema that is read."""

_FORMATS: Final = (
    "Give OpenEnv's TrainingTrace (turns), an episode or trace of verifiers (traces or nodes), or rows with prompt_ids "
    "and completion_ids; one JSON object, a list, or an object in each line."
)
_DATABASE: Final = b"SQLite format 3"


@dataclass(frozen=True, slots=True)
class Trace:
    """The engine calls of one episode, or of one agent of an episode."""

    where: str
    """Place of the trace in the file, such as "line 3"; "" if the file has only this trace."""
    form: str
    """Format of the trace: "openenv", "verifiers" or "rows"."""
    calls: Sequence[TracedCall]
    """The calls in order."""


def read_traces(path: str | Path, *, vocabulary: int | None = None) -> Iterator[Trace]:
    """Yield the traces of a JSON or JSON Lines file.

    Args:
        path: the file.
        vocabulary: the number of ids of the model; an id at or above it is an error. None for no maximum.

    Raises:
        BadBatch: the file cannot be read or is not JSON; or a trace is malformed, or has an unknown format or schema
            version. The message names the file, the place and the field.
    """
    found = False
    for where, record in _records(Path(path)):
        found = True
        try:
            yield from _traces(where, record, vocabulary)
        except BadBatch as error:
            raise BadBatch(f"{path}: {where}{': ' if where else ''}{error}") from None
    if not found:
        raise BadBatch(f"{path} is empty. {_FORMATS}")


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, value) for the JSON values of a file: each line, or one document, or the items of a list.

    Raises:
        BadBatch: the file cannot be read, is not JSON, or is a run file.
    """
    try:
        with path.open("rb") as file:
            lines = enumerate(file, 1)
            number, first = next(((number, line) for number, line in lines if line.strip()), (0, b""))
            if first.startswith(_DATABASE):
                raise BadBatch(f"{path} is a run file: use `deltarunner verify {path}`.")
            value = _parsed(first)
            if isinstance(value, Mapping):
                yield f"line {number}", value
                for number, line in lines:
                    if line.strip():
                        yield f"line {number}", _required(path, f"line {number}", line)
                return
            rest = file.read()
    except OSError as error:
        raise BadBatch(f"{path} cannot be read: {error.strerror or error}. Give a readable file.") from None
    if first:
        value = _required(path, f"line {number}" if not rest else "the document", first + rest)
        yield from ((f"item {n}", each) for n, each in enumerate(value)) if isinstance(value, list) else (("", value),)


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _required(path: Path, where: str, text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        begin = text.strip()[:40].decode(errors="replace")
        raise BadBatch(f"{path}: {where} is not JSON ({error}); it begins with {begin!r}. {_FORMATS}") from None


def _traces(where: str, record: Any, vocabulary: int | None) -> Iterator[Trace]:
    inner = record.get("trace") if isinstance(record, Mapping) else None
    # `deltarunner export --format openenv` puts each trace under "trace".
    record = inner if isinstance(inner, Mapping) else record
    if not isinstance(record, Mapping):
        raise BadBatch(f"{record!r:.60} is not a trace. {_FORMATS}")
    if "turns" in record:
        yield Trace(where, "openenv", read_training_trace(record, vocabulary=vocabulary))
    elif isinstance(record.get("traces"), list):
        for number, trace in enumerate(record["traces"]):
            yield Trace(_within(where, f"trace {number}"), "verifiers", _verifiers_calls(trace, vocabulary))
    elif "nodes" in record:
        yield Trace(where, "verifiers", _verifiers_calls(record, vocabulary))
    elif "completion_ids" in record:
        for number, row in enumerate(_rows(record)):
            place = where if row is record else _within(where, f"row {number}")
            yield Trace(place, "rows", _row_calls(row, vocabulary))
    else:
        raise BadBatch(
            f"the fields {', '.join(map(str, record))!r:.120} are not those of a known trace format. {_FORMATS}"
        )


def _within(where: str, inner: str) -> str:
    return f"{where}, {inner}" if where else inner


# --- verifiers


def _verifiers_calls(trace: Any, vocabulary: int | None) -> list[TracedCall]:
    """Return the calls of a trace. Each sampled node is a call, and the nodes on the path to it are its prompt."""
    if not isinstance(trace, Mapping):
        raise BadBatch(f"the trace is {trace!r:.40}: give an object.")
    version = trace.get("version", VERIFIERS_VERSION)
    if version != VERIFIERS_VERSION:
        raise BadBatch(f"the trace has version {version!r:.30}, and only version {VERIFIERS_VERSION} can be read.")
    nodes = [_TraceNode.read(number, node, vocabulary) for number, node in enumerate(list_of("trace", trace, "nodes"))]
    calls = [_call_of(nodes, number) for number, node in enumerate(nodes) if node.sampled]
    if calls and not any(node.ids for node in nodes):
        raise BadBatch("the trace has no token ids: its client was of type eval. Use a client of type train.")
    return calls


@dataclass(frozen=True, slots=True)
class _TraceNode:
    """One message of a trace of verifiers."""

    parent: int | None
    sampled: bool
    message: Mapping[str, Any]
    ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    tools: list[Mapping[str, Any]]

    @classmethod
    def read(cls, number: int, node: Any, vocabulary: int | None) -> _TraceNode:
        where = f"node {number}"
        if not isinstance(node, Mapping) or not isinstance(node.get("message"), Mapping):
            raise BadBatch(f"{where} is {node!r:.40}: give an object with a message.")
        parent = node.get("parent")
        if parent is not None and (type(parent) is not int or not 0 <= parent < number):
            raise BadBatch(f"{where}: parent is {parent!r:.30}: give the number of an earlier node, or null.")
        optional = {"token_ids": [], "mask": [], "logprobs": [], **node}
        ids, sampled = ids_of(where, optional, "token_ids", vocabulary), bool(node.get("sampled"))
        mask = mask_of(where, optional, "mask", len(ids), counted(len(ids), "id"))
        if any(mask) and not sampled:
            raise BadBatch(
                f"{where}: mask is true for {counted(sum(mask), 'id')}, but sampled is false: set sampled to true, or "
                "mask to false."
            )
        logprobs = logprobs_of(where, optional, "logprobs", sum(mask)) if optional["logprobs"] else []
        tools = [_openai_tool(tool) for tool in node.get("tools") or ()]
        return cls(parent, sampled, _openai_message(node["message"]), ids, mask, logprobs, tools)


def _call_of(nodes: Sequence[_TraceNode], number: int) -> TracedCall:
    node, before = nodes[number], list[_TraceNode]()
    parent = node.parent
    while parent is not None:
        before.append(nodes[parent])
        parent = nodes[parent].parent
    before.reverse()
    begin = node.mask.index(True) if True in node.mask else len(node.ids)
    root = before[0] if before else node
    return TracedCall(
        node_id=f"node {number}",
        prompt_ids=(*(token_id for each in before for token_id in each.ids), *node.ids[:begin]),
        token_ids=tuple(node.ids[begin:]),
        logprobs=tuple(node.logprobs),
        mask=tuple(node.mask[begin:]),
        messages=tuple(each.message for each in before),
        reply=node.message,
        tools=tuple(root.tools),
    )


def _openai_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_openai_call(call) for call in calls]}


def _openai_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    if "function" in call:
        return call
    function = {"name": call.get("name"), "arguments": call.get("arguments")}
    return {"id": call.get("id"), "type": "function", "function": function}


def _openai_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    if "function" in tool:
        return tool
    function = {key: value for key, value in tool.items() if key != "type" and value is not None}
    return {"type": "function", "function": function}


# --- rows


def _rows(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rows of a record: the record itself, or the rows of a dict of columns, as TRL has them."""
    columns = list_of("row", record, "completion_ids")
    if not columns or not isinstance(columns[0], list):
        return [record]
    uneven = next(
        (name for name, each in record.items() if not isinstance(each, list) or len(each) != len(columns)), ""
    )
    if uneven:
        raise BadBatch(
            f"{uneven} is not a list of {len(columns)} values, as completion_ids is: give {len(columns)} values."
        )
    return [{name: column[number] for name, column in record.items()} for number in range(len(columns))]


def _row_calls(row: Mapping[str, Any], vocabulary: int | None) -> list[TracedCall]:
    """Return the calls of a row. Each span of sampled ids is a call, and all ids before the span are its prompt."""
    prompt, completion = (ids_of("row", row, name, vocabulary) for name in ("prompt_ids", "completion_ids"))
    name = next((each for each in ("env_mask", "tool_mask", "completion_mask") if row.get(each) is not None), "")
    length = len(completion)
    mask = mask_of("row", row, name, length, f"{length} completion_ids") if name else [True] * length
    logprobs = logprobs_of("row", row, "logprobs", length) if row.get("logprobs") is not None else []
    spans = []
    for sampled, places in groupby(range(length), key=mask.__getitem__):
        if sampled:
            whole = list(places)
            spans.append((whole[0], whole[-1] + 1))
    messages = _row_messages(row)
    replies = [n for n, message in enumerate(messages) if message.get("role") == "assistant"]
    if messages and len(replies) < len(spans):
        raise BadBatch(
            f"row: {counted(len(spans), 'span')} of sampled ids, but only "
            f"{counted(len(replies), 'assistant message')}: give an assistant message for each span."
        )
    replies = replies[len(replies) - len(spans) :]
    make = partial(TracedCall, tools=tuple(row.get("tools") or ()))
    return [
        make(
            node_id=f"span {number}",
            prompt_ids=(*prompt, *completion[:begin]),
            token_ids=tuple(completion[begin:end]),
            logprobs=tuple(logprobs[begin:end]),
            mask=(True,) * (end - begin),
            messages=tuple(messages[: replies[number]]) if messages else (),
            reply=messages[replies[number]] if messages else None,
        )
        for number, (begin, end) in enumerate(spans)
    ]


def _row_messages(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The messages of a row, or of its prompt and completion; an empty list if they are not messages."""
    parts = [row.get("messages")] if row.get("messages") else [row.get("prompt"), row.get("completion")]
    if not all(isinstance(part, list) and all(isinstance(each, Mapping) for each in part) for part in parts):
        return []
    return [each for part in parts if isinstance(part, list) for each in part]
