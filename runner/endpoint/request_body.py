"""Fields of bodies and headers that several wire forms share. A refusal names the wrong field."""

from __future__ import annotations

import codecs
import itertools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeVar

import orjson

from runner.chat_requests import ChatCall
from runner.endpoint.refusals import Reason, Refused
from runner.endpoint.wire_form import Headers
from runner.errors import BadOption
from runner.messages import canonical_json
from runner.options import Sampling, ToolChoice
from runner.sampling_fields import SAMPLING_FIELDS

__all__ = [
    "SAMPLING_NUMBERS",
    "bad",
    "check_size",
    "constraint_of",
    "decode_body",
    "field_of",
    "inner_field",
    "json_schema",
    "label_of",
    "listed",
    "most_tokens",
    "note_unread",
    "number",
    "purpose_of",
    "sampling_of",
    "stops",
    "with_constraint",
]


T = TypeVar("T")

MAX_MESSAGES: Final = 10_000
"""Maximum number of messages, or items, of a history."""

MAX_CALLS: Final = 10_000
"""Maximum number of tool calls of a history."""

MAX_TOOLS: Final = 2_000
"""Maximum number of tools of a request."""

MAX_TOOL_BYTES: Final = 512 * 1024
"""Maximum size of a tool as JSON."""

MAX_VALUES: Final = 500_000
"""Maximum number of JSON values of a body. Parsing a million values takes a second, during which nothing else runs."""

_CALLS_OF: Final = operator.methodcaller("get", "tool_calls")

_KINDS: Final = {str: "a string", bool: "true or false", dict: "an object", list: "a list", int: "a whole number"}

_OF_SAMPLING: Final = re.compile(r"\ASampling\((\w+)=(.*?)\): ", re.DOTALL)
"""Beginning of an error about a field of `Sampling`. In a refusal, it is shortened to the field and its value."""

SAMPLING_NUMBERS: Final = tuple(
    name for name, row in SAMPLING_FIELDS.items() if row.number and name not in ("max_tokens", "logprobs")
)
"""Numeric fields of `Sampling` that a body has under the same name."""


def bad(message: str) -> NoReturn:
    """Raise Refused with this message, since the request is invalid."""
    raise Refused(Reason.INVALID, message)


def decode_body(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a body.

    Raises:
        Refused: the body is not a JSON object, or has too many messages or values.
    """
    if _may_hold_more(raw) and (values := _values_in(raw)) > MAX_VALUES:
        bad(f"the body has {values:,} values, more than {MAX_VALUES:,}: send a shorter history or fewer tools.")
    raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        try:
            body = orjson.loads(_ESCAPE.sub(_without_half, raw))
        except orjson.JSONDecodeError:
            bad(f"the body is not JSON ({error}): send an object.")
    if not isinstance(body, dict):
        bad(f"the body is a JSON {type(body).__name__}: send an object.")
    for name in ("messages", "input"):
        given = body.get(name)
        if isinstance(given, list) and len(given) > MAX_MESSAGES:
            bad(f"{name}: the list has {len(given):,} items, more than {MAX_MESSAGES:,}: send a shorter history.")
    return body


_ESCAPE: Final = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<half>u[dD][89a-fA-F]..)|.)", re.DOTALL)


def _without_half(found: re.Match[bytes]) -> bytes:
    """Return an escape, or U+FFFD for an unpaired surrogate, which JavaScript writes if it cuts a text in two."""
    return found[0] if found["half"] is None else b"\\ufffd"


def _may_hold_more(raw: bytes) -> bool:
    """Return True if a body may have too many values. The count of separators includes separators inside of strings."""
    return raw.count(b",") + raw.count(b"{") + raw.count(b"[") > MAX_VALUES


def _values_in(raw: bytes) -> int:
    """Return the number of values in a body; only a lower bound if it has very many strings or is not JSON."""
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = bare.count(b'"') // 2
    if strings > 2 * MAX_VALUES:  # the strings include keys
        return strings // 2
    outside = b"".join(bare.split(b'"')[::2])
    return outside.count(b",") + outside.count(b"{") + outside.count(b"[")


def check_size(chat_call: ChatCall) -> None:
    """Check that the prompt of a request does not take a long time to create.

    Raises:
        Refused: the request has too many tools or calls, or a tool is too large; the message has the limit.
    """
    if len(chat_call.tools) > MAX_TOOLS:
        bad(f"the request has {len(chat_call.tools):,} tools, more than {MAX_TOOLS:,}: offer fewer tools.")
    made = map(_CALLS_OF, filter(dict.__instancecheck__, chat_call.messages))
    calls = sum(map(len, filter(list.__instancecheck__, made)))
    if calls > MAX_CALLS:
        bad(f"the history has {calls:,} calls of tools, more than {MAX_CALLS:,}: send a shorter history.")
    for index, tool in enumerate(chat_call.tools):
        size = len(canonical_json(tool))
        if size > MAX_TOOL_BYTES:
            bad(f"tools[{index}]: this tool has {size:,} bytes, more than {MAX_TOOL_BYTES:,}: shorten its schema.")


def field_of(body: Mapping[str, Any], name: str, kind: type[T], default: T) -> T:
    """Return a field, or `default` if it is null or missing. The number 1.0 counts as a whole number.

    Raises:
        Refused: the field has another type.
    """
    value = body.get(name)
    if value is None:
        return default
    if kind is int:
        value = _whole(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        bad(f"{name}: give {_KINDS[kind]}, not {value!r:.60}.")
    return value


def inner_field(holder: Mapping[str, Any], where: str, name: str, kind: type[T], default: T) -> T:
    """Return a field of the inner object at `where` in a body, as `field_of` does."""
    try:
        return field_of(holder, name, kind, default)
    except Refused as refused:
        bad(f"{where}.{refused.message}")


def _whole(value: Any) -> Any:
    """Return a number without a fraction as an integer, since some languages write 1 as 1.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def listed(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return a field that is a list of objects; an empty list for null or a missing field.

    Raises:
        Refused: the field is another value.
    """
    values = field_of(body, name, list, [])
    if not all(map(dict.__instancecheck__, values)):
        index, value = next((index, value) for index, value in enumerate(values) if not isinstance(value, dict))
        bad(f"{name}[{index}]: give an object, not {value!r:.60}.")
    return values


def number(body: Mapping[str, Any], name: str) -> float | None:
    """Return a field that is a number; None for null or a missing field.

    Raises:
        Refused: the field is not a number.
    """
    value = body.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        bad(f"{name}: give a number, not {value!r:.60}.")
    return value


def stops(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the stop strings of a field, which is a string or a list of strings; () without one.

    Raises:
        Refused: the field is another value, or a string is empty.
    """
    value = body.get(name) or ()
    given = (value,) if isinstance(value, str) else value
    if not isinstance(given, Sequence) or not all(isinstance(each, str) and each for each in given):
        bad(f"{name}: give a string or a list of strings, none of them empty, not {value!r:.60}.")
    return tuple(given)


def most_tokens(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the smallest of the fields that limit the number of sampled ids; None if all are null or -1.

    Raises:
        Refused: a field is not a whole number, or is neither -1 nor at least 1.
    """
    given = list[int]()
    for name in names:
        value = field_of(body, name, int, -1)
        if value < 1 and value != -1:
            bad(f"{name}={value}: give 1 or more, or null for the limit of the run.")
        if value != -1:
            given.append(value)
    return min(given, default=None)


def sampling_of(body: Mapping[str, Any], names: Iterable[str], **further: Any) -> Sampling | None:
    """Return the sampling of a request; None if the request sets no field of `names` or `further`.

    Raises:
        Refused: a value is not allowed.
    """
    given: dict[str, Any] = {
        name: _READ[name](value) if name in _READ else value
        for name in names
        if (value := number(body, name)) is not None
    }
    given |= {name: value for name, value in further.items() if value not in (None, (), {})}
    try:
        return Sampling(**given) if given else None
    except BadOption as error:
        bad(_OF_SAMPLING.sub(r"\1=\2: ", str(error)))


def _top_k(value: float) -> float:
    """Return the number of most likely ids to keep. Clients of vLLM write -1 for all."""
    return 0 if value == -1 else _whole(value)


def _top_p(value: float) -> float:
    """Return the probability mass to keep. OpenAI accepts 0, which keeps only the most likely id."""
    return value or _MIN_TOP_P


_MIN_TOP_P: Final = 1e-6
_READ: Final[Mapping[str, Callable[[float], float]]] = {"top_k": _top_k, "top_p": _top_p, "min_tokens": _whole}
"""Conversions of fields that clients write in several ways."""

_CONSTRAINTS: Final = {
    "guided_json": "schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "json": "schema",
    "regex": "regex",
    "choice": "choice",
}
"""The name in `Sampling` of each constraint on an answer, by the name of vLLM's field."""

_NO_CONSTRAINTS: Final = ("grammar", "structural_tag", "guided_grammar")


def constraint_of(body: Mapping[str, Any], schema: dict[str, Any] | None) -> dict[str, Any]:
    """Return the constraint on an answer, by its name in `Sampling`, from a given schema or from vLLM's fields.

    The result is an empty dict without a constraint.

    Raises:
        Refused: a field is invalid, or requests a constraint that this endpoint cannot enforce.
    """
    found: dict[str, Any] = {} if schema is None else {"schema": schema}
    inner = field_of(body, "structured_outputs", dict, {})
    for holder, where in ((body, ""), (inner, "structured_outputs.")):
        for name in _NO_CONSTRAINTS:
            if holder.get(name) is not None:
                bad(f"{where}{name}: give a JSON schema, a regex or a choice in its place.")
        for name, ours in _CONSTRAINTS.items():
            value = holder.get(name)
            if value is not None and (where or name.startswith("guided")):
                found[ours] = _constraint(ours, value, f"{where}{name}")
    if inner.get("json_object"):
        found["schema"] = {"type": "object"}
    return found


def _constraint(kind: str, value: Any, where: str) -> Any:
    if kind == "choice":
        if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
            return tuple(value)
        bad(f"{where}: give a list of strings, not {value!r:.60}.")
    if kind == "schema" and isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            bad(f"{where}: give a JSON schema, not {value!r:.60}.")
    wanted, what = (dict, "a JSON schema") if kind == "schema" else (str, "a string")
    if not isinstance(value, wanted):
        bad(f"{where}: give {what}, not {value!r:.60}.")
    return value


MAX_UNREAD_FIELDS: Final = 20
"""Maximum number of unread fields of a body that are recorded."""


def note_unread(body: Mapping[str, Any], known: Collection[str], not_granted: dict[str, Any]) -> None:
    """Record the unread fields of a body as not granted, at most `MAX_UNREAD_FIELDS`; skip empty and false ones."""
    unread = (
        (name, value)
        for name, value in body.items()
        if name not in known and name not in not_granted and value not in (None, False, "", [], {})
    )
    not_granted.update(
        (name[:60], _shortly(value)) for name, value in list(itertools.islice(unread, MAX_UNREAD_FIELDS))
    )


def _shortly(value: Any) -> Any:
    """Return a value for a record. Long and nested values are replaced by their types."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
    if len(inner) > 8 or not all(isinstance(each, bool | int | float | None) or _is_short(each) for each in inner):
        return f"({_KINDS.get(type(value), 'a value')})"
    return value


def _is_short(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 100


def json_schema(form: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Return the JSON schema for an answer, from a field like OpenAI's `response_format`; None if any text is allowed.

    Raises:
        Refused: the field is invalid.
    """
    match form.get("type"):
        case None | "text":
            return None
        case "json_object":
            return {"type": "object"}
        case "json_schema":
            inner = form.get("json_schema", form)
            schema = inner.get("schema") if isinstance(inner, Mapping) else None
            if not isinstance(schema, dict):
                bad(f"{where}: give an object as the schema of a json_schema, not {schema!r:.60}.")
            return schema
        case other:
            bad(f"{where}: give the type text, json_object or json_schema, not {other!r:.60}.")


def with_constraint(
    constraint: dict[str, Any], tools: Sequence[Any], tool_choice: ToolChoice | None, not_granted: dict[str, Any]
) -> dict[str, Any]:
    """Return the constraint on an answer; an empty dict if it cannot be enforced, which is recorded as not granted.

    A turn that may call tools cannot be constrained.
    """
    if constraint and tools and tool_choice != "none":
        not_granted["response_format"] = "a turn that may call tools is not held to a schema"
        return {}
    return constraint


_LABELS: Final = (
    "x-deltarunner-thread",
    "x-claude-code-agent-id",
    "thread-id",
    "x-session-id",
    "x-claude-code-session-id",
    "session-id",
)
"""Headers with a label, the narrowest first, since a sub-agent sends the session of its parent agent too."""

_MAX_LABEL_CHARACTERS: Final = 200


def label_of(headers: Headers) -> str:
    """Return the client's own name for the conversation, from a header; "" without one."""
    named = next((headers[name] for name in _LABELS if headers.get(name)), "")
    return (named or _codex_field(headers, "thread_id"))[:_MAX_LABEL_CHARACTERS]


def purpose_of(headers: Headers) -> str:
    """Return the purpose of a request, such as `turn` or `compaction`; "" without one."""
    return (_codex_field(headers, "request_kind") or headers.get("x-openai-subagent", ""))[:_MAX_LABEL_CHARACTERS]


def _codex_field(headers: Headers, name: str) -> str:
    """Return a field of Codex's JSON header; "" if the header is missing or not JSON."""
    try:
        fields: Any = orjson.loads(headers.get("x-codex-turn-metadata", "null"))
    except orjson.JSONDecodeError:
        return ""
    value = fields.get(name) if isinstance(fields, dict) else None
    return value if isinstance(value, str) else ""
