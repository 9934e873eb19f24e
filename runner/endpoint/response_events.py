"""The writer of an answer in the form of OpenAI's Responses: a sequence of items, whose texts are streamed in pieces.

Text after a call is a separate message; the joined messages of a turn are its content. Requested extras are additional
fields of events: `prompt_token_ids` in the first event, `token_ids` in the next event after the ids were sampled.
Log-probabilities are sent with the next text of a message; the last event has those that remain.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from runner.endpoint.chat_completions import openai_error
from runner.endpoint.refusals import Reason, Refused
from runner.endpoint.response_items import custom_call, item_id
from runner.endpoint.response_tools import OfferedTool
from runner.endpoint.wire_form import (
    Answered,
    AnswerWriter,
    TokenText,
    WireRequest,
    arguments_text,
    cached_of,
    encode,
    logprob_rows,
)
from runner.engines.base import FinishReason
from runner.tokens.top_logprobs import TopLogprobs
from runner.trajectory import Turn
from runner.turn_events import TurnAdmitted

__all__ = ["ResponseWriter"]

_FAILURES: Final = {
    Reason.OVERFLOW: "context_length_exceeded",
    Reason.BUSY: "rate_limit_exceeded",
    Reason.FAILED: "server_error",
    Reason.SLOW: "server_error",
}
_IN_VAIN: Final = "invalid_prompt"
"""The code for reasons that are not in `_FAILURES`. Clients do not retry a request after this code."""


@dataclass(slots=True)
class _OpenItem:
    """An item that is being streamed: the text of a reasoning or of a message."""

    item: dict[str, Any]
    kind: str
    """Type of the text: "reasoning_text" or "output_text"."""
    delta: bytes
    """Constant beginning of each event with a further piece of the text."""
    text: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_message(self) -> bool:
        return self.kind == "output_text"

    def content(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self.kind, "text": "".join(self.text)}
        return {**part, "annotations": [], "logprobs": self.logprobs} if self.is_message else part


class ResponseWriter(AnswerWriter):
    """The writer of an answer as events. The constant parts of deltas are encoded once."""

    def __init__(self, request: WireRequest, model: str, text_of: TokenText) -> None:
        """Begin the answer to a request; see `AnswerWriter`."""
        super().__init__(request, model, text_of)
        self._created = int(time.time())
        self._tools: Mapping[str, OfferedTool] = request.options["tools"]
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._open: _OpenItem | None = None
        self._answers = False  # True if the answer has a message or a call
        self._ids: list[int] = []
        self._logprobs: list[dict[str, Any]] = []

    def write_begin(self) -> bytes:
        response = self._response("in_progress")
        prompt = {"prompt_token_ids": list(self.prompt_ids)} if self.request.ids else {}
        begin = self._event("response.created", response=response, **prompt)
        return begin + self._event("response.in_progress", response=response)

    def write_reasoning(self, text: str) -> bytes:
        return self._more("reasoning_text", text)

    def write_text(self, text: str) -> bytes:
        return self._more("output_text", text)

    def write_call(self, index: int, call_id: str, name: str, arguments: Mapping[str, Any]) -> bytes:
        tool = self._tools.get(name) or OfferedTool(name)
        number = call_id.rpartition("_")[2]
        item: dict[str, Any] = {"type": "custom_tool_call" if tool.custom else "function_call"}
        if tool.custom:
            prefix, key, event = "ctc", "input", "response.custom_tool_call_input"
            call_id, text = custom_call(call_id, arguments)
        else:
            prefix, key, event = "fc", "arguments", "response.function_call_arguments"
            text = arguments_text(arguments)
        item |= {"id": f"{item_id(prefix, self.handle)}_{number}", "call_id": call_id, "name": tool.name}
        if tool.namespace:
            item["namespace"] = tool.namespace
        closed = self._close()
        self._answers = True
        address = {"item_id": item["id"], "output_index": len(self._output)}
        status = {} if tool.custom else {"status": "in_progress"}
        parts = [
            self._added({**item, key: "", **status}),
            self._event(f"{event}.delta", **address, delta=text),
            self._event(f"{event}.done", **address, **{key: text}, name=tool.name),
        ]
        status = {} if tool.custom else {"status": "completed"}
        return b"".join((closed, *parts, self._done({**item, key: text, **status})))

    def write_ids(self, token_ids: Sequence[int], logprobs: Sequence[float] | None, top: TopLogprobs | None) -> bytes:
        if self.request.ids:
            self._ids.extend(token_ids)
        if self.request.logprobs:
            count = self.request.top_logprobs
            self._logprobs += logprob_rows(self.text_of, token_ids, logprobs, top, count=count)
        return b""

    def write_end(self, answered: Answered) -> bytes:
        events = b"" if self._answers else self._more("output_text", "")
        response = self._final(answered)
        events += self._close(response["status"])
        response["output"] = self._output
        rows = {"logprobs": self._logprobs} if self._logprobs else {}
        return events + self._event(f"response.{response['status']}", response=response, **rows)

    def write_refusal(self, refused: Refused) -> bytes:
        begin = b"" if self._begun else self._begin(TurnAdmitted("", ()))
        error = {
            "code": _FAILURES.get(refused.reason, _IN_VAIN),
            "message": openai_error(refused)["error"]["message"],
        }
        response = {**self._response("failed"), "output": self._output, "error": error}
        return begin + self._event("response.failed", response=response)

    def whole(self, answered: Answered) -> bytes:
        self.end(answered)  # this adds the items of a stream to the output
        response = {**self._final(answered), "output": self._output}
        if self._logprobs:
            response["logprobs"] = self._logprobs
        if self.request.ids:
            response["token_ids"] = list(answered.turn.token_ids)
            response["prompt_token_ids"] = list(answered.turn.prompt_ids)
        return encode(response)

    # --- items

    def _more(self, kind: str, text: str) -> bytes:
        """Return the events for a further piece of this kind of text."""
        begin = b""
        if self._open is None or self._open.kind != kind:
            begin = self._close() + self._begin_part(kind)
        assert self._open is not None  # the item was opened above
        self._open.text.append(text)
        return begin + self._delta(self._open, text) if text else begin

    def _begin_part(self, kind: str) -> bytes:
        prefix = "msg" if kind == "output_text" else "rs"
        number = sum(item["id"].startswith(f"{prefix}_") for item in self._output)
        item: dict[str, Any] = {"id": item_id(prefix, self.handle, number), "status": "in_progress", "content": []}
        if prefix == "msg":
            self._answers = True
            item |= {"type": "message", "role": "assistant"}
        else:
            item |= {"type": "reasoning", "summary": [], "encrypted_content": self.handle}
        event = f"response.{kind}.delta"
        address = {"item_id": item["id"], "output_index": len(self._output), "content_index": 0}
        fields = orjson.dumps({"type": event, **address})
        self._open = part = _OpenItem(item, kind, b"event: %b\ndata: %b" % (event.encode(), fields[:-1]))
        return self._added(item) + self._event("response.content_part.added", **address, part=part.content())

    def _delta(self, part: _OpenItem, text: str) -> bytes:
        further = b""
        if part.is_message:
            further = b',"logprobs":%b' % (encode(self._logprobs) if self._logprobs else b"[]")
            part.logprobs += self._logprobs
            self._logprobs = []
        if self._ids:
            further += b',"token_ids":%b' % orjson.dumps(self._ids)
            self._ids = []
        self._number += 1
        return b'%b,"sequence_number":%d,"delta":%b%b}\n\n' % (part.delta, self._number - 1, encode(text), further)

    def _close(self, status: str = "completed") -> bytes:
        """Return the events that end the open item; b"" without one."""
        part = self._open
        if part is None:
            return b""
        late = self._delta(part, "") if part.is_message and self._logprobs else b""
        self._open = None
        content = part.content()
        address = {"item_id": part.item["id"], "output_index": len(self._output), "content_index": 0}
        logprobs = {"logprobs": part.logprobs} if part.is_message else {}
        events = self._event(f"response.{part.kind}.done", **address, text=content["text"], **logprobs)
        events += self._event("response.content_part.done", **address, part=content)
        return late + events + self._done({**part.item, "status": status, "content": [content]})

    def _added(self, item: Mapping[str, Any]) -> bytes:
        return self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _done(self, item: dict[str, Any]) -> bytes:
        done = self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return done

    # --- events

    def _event(self, kind: str, **fields: Any) -> bytes:
        if self._ids:
            fields["token_ids"], self._ids = self._ids, []
        self._number += 1
        data = {"type": kind, "sequence_number": self._number - 1, **fields}
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode(data))

    def _response(self, status: str) -> dict[str, Any]:
        """Return the response without its output, and without tools and instructions, which may be long."""
        sampling = self.request.chat_call.sampling
        return {
            "id": item_id("resp", self.handle),
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": None if sampling is None else sampling.given().get("max_tokens"),
            "metadata": {},
            "model": self.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": self.request.options["previous"],
            "store": self.request.options["store"],
            "temperature": None,
            "tool_choice": self.request.options["tool_choice"],
            "tools": [],
            "top_p": None,
            "truncation": "disabled",
            "usage": None,
        }

    def _final(self, answered: Answered) -> dict[str, Any]:
        """Return the response of a finished turn, without its output."""
        cut = _CUT.get(answered.turn.finish)
        response = self._response("completed" if cut is None else "incomplete")
        if cut is not None:
            response["incomplete_details"] = {"reason": cut}
        response["usage"] = _usage(answered.turn)
        return response


_CUT: Final = {
    FinishReason.LENGTH: "max_output_tokens",
    FinishReason.CONTEXT: "max_output_tokens",
    FinishReason.CONTENT_FILTER: "content_filter",
}
"""Reason of an incomplete answer, by the finish reason of its turn."""


def _usage(turn: Turn) -> dict[str, Any]:
    """Return the counts of ids; reasoning ids are not counted separately."""
    return {
        "input_tokens": turn.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_of(turn), "cache_write_tokens": 0},
        "output_tokens": turn.tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": turn.prompt_tokens + turn.tokens,
    }
