"""Anthropic's Messages: requests made of blocks; answers in one piece or as a stream of block events."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import orjson

from runner.chat_requests import ChatCall
from runner.endpoint.anthropic_requests import chat_call_of
from runner.endpoint.refusals import Reason, Refused
from runner.endpoint.request_body import field_of
from runner.endpoint.wire_form import Answered, AnswerWriter, Headers, TokenText, WireForm, WireRequest, cached_of
from runner.engines.base import FinishReason
from runner.history_cache import HistoryCache
from runner.messages import canonical_json
from runner.options import UNSET
from runner.tokens.top_logprobs import TopLogprobs
from runner.trajectory import Turn

__all__ = ["AnthropicMessages"]


class AnthropicMessages(WireForm):
    """`POST /v1/messages`, and `POST /v1/messages/count_tokens`."""

    name = "anthropic"

    def read(self, body: Mapping[str, Any], headers: Headers, seen: HistoryCache[Any] | None = None) -> WireRequest:
        return WireRequest(
            chat_call=chat_call_of(body, headers, seen or HistoryCache(), form=self.name),
            stream=field_of(body, "stream", bool, False),
            ids=field_of(body, "return_token_ids", bool, False),
            logprobs=field_of(body, "logprobs", bool, False),
        )

    def read_to_count(
        self, body: Mapping[str, Any], headers: Headers, seen: HistoryCache[Any] | None = None
    ) -> ChatCall:
        """Read a request to count the tokens of its prompt.

        Raises:
            Refused: a field cannot be used; the message has its name and the fix.
        """
        return chat_call_of(body, headers, seen or HistoryCache(), form=self.name, counting=True)

    def writer(self, request: WireRequest, model: str, text_of: TokenText) -> AnswerWriter:
        return _MessageWriter(request, model, text_of)

    def refusal(self, refused: Refused) -> Mapping[str, Any]:
        return _error(refused)

    def count(self, tokens: int) -> Mapping[str, Any]:
        """Return the answer to a request that counts tokens."""
        return {"input_tokens": tokens}


_ERROR_TYPES: Final = {
    Reason.UNAUTHORIZED: "authentication_error",
    Reason.FORBIDDEN: "permission_error",
    Reason.NO_REWARD: "permission_error",
    Reason.NOT_FOUND: "not_found_error",
    Reason.NO_ITEM: "not_found_error",
    Reason.TOO_LARGE: "request_too_large",
    Reason.SLOW: "timeout_error",
    Reason.BUSY: "rate_limit_error",
    Reason.FAILED: "api_error",
}


def _error(refused: Refused) -> dict[str, Any]:
    """Return the body of a refusal, as Anthropic's clients read it."""
    message = refused.message
    if refused.context:  # clients detect by these words that they must compact their history
        message = f"prompt is too long: {refused.prompt} tokens > {refused.context} maximum"
    elif refused.reason is Reason.OVER:  # this wire form has no field for the code of the reason
        message = f"{refused.reason}: {message}"
    kind = _ERROR_TYPES.get(refused.reason, "invalid_request_error")
    error: dict[str, Any] = {"type": kind, "message": message}
    if refused.code:
        error["details"] = {"error_code": refused.code}
    return {"type": "error", "error": error, "request_id": None}


class _BlockKind(enum.StrEnum):
    """Blocks that are streamed piece by piece."""

    THINKING = "thinking"
    TEXT = "text"


_EMPTY: Final = {
    _BlockKind.THINKING: b'{"type":"thinking","thinking":"","signature":""}',
    _BlockKind.TEXT: b'{"type":"text","text":""}',
}


class _MessageWriter(AnswerWriter):
    """The writer of an answer as a sequence of blocks."""

    keep_alive: ClassVar[bytes] = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, request: WireRequest, model: str, text_of: TokenText) -> None:
        super().__init__(request, model, text_of)
        self._index = 0
        self._open: _BlockKind | None = None
        # Ids that were sampled after the last event with ids. They wait for an event of a block, since clients skip
        # other events.
        self._ids: list[int] = []
        self._logprobs: list[float | None] = []

    def write_begin(self) -> bytes:
        message = {
            **_head(self.handle, self.model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(len(self.prompt_ids), 0, 0),
        }
        if self.request.ids:
            message["prompt_token_ids"] = list(self.prompt_ids)
        return _event(b"message_start", b'"message":%b' % _json(message))

    def write_reasoning(self, text: str) -> bytes:
        return self._within(_BlockKind.THINKING) + self._delta(b'{"type":"thinking_delta","thinking":%b}' % _json(text))

    def write_text(self, text: str) -> bytes:
        return self._within(_BlockKind.TEXT) + self._delta(b'{"type":"text_delta","text":%b}' % _json(text))

    def write_call(self, index: int, call_id: str, name: str, arguments: Mapping[str, Any]) -> bytes:
        call = _json(_call(call_id, name, {}))
        given = b'{"type":"input_json_delta","partial_json":%b}' % _json(canonical_json(arguments))
        return self._closed() + self._start(call) + self._delta(given) + self._stop()

    def write_ids(self, token_ids: Sequence[int], logprobs: Sequence[float] | None, top: TopLogprobs | None) -> bytes:
        self._ids += token_ids
        self._logprobs += [None] * len(token_ids) if logprobs is None else _finite(logprobs)
        return b""

    def write_end(self, answered: Answered) -> bytes:
        stop_reason, stop_sequence = _stop_reason(answered, self.request)
        delta = _json({"stop_reason": stop_reason, "stop_sequence": stop_sequence})
        closed, usage = self._closed(), _json(_usage_of(answered.turn))
        body = b'"delta":%b,"usage":%b%b' % (delta, usage, self._sampled_since())
        return closed + _event(b"message_delta", body) + _STOP

    def write_refusal(self, refused: Refused) -> bytes:
        return b"event: error\ndata: %b\n\n" % _json(_error(refused))

    def whole(self, answered: Answered) -> bytes:
        turn, request, content = answered.turn, self.request, list[dict[str, Any]]()
        if answered.reasoning:
            content.append({"type": "thinking", "thinking": answered.reasoning, "signature": turn.handle})
        if answered.text:
            content.append({"type": "text", "text": answered.text})
        content += [_call(*call) for call in answered.calls]
        stop_reason, stop_sequence = _stop_reason(answered, request)
        message = {
            **_head(turn.handle, self.model),
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": _usage_of(turn),
        }
        if request.ids:
            message["prompt_token_ids"], message["token_ids"] = list(turn.prompt_ids), list(turn.token_ids)
        if request.logprobs:
            message["logprobs"] = _finite(turn.logprobs)
        return _json(message)

    # --- blocks

    def _within(self, kind: _BlockKind) -> bytes:
        """Return the events that open a block of this kind; b"" if the open block has this kind."""
        if self._open is kind:
            return b""
        closed, self._open = self._closed(), kind
        return closed + self._start(_EMPTY[kind])

    def _closed(self) -> bytes:
        """Return the events that close the open block; b"" without one."""
        if self._open is None:
            return b""
        signed = b""
        if self._open is _BlockKind.THINKING:
            signed = self._delta(b'{"type":"signature_delta","signature":%b}' % _json(self.handle))
        self._open = None
        return signed + self._stop()

    def _start(self, block: bytes) -> bytes:
        return _event(b"content_block_start", b'"index":%d,"content_block":%b' % (self._index, block))

    def _delta(self, delta: bytes) -> bytes:
        body = b'"index":%d,"delta":%b%b' % (self._index, delta, self._sampled_since())
        return _event(b"content_block_delta", body)

    def _stop(self) -> bytes:
        index, self._index = self._index, self._index + 1
        return _event(b"content_block_stop", b'"index":%d' % index)

    def _sampled_since(self) -> bytes:
        if not self._ids:
            return b""
        fields = b',"token_ids":%b' % _json(self._ids) if self.request.ids else b""
        if self.request.logprobs:
            fields += b',"logprobs":%b' % _json(self._logprobs)
        self._ids, self._logprobs = [], []
        return fields


def _event(name: bytes, body: bytes) -> bytes:
    return b'event: %b\ndata: {"type":"%b",%b}\n\n' % (name, name, body)


_STOP: Final = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


def _head(handle: str, model: str) -> dict[str, Any]:
    # The id is made of the turn's handle, since clients treat answers with the same id as one answer.
    return {"id": f"msg_{handle.removeprefix('call_')}", "type": "message", "role": "assistant", "model": model}


def _call(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _stop_reason(answered: Answered, request: WireRequest) -> tuple[str, str | None]:
    """Return the stop reason, and the client's stop string if the reason is "stop_sequence", otherwise None."""
    turn, sampling = answered.turn, request.chat_call.sampling
    if turn.finish in (FinishReason.LENGTH, FinishReason.CONTEXT):
        return "max_tokens", None
    if turn.finish is FinishReason.CONTENT_FILTER:
        return "refusal", None
    if answered.calls:
        return "tool_use", None
    if sampling is not None and sampling.stop is not UNSET and turn.stop in sampling.stop:
        return "stop_sequence", str(turn.stop)
    return "end_turn", None


def _usage_of(turn: Turn) -> dict[str, int]:
    return _usage(turn.prompt_tokens, cached_of(turn), turn.tokens)


def _usage(prompt: int, cached: int, sampled: int) -> dict[str, int]:
    """Return the token counts in Anthropic's form. `input_tokens` excludes prompt tokens that were in the cache."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": sampled,
    }


def _finite(logprobs: Sequence[float]) -> list[float | None]:
    """Return log-probabilities, with None in place of infinities and NaN, which JSON lacks."""
    return [each if math.isfinite(each) else None for each in logprobs]


def _json(value: Any) -> bytes:
    """Encode a value as JSON. Unpaired surrogates become question marks, and integers may have any size."""
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS, default=str)
    except TypeError:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
        return text.encode("utf-8", "replace")
