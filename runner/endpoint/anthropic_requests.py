"""Requests in the form of Anthropic's Messages: their blocks become messages with text, calls and results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any, Final, NoReturn

import orjson

from runner.chat_requests import ChatCall
from runner.endpoint.anthropic_tools import known_function
from runner.endpoint.refusals import Reason, Refused
from runner.endpoint.request_body import (
    bad,
    field_of,
    inner_field,
    json_schema,
    label_of,
    listed,
    note_unread,
    sampling_of,
    stops,
    with_constraint,
)
from runner.endpoint.wire_form import Headers
from runner.history_cache import HistoryCache
from runner.messages import note_of
from runner.options import Sampling, ToolChoice
from runner.sampling_fields import sampling_names

__all__ = ["chat_call_of"]

_SAMPLING: Final = sampling_names(anthropic=True)
_NOT_GRANTED: Final = ("thinking", "context_management", "service_tier", "speed", "inference_geo", "fallbacks")
_REFUSED: Final = {
    "mcp_servers": "tools of other servers are not called from here: list them in tools and call them yourself.",
    "container": "nothing is run here: leave it out, and run the calls of tools yourself.",
    "compaction": "histories are not summarised here: leave it out, and ask for a summary in a message.",
}
_KNOWN: Final = frozenset(
    (
        *_SAMPLING,
        *_NOT_GRANTED,
        *_REFUSED,
        "thread",
        *("model", "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream"),
        *("output_config", "output_format", "return_token_ids", "logprobs"),
        # Fields that are accepted without an effect.
        *("metadata", "diagnostics", "cache_control", "betas", "anthropic_beta", "user_profile_id", "workspace_id"),
    )
)
_NO_THREAD: Final = "no history is kept here under a name: leave it out, and send the whole history in messages."
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_TAKEN: Final = {
    "user": "text or tool_result",
    "assistant": "text, thinking or tool_use",
    "system": "text",
    "tool": "text",
}
"""Types of the blocks that a message may have, by its role."""

_SESSION: Final = re.compile(r"session_([0-9A-Za-z-]+)\Z")


def chat_call_of(
    body: Mapping[str, Any], headers: Headers, seen: HistoryCache[Any], *, form: str, counting: bool = False
) -> ChatCall:
    """Parse a request in Anthropic's form.

    Args:
        body: the request's body.
        headers: the request's headers.
        seen: cache of histories that were read for earlier requests.
        form: name of the wire form.
        counting: True if only the prompt is counted, so that `max_tokens` is not required.

    Raises:
        Refused: a field cannot be used.
    """
    for name, why in _REFUSED.items():
        if body.get(name) not in (None, [], {}):
            bad(f"{name}: {why}")
    if body.get("thread") not in (None, {}):
        # Clients detect by this code that they may continue without a thread.
        raise Refused(Reason.INVALID, f"thread: {_NO_THREAD}", code="thread_unsupported_request")
    not_granted = {name: body[name] for name in _NOT_GRANTED if body.get(name) not in (None, [], {}, "auto")}
    note_unread(body, _KNOWN, not_granted)
    tools = _tools(body, not_granted)
    tool_choice = _tool_choice(body, tools, not_granted)
    history = _history(body, seen)
    return ChatCall(
        messages=history.messages,
        tools=tools,
        sampling=_sampling(body, tools, tool_choice, not_granted, counting=counting),
        tool_choice=tool_choice,
        label=label_of(headers) or _session(body),
        handles=history.handles,
        form=form,
        client=headers.get("user-agent", ""),
        not_granted=not_granted,
    )


# --- the history


@dataclass(slots=True)
class _ReadHistory:
    """The messages of a request, and the handles of turns in them."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    handles: list[str] = field(default_factory=list)


def _history(body: Mapping[str, Any], seen: HistoryCache[_ReadHistory]) -> _ReadHistory:
    history = _ReadHistory()
    if body.get("system"):
        _add_system(history, _blocks(body, "system", "system"))
    messages = listed(body, "messages") or bad("messages: give at least one.")
    last = len(messages) - 1
    read = [*seen.read(messages[:last], _read_message), _read_message(last, messages[last], strict=True)]
    history.messages += chain.from_iterable(map(attrgetter("messages"), read))
    history.handles += chain.from_iterable(map(attrgetter("handles"), read))
    previous = field_of(body, "diagnostics", dict, {}).get("previous_message_id")
    if isinstance(previous, str):
        history.handles.append(f"call_{previous.removeprefix('msg_')}")
    return history


def _read_message(index: int, message: Mapping[str, Any], *, strict: bool = False) -> _ReadHistory:
    read, where = _ReadHistory(), f"messages[{index}]"
    blocks = _blocks(message, "content", f"{where}.content")
    match message.get("role"):
        case "user":
            _add_user(read, blocks, strict=strict)
        case "assistant":
            _add_assistant(read, blocks)
        case "system":
            _add_system(read, blocks)
        case other:
            bad(f"{where}.role: give user, assistant or system, not {other!r:.60}.")
    return read


class _Block:
    """A block of the content of a message or of a tool result."""

    # A first request may have a thousand blocks, so the constructor does little.
    __slots__ = ("_index", "_path", "given", "kind")

    def __init__(self, given: Mapping[str, Any], path: str, index: int | None = None) -> None:
        self.given = given
        self.kind = given.get("type")
        self._path = path
        self._index = index

    @property
    def where(self) -> str:
        """Path of the block in the body."""
        return self._path if self._index is None else f"{self._path}[{self._index}]"

    def text(self, name: str) -> str:
        value = self.given.get(name)
        return value if isinstance(value, str) else bad(f"{self.where}.{name}: give a string, not {value!r:.60}.")

    def refuse(self, role: str) -> NoReturn:
        """Raise Refused, since a message with this role cannot have the block."""
        bad(f"{self.where}: a block of type {self.kind!r:.60} cannot be in the model's prompt: give {_TAKEN[role]}.")


def _blocks(holder: Mapping[str, Any], name: str, where: str) -> list[_Block]:
    """Return the blocks of a content; a string is one block.

    Raises:
        Refused: the content is neither a string nor a list of blocks.
    """
    content = holder.get(name)
    if isinstance(content, str):
        return [_Block({"type": "text", "text": content}, where)]
    if not isinstance(content, list):
        bad(f"{where}: give a string or a list of blocks, not {content!r:.60}.")
    blocks = []
    for index, block in enumerate(content):
        if not isinstance(block, dict):
            bad(f"{where}[{index}]: give a block, which is an object with a type, not {block!r:.60}.")
        blocks.append(_Block(block, where, index))
    return blocks


def _message(role: str, content: str, blocks: Sequence[_Block], **more: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role, "content": content, **more}
    for block in blocks:
        if block.given.get("cache_control"):  # recorded as a tolerated difference (`CACHE_MARKS`)
            message["cache_control"] = block.given["cache_control"]
            break
    return message


def _lines(blocks: Sequence[_Block], role: str, *, strict: bool = True) -> str:
    """Join the texts of blocks by newlines, so that the lines of one block can be removed later.

    A block that is not text raises `Refused` if `strict`. Otherwise, a note replaces the block.
    """
    return "\n".join([_text(block, role, strict=strict) for block in blocks])


def _text(block: _Block, role: str, *, strict: bool) -> str:
    if block.kind == "text":
        return block.text("text")
    if strict or not isinstance(block.kind, str):
        block.refuse(role)
    return note_of(block.given)


def _has_notes(blocks: Sequence[_Block]) -> dict[str, bool]:
    """Return the mark for a message in which a note replaces some blocks; an empty mapping for other messages."""
    return {"not_text": True} if any(block.kind != "text" for block in blocks) else {}


def _add_system(history: _ReadHistory, blocks: Sequence[_Block]) -> None:
    if blocks:
        history.messages.append(_message("system", _lines(blocks, "system"), blocks))


def _add_user(history: _ReadHistory, blocks: Sequence[_Block], *, strict: bool) -> None:
    """Add the results of tools, which answer the previous message, and then the user's text.

    The user's new message must be text. In earlier messages and in results, a note replaces other content.
    """
    results = [_result(block) for block in blocks if block.kind == "tool_result"]
    history.messages += results
    if len(results) < len(blocks) or not results:
        shown = [block for block in blocks if block.kind != "tool_result"]
        history.messages.append(_message("user", _lines(shown, "user", strict=strict), shown, **_has_notes(shown)))


def _result(block: _Block) -> dict[str, Any]:
    answered, failed = block.text("tool_use_id"), block.given.get("is_error")
    inner = _blocks(block.given, "content", f"{block.where}.content") if block.given.get("content") else []
    text = _lines(inner, "tool", strict=False)
    message = _message("tool", text, [block, *inner], tool_call_id=answered, **_has_notes(inner))
    if failed:  # no template reads this field; it is recorded as a tolerated difference (`EXTRA_KEYS`)
        message["is_error"] = failed
    return message


def _add_assistant(history: _ReadHistory, blocks: Sequence[_Block]) -> None:
    """Add a turn. Its pieces are joined without separators, as they were sampled."""
    content, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    handle, notes = "", list[_Block]()
    for block in blocks:
        match block.kind:
            case "text":
                content.append(block.text("text"))
            case "thinking":
                thoughts.append(block.text("thinking"))
                if block.given.get("signature") is not None:
                    handle = block.text("signature")
                    history.handles.append(handle)
            case "redacted_thinking":
                pass  # this block is encrypted, and only the provider can read it
            case "tool_use":
                calls.append(_call(block))
            case _:
                content.append(_text(block, "assistant", strict=False))
                notes.append(block)
    message = _message("assistant", "".join(content), blocks, **_has_notes(notes))
    if handle and not calls:  # if there are calls, their ids name the turn
        message["handle"] = handle
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    history.messages.append(message)


def _call(block: _Block) -> dict[str, Any]:
    # Arguments of an earlier call may be anything, such as a truncated text. The message reader handles them.
    function = {"name": block.text("name"), "arguments": block.given.get("input") or {}}
    return {"id": block.text("id"), "type": "function", "function": function}


# --- tools, sampling and the rest


def _tools(body: Mapping[str, Any], not_granted: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tools in OpenAI's form.

    Tools that the API itself would run are left out, and recorded as not granted.
    """
    tools, left_out = list[dict[str, Any]](), list[str]()
    for index, tool in enumerate(listed(body, "tools")):
        where, kind = f"tools[{index}]", tool.get("type")
        if kind not in (None, "custom") and tool.get("input_schema") is None:
            known = known_function(tool)
            if known is None:
                left_out.append(str(tool.get("name") or kind))
            else:
                tools.append({"type": "function", "function": known})
            continue
        name, schema = tool.get("name"), tool.get("input_schema")
        if not isinstance(name, str) or not name:
            bad(f"{where}.name: give the tool's name, not {name!r:.60}.")
        if not isinstance(schema, dict):
            bad(f"{where}.input_schema: give a JSON schema, which is an object, not {schema!r:.60}.")
        function = {"name": name, "description": inner_field(tool, where, "description", str, ""), "parameters": schema}
        tools.append({"type": "function", "function": function})
    if left_out:
        not_granted["tools"] = left_out
    return tools


def _tool_choice(
    body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], not_granted: dict[str, Any]
) -> ToolChoice | None:
    given = field_of(body, "tool_choice", dict, {})
    if given.get("disable_parallel_tool_use"):
        not_granted["disable_parallel_tool_use"] = True
    if not given:
        return None
    kind, name = given.get("type"), given.get("name")
    if kind == "tool":
        if name not in [tool["function"]["name"] for tool in tools]:
            bad(f"tool_choice.name: {name!r:.60} is not one of the tools that can be called: give the name of one.")
        return str(name)
    choice = _CHOICES.get(kind) if isinstance(kind, str) else None
    return choice or bad(f"tool_choice.type: give auto, any, tool or none, not {kind!r:.60}.")


def _sampling(
    body: Mapping[str, Any],
    tools: Sequence[Any],
    tool_choice: ToolChoice | None,
    not_granted: dict[str, Any],
    *,
    counting: bool,
) -> Sampling | None:
    most = field_of(body, "max_tokens", int, 0)
    if body.get("max_tokens") is None and not counting:
        bad("max_tokens: give the maximum number of tokens of the answer.")
    if most < 1 and body.get("max_tokens") is not None:
        bad(f"max_tokens: give 1 or more, not {most}; this endpoint cannot warm a cache without an answer.")
    config = field_of(body, "output_config", dict, {})
    form = inner_field(config, "output_config", "format", dict, {}) or field_of(body, "output_format", dict, {})
    wishes = {name: value for name, value in config.items() if name != "format" and value is not None}
    if wishes:
        not_granted["output_config"] = wishes
    schema = json_schema(form, "output_config.format")
    constraint = with_constraint({} if schema is None else {"schema": schema}, tools, tool_choice, not_granted)
    return sampling_of(body, _SAMPLING, max_tokens=most or None, stop=stops(body, "stop_sequences"), **constraint)


def _session(body: Mapping[str, Any]) -> str:
    """Return the session id from the user id of Claude Code; "" if there is none.

    The user id either ends with the session id, or is a JSON object with a field for it.
    """
    user = field_of(body, "metadata", dict, {}).get("user_id")
    if not isinstance(user, str):
        return ""
    if found := _SESSION.search(user):
        return found[1][:200]
    try:
        metadata = orjson.loads(user)
    except orjson.JSONDecodeError:
        return ""
    session = metadata.get("session_id") if isinstance(metadata, dict) else None
    return session[:200] if isinstance(session, str) else ""
