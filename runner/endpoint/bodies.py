"""Reads the fields of a request's body that several wire forms have; what cannot be used is refused by its name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn, TypeVar

import orjson

from runner.endpoint.refusals import Reason, Refused
from runner.errors import BadOption
from runner.options import Sampling, ToolChoice

__all__ = [
    "SamplingFields",
    "bad",
    "decode_body",
    "field_of",
    "json_schema",
    "listed",
    "number",
    "sampling_of",
    "stops",
]

T = TypeVar("T")

MESSAGES: Final = 10_000
"""The most messages, or items, that a history may have: nobody is answered while they are read, which took seconds for
100,000."""

_KINDS: Final = {str: "a string", bool: "true or false", dict: "an object", list: "a list", int: "a whole number"}

_OF_SAMPLING: Final = re.compile(r"\ASampling\((\w+)=(.*?)\): ", re.DOTALL)
"""How an error of ours begins that names a field of `Sampling`, which clients know by another name."""

SamplingFields = Mapping[str, str]
"""The fields of a body that ask for sampling, by the name that `Sampling` has for each."""


def bad(message: str) -> NoReturn:
    """Refuse the request as one that cannot be used."""
    raise Refused(Reason.INVALID, message)


def decode_body(raw: bytes) -> dict[str, Any]:
    """The object that a body holds.

    Raises:
        Refused: it holds none, or a history of too many messages.
    """
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        bad(f"the body is no JSON ({error}): send an object.")
    if not isinstance(body, dict):
        bad(f"the body is a JSON {type(body).__name__}: send an object.")
    for name in ("messages", "input"):
        given = body.get(name)
        if isinstance(given, list) and len(given) > MESSAGES:
            bad(f"{name}: {len(given):,} of them, and a history has at most {MESSAGES:,}: send a shorter one.")
    return body


def field_of(body: Mapping[str, Any], name: str, kind: type[T], default: T) -> T:
    """A field of a type; null is the same as nothing."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        bad(f"{name}: give {_KINDS[kind]}, not {value!r:.60}.")
    return value


def listed(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """A list of objects; null is an empty one."""
    values = field_of(body, name, list, [])
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            bad(f"{name}[{index}]: give an object, not {value!r:.60}.")
    return values


def number(body: Mapping[str, Any], name: str) -> float | None:
    """A number, or None where there is none."""
    value = body.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        bad(f"{name}: give a number, not {value!r:.60}.")
    return value


def stops(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Stop strings: one, or a list of them."""
    value = body.get(name) or ()
    given = (value,) if isinstance(value, str) else value
    if not isinstance(given, Sequence) or not all(isinstance(each, str) and each for each in given):
        bad(f"{name}: give a string or a list of strings, none of them empty, not {value!r:.60}.")
    return tuple(given)


def sampling_of(body: Mapping[str, Any], fields: SamplingFields, **further: Any) -> Sampling | None:
    """How a request would have its turn sampled; None where it says nothing of it.

    Raises:
        Refused: a value cannot be.
    """
    given: dict[str, Any] = {
        ours: number(body, theirs) for theirs, ours in fields.items() if body.get(theirs) is not None
    }
    given |= {name: value for name, value in further.items() if value not in (None, (), {})}
    try:
        return Sampling(**given) if given else None
    except BadOption as error:
        theirs = {ours: theirs for theirs, ours in fields.items()}
        bad(_OF_SAMPLING.sub(lambda found: f"{theirs.get(found[1], found[1])}={found[2]}: ", str(error)))


def json_schema(form: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """The JSON schema that an answer has to match, of a field like OpenAI's `response_format`; None for any text."""
    match form.get("type"):
        case None | "text":
            return None
        case "json_object":
            return {"type": "object"}
        case "json_schema":
            inner = form.get("json_schema", form)
            schema = inner.get("schema") if isinstance(inner, Mapping) else None
            if not isinstance(schema, dict):
                bad(f"{where}: a json_schema has an object as its schema, not {schema!r:.60}.")
            return schema
        case other:
            bad(f"{where}: give the type text, json_object or json_schema, not {other!r:.60}.")


def with_schema(
    schema: dict[str, Any] | None, tools: Sequence[Any], tool_choice: ToolChoice | None, not_granted: dict[str, Any]
) -> dict[str, Any] | None:
    """The schema where it can be enforced: a turn that may call tools cannot be held to it, and that is told."""
    if schema is not None and tools and tool_choice != "none":
        not_granted["response_format"] = "a turn that may call tools is not held to a schema"
        return None
    return schema
