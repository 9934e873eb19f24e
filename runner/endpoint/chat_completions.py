"""OpenAI's Chat Completions: requests with messages, answers whole or as chunks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from runner.chat_requests import Asked
from runner.endpoint.bodies import bad, field_of, json_schema, listed, number, sampling_of, stops, with_schema
from runner.endpoint.encoding import arguments_text, encode, logprob_rows
from runner.endpoint.labels import label_of
from runner.endpoint.refusals import Refused
from runner.endpoint.wire import Answered, AnswerWriter, Headers, TokenText, WireForm, WireRequest, cached_of
from runner.engines.base import FinishReason
from runner.options import ToolChoice
from runner.tokens.top_logprobs import TopLogprobs
from runner.trajectory import Turn

__all__ = ["ChatCompletions", "openai_error"]

_SAMPLING: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "min_tokens": "min_tokens",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
}
_NOT_GRANTED: Final = ("seed", "reasoning_effort", "verbosity", "logit_bias", "prediction", "service_tier")
_MOST_LOGPROBS: Final = 20


class ChatCompletions(WireForm):
    """`POST /v1/chat/completions`."""

    name = "chat"

    def read(self, body: Mapping[str, Any], headers: Headers) -> WireRequest:
        if field_of(body, "n", int, 1) != 1:
            bad("n: one answer is sampled for a request; ask again for another one.")
        if body.get("functions") or body.get("function_call"):
            bad("functions: they are called tools by now; give tools and tool_choice.")
        tools, tool_choice = listed(body, "tools"), _tool_choice(body)
        not_granted = {name: body[name] for name in _NOT_GRANTED if body.get(name) is not None}
        if body.get("parallel_tool_calls") is False:
            not_granted["parallel_tool_calls"] = False
        schema = json_schema(field_of(body, "response_format", dict, {}), "response_format")
        most = [each for name in ("max_tokens", "max_completion_tokens") if (each := number(body, name)) is not None]
        top = field_of(body, "top_logprobs", int, 0)
        if not 0 <= top <= _MOST_LOGPROBS:
            bad(f"top_logprobs: give a whole number from 0 to {_MOST_LOGPROBS}, not {top}.")
        sampling = sampling_of(
            body,
            _SAMPLING,
            max_tokens=min(most, default=None),
            stop=stops(body, "stop"),
            schema=with_schema(schema, tools, tool_choice, not_granted),
            logprobs=top or None,
        )
        stream = field_of(body, "stream", bool, False)
        return WireRequest(
            asked=Asked(
                messages=field_of(body, "messages", list, []) or bad("messages: give at least one."),
                tools=tools,
                sampling=sampling,
                tool_choice=tool_choice,
                label=label_of(headers),
                form=self.name,
                client=headers.get("user-agent", ""),
                not_granted=not_granted,
            ),
            stream=stream,
            ids=field_of(body, "return_token_ids", bool, False),
            logprobs=field_of(body, "logprobs", bool, False),
            top_logprobs=top,
            options={"usage": bool(field_of(body, "stream_options", dict, {}).get("include_usage"))},
        )

    def writer(self, request: WireRequest, model: str, text_of: TokenText) -> AnswerWriter:
        return _CompletionWriter(request, model, text_of)

    def refusal(self, refused: Refused) -> Mapping[str, Any]:
        return openai_error(refused)


def openai_error(refused: Refused) -> dict[str, Any]:
    """The body of a refusal, as OpenAI's clients read it."""
    message = refused.message
    if refused.context:  # in these words clients tell that they have to compact
        message = (
            f"This model's maximum context length is {refused.context} tokens. However, your messages resulted in "
            f"{refused.prompt} tokens. Please reduce the length of the messages."
        )
    kind = "server_error" if refused.reason.status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": refused.reason.value}}


def _tool_choice(body: Mapping[str, Any]) -> ToolChoice | None:
    given = body.get("tool_choice")
    if given is None or given in ("auto", "none", "required"):
        return given
    function = given.get("function") if isinstance(given, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        bad(
            f"tool_choice: give auto, none, required or "
            f'{{"type": "function", "function": {{"name": ...}}}}, not {given!r:.80}.'
        )
    return name


class _CompletionWriter(AnswerWriter):
    """Writes chunks; the parts that do not change are encoded once."""

    def __init__(self, request: WireRequest, model: str, text_of: TokenText) -> None:
        super().__init__(request, model, text_of)
        self._created = int(time.time())
        self._open = b""

    def write_begin(self) -> bytes:
        self._open = (
            b'data: {"id":"%b","object":"chat.completion.chunk","created":%d,"model":%b,"choices":[{"index":0,"delta":'
            % (_completion_id(self.handle).encode(), self._created, orjson.dumps(self.model))
        )
        begin = self._chunk(b'{"role":"assistant","content":""}')
        if not self.request.ids:
            return begin
        prompt = orjson.dumps(list(self.prompt_ids))
        return begin.removesuffix(b"]}\n\n") + b'],"prompt_token_ids":%b}\n\n' % prompt

    def write_reasoning(self, text: str) -> bytes:
        return self._chunk(b'{"reasoning_content":%b}' % encode(text))

    def write_text(self, text: str) -> bytes:
        return self._chunk(b'{"content":%b}' % encode(text))

    def write_call(self, index: int, call_id: str, name: str, arguments: Mapping[str, Any]) -> bytes:
        return self._chunk(encode({"tool_calls": [{"index": index, **_call(call_id, name, arguments)}]}))

    def write_ids(self, token_ids: Sequence[int], logprobs: Sequence[float] | None, top: TopLogprobs | None) -> bytes:
        further = b',"token_ids":%b' % orjson.dumps(list(token_ids)) if self.request.ids else b""
        if self.request.logprobs:
            content = self._logprobs(token_ids, logprobs, top)
            further += b',"logprobs":%b' % encode({"content": content, "refusal": None})
        return self._chunk(b"{}", further=further)

    def write_end(self, answered: Answered) -> bytes:
        usage = b""
        if self.request.options["usage"]:
            head = self._open.partition(b'"choices":')[0]
            usage = b'%b"choices":[],"usage":%b}\n\n' % (head, orjson.dumps(_usage(answered.turn)))
        return self._chunk(b"{}", _finish(answered)) + usage + b"data: [DONE]\n\n"

    def write_refusal(self, refused: Refused) -> bytes:
        return b"data: %b\n\n" % encode(openai_error(refused))

    def whole(self, answered: Answered) -> bytes:
        turn, request = answered.turn, self.request
        message: dict[str, Any] = {"role": "assistant", "content": answered.text or None, "refusal": None}
        if answered.reasoning:
            message["reasoning_content"] = answered.reasoning
        if answered.calls:
            message["tool_calls"] = [_call(*call) for call in answered.calls]
        else:
            message["content"] = answered.text
        choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(answered)}
        if request.logprobs:
            content = self._logprobs(turn.token_ids, turn.logprobs, turn.top)
            choice["logprobs"] = {"content": content, "refusal": None}
        answer = {
            "id": _completion_id(turn.handle),
            "object": "chat.completion",
            "created": self._created,
            "model": self.model,
            "choices": [choice],
            "usage": _usage(turn),
        }
        if request.ids:
            choice["token_ids"] = list(turn.token_ids)
            answer["prompt_token_ids"] = list(turn.prompt_ids)
        return encode(answer)

    def _chunk(self, delta: bytes, finish: str | None = None, *, further: bytes = b"") -> bytes:
        end = b"null" if finish is None else b'"%b"' % finish.encode()
        return b'%b%b,"finish_reason":%b%b}]}\n\n' % (self._open, delta, end, further)

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[float] | None, top: TopLogprobs | None
    ) -> list[dict[str, Any]]:
        return logprob_rows(self.text_of, token_ids, logprobs, top, count=self.request.top_logprobs)


def _completion_id(handle: str) -> str:
    return f"chatcmpl-{handle.removeprefix('call_')}"


def _call(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments_text(arguments)}}


def _finish(answered: Answered) -> str:
    if answered.turn.finish in (FinishReason.LENGTH, FinishReason.CONTEXT):
        return "length"
    if answered.turn.finish is FinishReason.CONTENT_FILTER:
        return "content_filter"
    return "tool_calls" if answered.calls else "stop"


def _usage(turn: Turn) -> dict[str, Any]:
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.tokens,
        "total_tokens": turn.prompt_tokens + turn.tokens,
        "prompt_tokens_details": {"cached_tokens": cached_of(turn)},
    }
