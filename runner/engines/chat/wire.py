"""Client side of OpenAI's Chat Completions: the body of a request, and the pieces of its answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from runner.engines.base import FinishReason
from runner.engines.http_retries import FailureKind, HttpFailure
from runner.engines.message_engine import MessageFinish, MessagePiece, MessageRequest, Usage
from runner.errors import BadOption
from runner.messages import Message, ToolCall
from runner.options import Sampling, ToolChoice
from runner.parsing.events import ContentPiece, ReasoningPiece
from runner.parsing.external_reader import external_call
from runner.sampling_fields import SAMPLING_FIELDS

__all__ = ["FIELDS", "ChatAnswerReader", "RequestFormat", "body_of", "check_sampling"]

FIELDS: Final = (
    *(row.chat for row in SAMPLING_FIELDS.values() if row.chat is not None),
    *("tool_choice", "seed", "stream_options"),
)
"""Optional request fields, which some servers do not support."""

_REASONS: Final = {
    "stop": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "function_call": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "content_filter": FinishReason.CONTENT_FILTER,
}
_FAILED: Final = ("error", "insufficient_system_resource", "abort")
_REASONING: Final = ("reasoning_content", "reasoning")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFormat:
    """Field names and extra fields of the requests to one server."""

    model: str
    max_tokens: str = "max_tokens"
    """Name of the field for the token limit of a turn."""
    reasoning: str | None = None
    """Name of the field for the reasoning of earlier turns; None to send no reasoning."""
    leave_out: Collection[str] = ()
    """Fields that are not sent."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every request."""


def check_sampling(sampling: Sampling, leave_out: Collection[str] = ()) -> None:
    """Check that a chat API supports a sampling whose fields are all set.

    Raises:
        BadOption: a field is not supported; the message names it.
    """
    for name, value in sampling.given().items():
        row = SAMPLING_FIELDS[name]
        if row.is_off(value):
            continue
        if row.chat is None:
            raise BadOption(
                f"Sampling({name}={value!r:.60}): a chat API does not support it; leave it out, or "
                f"override it for this conversation by sampling=Sampling({name}={row.default!r})."
            )
        if name != "max_tokens" and row.chat in leave_out:
            raise BadOption(
                f"Sampling({name}={value!r:.60}): the engine is configured to leave out {row.chat!r}; take it out of "
                "ChatEngine(leave_out=)."
            )


# --- requests


def body_of(request: MessageRequest, request_format: RequestFormat) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": request_format.model,
        "messages": [_sent(message, request_format.reasoning) for message in request.messages],
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": request.seed,
        **_sampling_fields(request.sampling),
    }
    if request.tools:
        body["tools"] = list(request.tools)
        body["tool_choice"] = _choice(request.tool_choice)
    body = {name: value for name, value in body.items() if value is not None and name not in request_format.leave_out}
    if "max_tokens" in body:
        body[request_format.max_tokens] = body.pop("max_tokens")
    return {**body, **request_format.extra_body}


def _sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Return the request fields of a sampling by the API's names; None for penalties of 0, no `stop` or no `schema`."""
    body: dict[str, Any] = {}
    for name, row in SAMPLING_FIELDS.items():
        value = getattr(sampling, name)
        if row.chat is not None and name in _WRITERS:
            body[row.chat] = _WRITERS[name](value)
        elif row.chat is not None:  # 0 turns a penalty off, but is a real temperature
            body[row.chat] = value if value or row.default else None
    return body


def _stop(strings: Sequence[str]) -> list[str] | None:
    return list(strings) or None


def _response_format(schema: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if schema is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


_WRITERS: Final[Mapping[str, Callable[[Any], Any]]] = {"stop": _stop, "schema": _response_format}
"""Functions that write a value of `Sampling` in the API's form."""


def _choice(choice: ToolChoice) -> Any:
    if choice in ("auto", "none", "required"):
        return choice
    return {"type": "function", "function": {"name": choice}}


def _sent(message: Message, reasoning: str | None) -> dict[str, Any]:
    """Convert a message to the API's form, without fields that only templates read."""
    sent: dict[str, Any] = {"role": message["role"], "content": message["content"]}
    if message["role"] == "tool":
        sent["tool_call_id"] = message.get("tool_call_id", "")
    if reasoning is not None and message.get("reasoning_content"):
        sent[reasoning] = message["reasoning_content"]
    calls = message.get("tool_calls")
    if calls:
        sent["content"] = message["content"] or None
        sent["tool_calls"] = [_sent_call(call["id"], call["function"]) for call in calls]
    return sent


def _sent_call(call_id: str, function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


# --- answers


@dataclass(slots=True)
class _PartialCall:
    """Received part of a tool call."""

    id: Any = None
    name: str = ""
    arguments: list[str] = field(default_factory=list)


class ChatAnswerReader:
    """Reader of the chunks of one answer.

    A chunk that violates the protocol raises ValueError, TypeError, AttributeError or LookupError.
    """

    def __init__(self, request: MessageRequest) -> None:
        self.ended = False
        """True once the finish reason was received; the usage may follow."""
        self._request = request
        self._calls: dict[int, _PartialCall] = {}
        self._reported = 0
        self._ids: set[str] = set()
        self._reason = ""
        self._stop: str | None = None
        self._usage: Mapping[str, Any] | None = None
        self._model = ""
        self._fingerprint = ""

    def read(self, chunk: Mapping[str, Any]) -> Iterator[MessagePiece]:
        """Yield the pieces in a chunk.

        Raises:
            HttpFailure: the chunk reports a failure of the server.
        """
        self._model = str(chunk.get("model") or self._model)
        self._fingerprint = str(chunk.get("system_fingerprint") or self._fingerprint)
        if chunk.get("usage"):
            self._usage = chunk["usage"]
        for choice in chunk.get("choices") or ():
            yield from self._read_choice(choice)

    def _read_choice(self, choice: Mapping[str, Any]) -> Iterator[MessagePiece]:
        delta = choice.get("delta") or choice.get("message") or {}
        reasoning = next((delta[name] for name in _REASONING if delta.get(name)), "")
        if reasoning:
            yield ReasoningPiece(_text(reasoning))
        # the text of a refusal to answer by a schema arrives in another field
        for name in ("content", "refusal"):
            if delta.get(name):
                yield ContentPiece(_text(delta[name]))
        for part in delta.get("tool_calls") or ():
            yield from self._read_call(part)
        reason = choice.get("finish_reason")
        if reason:
            if reason in _FAILED:
                raise HttpFailure(FailureKind.SERVER, f"the server ended the turn with {reason!r}")
            stop = choice.get("stop_reason")
            self.ended, self._reason, self._stop = True, str(reason), stop if isinstance(stop, str) else None
            yield from self._whole_calls(None)

    def _read_call(self, part: Mapping[str, Any]) -> Iterator[MessagePiece]:
        function = part.get("function") or {}
        index = part.get("index")
        if index is None:  # servers that send whole calls may omit the index
            index = len(self._calls)
        elif not isinstance(index, int):
            raise TypeError(f"the index of a tool call is {index!r:.40}, not a whole number")
        if index not in self._calls:
            yield from self._whole_calls(index)
        call = self._calls.setdefault(index, _PartialCall())
        call.id = call.id or part.get("id")
        call.name = call.name or function.get("name") or ""
        arguments = function.get("arguments")
        if arguments:
            call.arguments.append(arguments if isinstance(arguments, str) else json.dumps(arguments))

    def _whole_calls(self, before: int | None) -> Iterator[ToolCall]:
        """Yield the calls that are complete and were not yielded yet.

        A call is complete if its index is below `before`; if `before` is None, every call is complete.
        """
        for index in list(self._calls)[self._reported :]:
            if before is None or index < before:
                self._reported += 1
                yield self._call(self._calls[index])

    def _call(self, said: _PartialCall) -> ToolCall:
        read = external_call(said.name, "".join(said.arguments))
        call_id = said.id if isinstance(said.id, str) and said.id and said.id not in self._ids else ""
        if not call_id:  # each call needs its own id, since results of tools refer to it
            call_id = f"call_{len(self._request.messages)}_{len(self._ids)}"
        self._ids.add(call_id)
        return ToolCall(call_id, read.name, read.arguments, error=read.error)

    def finish(self, context: int) -> MessageFinish:
        """Return the finish of the turn; `context` is the maximum number of tokens of prompt and turn together."""
        reason = _REASONS.get(self._reason, FinishReason.STOP)
        usage = self.usage()
        if reason is FinishReason.LENGTH and usage is not None and usage.total_tokens >= context:
            reason = FinishReason.CONTEXT
        return MessageFinish(reason, self._stop if reason is FinishReason.STOP else None, usage)

    def usage(self) -> Usage | None:
        """Return the server's usage counts; None if the server reported neither usage nor model."""
        if self._usage is None and not self._model:
            return None
        given = self._usage or {}
        prompt, completion = (given.get(f"{kind}_tokens_details") or {} for kind in ("prompt", "completion"))
        cost = given.get("cost")
        return Usage(
            prompt_tokens=_count(given.get("prompt_tokens")),
            completion_tokens=_count(given.get("completion_tokens")),
            cached_tokens=_count(prompt.get("cached_tokens", given.get("prompt_cache_hit_tokens"))),
            reasoning_tokens=_count(completion.get("reasoning_tokens")),
            cost=float(cost) if isinstance(cost, int | float) and not isinstance(cost, bool) else None,
            model=self._model,
            fingerprint=self._fingerprint,
        )


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence):  # content parts; only text is used
        return "".join(_text(part.get("text") or "") for part in value)
    raise TypeError(f"text of type {type(value).__name__}")


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
