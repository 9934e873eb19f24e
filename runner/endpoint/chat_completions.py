"""OpenAI's Chat Completions: requests made of messages; answers in one piece or as chunks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from runner.chat_requests import ChatCall
from runner.checked import is_whole
from runner.endpoint.refusals import Refused
from runner.endpoint.request_body import (
    SAMPLING_NUMBERS,
    bad,
    constraint_of,
    field_of,
    inner_field,
    json_schema,
    label_of,
    listed,
    most_tokens,
    note_unread,
    sampling_of,
    stops,
    with_constraint,
)
from runner.endpoint.response_items import CUSTOM_PARAMETERS, custom_arguments, custom_call, minted
from runner.endpoint.wire_form import (
    Answered,
    AnswerWriter,
    Headers,
    TokenText,
    WireForm,
    WireRequest,
    arguments_text,
    cached_of,
    encode,
    logprob_rows,
)
from runner.engines.base import FinishReason
from runner.history_cache import HistoryCache
from runner.options import ToolChoice
from runner.sampling_fields import MAX_LOGPROBS
from runner.tokens.top_logprobs import TopLogprobs
from runner.trajectory import Turn

__all__ = ["ChatCompletions", "openai_error"]

_NOT_GRANTED: Final = ("seed", "reasoning_effort", "verbosity", "prediction", "service_tier")
_REFUSED: Final = {
    "audio": "answers are text: leave it out.",
    "echo": "an answer has only the sampled tokens: leave it out.",
    "prompt_logprobs": "the log-probabilities of a prompt are not computed: leave it out.",
    "use_beam_search": "beam search is not supported: leave it out.",
}
_KNOWN: Final = frozenset(
    (
        *SAMPLING_NUMBERS,
        *_NOT_GRANTED,
        *_REFUSED,
        *("model", "messages", "tools", "tool_choice", "functions", "function_call", "response_format", "n", "best_of"),
        *("max_tokens", "max_completion_tokens", "stop", "stop_token_ids", "bad_words", "ignore_eos", "logit_bias"),
        *("stream", "stream_options", "return_token_ids", "logprobs", "top_logprobs", "parallel_tool_calls"),
        *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        # Fields that are accepted without an effect.
        *("user", "metadata", "store", "safety_identifier", "modalities", "request_id", "session_id"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_salt", "priority"),
        *("skip_special_tokens", "spaces_between_special_tokens", "add_generation_prompt", "continue_final_message"),
        *("include_reasoning", "separate_reasoning", "stream_reasoning"),
    )
)


class ChatCompletions(WireForm):
    """`POST /v1/chat/completions`."""

    name = "chat"

    def read(self, body: Mapping[str, Any], headers: Headers, seen: HistoryCache[Any] | None = None) -> WireRequest:
        _refuse_unknown_answers(body)
        not_granted = {name: body[name] for name in _NOT_GRANTED if body.get(name) is not None}
        tools, custom = _tools(body, not_granted)
        tool_choice = _tool_choice(body, not_granted)
        if body.get("parallel_tool_calls") is False:
            not_granted["parallel_tool_calls"] = False
        note_unread(body, _KNOWN, not_granted)
        schema = json_schema(field_of(body, "response_format", dict, {}), "response_format")
        top = field_of(body, "top_logprobs", int, 0)
        if not 0 <= top <= MAX_LOGPROBS:
            bad(f"top_logprobs: give a whole number from 0 to {MAX_LOGPROBS}, not {top}.")
        sampling = sampling_of(
            body,
            SAMPLING_NUMBERS,
            max_tokens=most_tokens(body, "max_tokens", "max_completion_tokens"),
            stop=stops(body, "stop"),
            stop_ids=_stop_ids(body),
            bad_words=stops(body, "bad_words"),
            ignore_eos=field_of(body, "ignore_eos", bool, False) or None,
            logit_bias=_logit_bias(body),
            logprobs=top or None,
            **with_constraint(constraint_of(body, schema), tools, tool_choice, not_granted),
        )
        stream = field_of(body, "stream", bool, False)
        given = field_of(body, "messages", list, []) or bad("messages: give at least one.")
        return WireRequest(
            chat_call=ChatCall(
                messages=(seen or HistoryCache[Any]()).read(given, _message),
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
            options={
                "usage": bool(field_of(body, "stream_options", dict, {}).get("include_usage")),
                "custom": custom,
            },
        )

    def writer(self, request: WireRequest, model: str, text_of: TokenText) -> AnswerWriter:
        return _CompletionWriter(request, model, text_of)

    def refusal(self, refused: Refused) -> Mapping[str, Any]:
        return openai_error(refused)


def _refuse_unknown_answers(body: Mapping[str, Any]) -> None:
    """Raise Refused if a request asks for an unsupported kind of answer."""
    for name in ("n", "best_of"):
        if field_of(body, name, int, 1) != 1:
            bad(f"{name}: one answer is sampled per request; send another request for a further answer.")
    if body.get("functions") or body.get("function_call") not in (None, "auto", "none"):
        bad("functions: this field was replaced by tools; give tools and tool_choice.")
    for name, fix in _REFUSED.items():
        if body.get(name):
            bad(f"{name}: {fix}")
    if set(map(str, field_of(body, "modalities", list, []))) - {"text"}:
        bad(f"modalities: answers are text only, not {body['modalities']!r:.60}.")


def _stop_ids(body: Mapping[str, Any]) -> tuple[int, ...]:
    ids = field_of(body, "stop_token_ids", list, [])
    if not all(is_whole(each, least=0) for each in ids):
        bad(f"stop_token_ids: give a list of token ids, not {ids!r:.60}.")
    return tuple(ids)


def _logit_bias(body: Mapping[str, Any]) -> dict[int, Any]:
    """Return the biases by id; in JSON, ids are strings."""
    given = field_of(body, "logit_bias", dict, {})
    if not all(each.isascii() and each.isdecimal() and len(each) < 20 for each in given):
        bad(f'logit_bias: give numbers by token id, such as {{"262": -100}}, not {given!r:.60}.')
    return {int(each): value for each, value in given.items()}


def _tools(body: Mapping[str, Any], not_granted: dict[str, Any]) -> tuple[list[dict[str, Any]], frozenset[str]]:
    """Return the tools of a request, all as functions, and the names of the custom tools among them.

    Tools that a provider would run are left out, and recorded as not granted.

    Raises:
        Refused: a custom tool has no name, or a part of it has the wrong type; the message has its index.
    """
    tools, custom = list[dict[str, Any]](), set[str]()
    for index, tool in enumerate(listed(body, "tools")):
        kind = tool.get("type")
        if kind is None and isinstance(tool.get("function"), dict):
            kind, tool = "function", {**tool, "type": "function"}
        if isinstance(kind, str) and kind and kind not in ("function", "custom"):
            not_granted.setdefault("tools", []).append(kind)
            continue
        if kind != "custom":
            tools.append(tool)
            continue
        where = f"tools[{index}].custom"
        given = inner_field(tool, f"tools[{index}]", "custom", dict, {})
        name = given.get("name")
        if not isinstance(name, str) or not name:
            bad(f"{where}.name: give the tool's name, not {name!r:.60}.")
        description = inner_field(given, where, "description", str, "") + _grammar(given, where)
        function = {"name": name, "description": description, "parameters": dict(CUSTOM_PARAMETERS)}
        tools.append({"type": "function", "function": function})
        custom.add(name)
    return tools, frozenset(custom)


def _grammar(given: Mapping[str, Any], where: str) -> str:
    """Return a text to append to a custom tool's description, with the grammar of its input; "" without a grammar."""
    form = inner_field(given, where, "format", dict, {})
    grammar = inner_field(form, f"{where}.format", "grammar", dict, {})
    definition = grammar.get("definition")
    if form.get("type") != "grammar" or not isinstance(definition, str):
        return ""
    return f"\n\nThe input is written by this {grammar.get('syntax')} grammar:\n{definition}"


def _tool_choice(body: Mapping[str, Any], not_granted: dict[str, Any]) -> ToolChoice | None:
    """Return the tool choice: "auto", "none", "required" or the name of a tool; None if the field is null or missing.

    Raises:
        Refused: the field is not a valid tool choice.
    """
    given = body.get("tool_choice")
    if given is None or given in ("auto", "none", "required"):
        return given
    if isinstance(given, Mapping) and given.get("type") == "allowed_tools":
        return _allowed(inner_field(given, "tool_choice", "allowed_tools", dict, {}), not_granted)
    name = _chosen(given)
    if not name:
        bad(
            "tool_choice: give auto, none, required, "
            '{"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", "allowed_tools": ...}, '
            f"not {given!r:.80}."
        )
    return name


def _chosen(given: Any) -> str:
    """Return the name of the chosen tool; "" if the value has none."""
    for kind in ("function", "custom"):
        tool = given.get(kind) if isinstance(given, Mapping) else None
        name = tool.get("name") if isinstance(tool, Mapping) else None
        if isinstance(name, str):
            return name
    return ""


def _allowed(given: Mapping[str, Any], not_granted: dict[str, Any]) -> ToolChoice:
    """Return the name of the allowed tool if there is only one and a call is required; otherwise, return the mode.

    In the second case, the list of allowed tools is recorded as not granted.
    """
    mode = given.get("mode")
    if mode not in ("auto", "required"):
        bad(f"tool_choice.allowed_tools.mode: give auto or required, not {mode!r:.60}.")
    allowed = [
        name for tool in inner_field(given, "tool_choice.allowed_tools", "tools", list, []) if (name := _chosen(tool))
    ]
    if mode == "required" and len(allowed) == 1:
        return allowed[0]
    not_granted["allowed_tools"] = allowed
    return str(mode)


def _message(_: int, message: Any) -> Any:
    """Return a message in the form that the episode reads.

    Calls of custom tools become calls of functions. A refusal becomes the content if the message has no content.
    """
    if not isinstance(message, dict):
        return message
    role = message.get("role")
    if role == "tool" and isinstance(message.get("tool_call_id"), str):
        answered = minted(message["tool_call_id"])
        return message if answered == message["tool_call_id"] else {**message, "tool_call_id": answered}
    return _assistant(message) if role == "assistant" else message


def _assistant(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if isinstance(calls, list) and any(isinstance(call, dict) and call.get("type") == "custom" for call in calls):
        message = {**message, "tool_calls": [_call(call) for call in calls]}
    for name in ("reasoning", "reasoning_content"):
        thought = message.get(name)
        if thought is not None and not isinstance(thought, str):
            message = {**message, name: _text_of(thought)}
    if not message.get("content") and isinstance(message.get("refusal"), str):
        message = {**message, "content": message["refusal"], "refusal": None}
    return message


def _text_of(parts: Any) -> str | None:
    """Return the joined texts of the parts of a reasoning; None if the parts have no text."""
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "".join(text for text in texts if isinstance(text, str)) or None


def _call(call: Any) -> Any:
    custom = call.get("custom") if isinstance(call, dict) and call.get("type") == "custom" else None
    if not isinstance(custom, dict) or not isinstance(custom.get("input"), str) or not isinstance(call.get("id"), str):
        return call
    function = {"name": custom.get("name"), "arguments": custom_arguments(call["id"], custom["input"])}
    return {"id": minted(call["id"]), "type": "function", "function": function}


def openai_error(refused: Refused) -> dict[str, Any]:
    """Return the body of a refusal, as OpenAI's clients read it."""
    message = refused.message
    if refused.context:  # by these words clients detect that they must compact their history
        message = (
            f"This model's maximum context length is {refused.context} tokens. However, your messages resulted in "
            f"{refused.prompt} tokens. Please reduce the length of the messages."
        )
    kind = "server_error" if refused.reason.status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": refused.reason.value}}


class _CompletionWriter(AnswerWriter):
    """The writer of an answer as chunks, whose constant parts are encoded once."""

    def __init__(self, request: WireRequest, model: str, text_of: TokenText) -> None:
        super().__init__(request, model, text_of)
        self._created = int(time.time())
        self._custom: frozenset[str] = request.options["custom"]
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
        # DeepSeek and vLLM use different names, and some clients read only one of them.
        encoded = encode(text)
        return self._chunk(b'{"reasoning_content":%b,"reasoning":%b}' % (encoded, encoded))

    def write_text(self, text: str) -> bytes:
        return self._chunk(b'{"content":%b}' % encode(text))

    def write_call(self, index: int, call_id: str, name: str, arguments: Mapping[str, Any]) -> bytes:
        return self._chunk(encode({"tool_calls": [{"index": index, **self._call(call_id, name, arguments)}]}))

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
            message["reasoning_content"] = message["reasoning"] = answered.reasoning
        if answered.calls:
            message["tool_calls"] = [self._call(*call) for call in answered.calls]
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

    def _call(self, call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if name in self._custom:
            call_id, text = custom_call(call_id, arguments)
            return {"id": call_id, "type": "custom", "custom": {"name": name, "input": text}}
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments_text(arguments)}}

    def _chunk(self, delta: bytes, finish: str | None = None, *, further: bytes = b"") -> bytes:
        end = b"null" if finish is None else b'"%b"' % finish.encode()
        return b'%b%b,"finish_reason":%b%b}]}\n\n' % (self._open, delta, end, further)

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[float] | None, top: TopLogprobs | None
    ) -> list[dict[str, Any]]:
        return logprob_rows(self.text_of, token_ids, logprobs, top, count=self.request.top_logprobs)


def _completion_id(handle: str) -> str:
    return f"chatcmpl-{handle.removeprefix('call_')}"


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
