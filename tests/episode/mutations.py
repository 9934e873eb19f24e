"""Changes of agent programs to the histories that they send back, by number, and the recordings that contain them.

Changes that no installed program makes today are in `client_recordings`, written by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tests.episode.recorded import RecordedRequest

__all__ = ["MUTATIONS", "Mutation"]

Shows = Callable[[Sequence[RecordedRequest]], bool]
"""Function that returns True if requests contain the change."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """A change that clients make to their histories."""

    number: int
    what: str
    recordings: Sequence[str]
    shows: Shows


def tolerated(name: str) -> Shows:
    return lambda requests: any(name in each.tolerated for each in requests)


def found(verdict: str, again: str = "") -> Shows:
    return lambda requests: any((each.verdict, each.again) == (verdict, again) for each in requests)


def messages(request: RecordedRequest) -> list[dict[str, Any]]:
    """Return the messages, or items, of a request."""
    return list(request.body.get("messages") or request.body.get("input") or ())


def blocks(request: RecordedRequest) -> Iterator[Mapping[str, Any]]:
    for message in messages(request):
        content = message.get("content")
        yield from content if isinstance(content, list) else ()


def calls_have_objects(requests: Sequence[RecordedRequest]) -> bool:
    made = [block for each in requests for block in blocks(each) if block.get("type") == "tool_use"]
    return any(isinstance(each["input"], dict) and each["input"] for each in made)


def marks_move(requests: Sequence[RecordedRequest]) -> bool:
    def marked(request: RecordedRequest, *, are: bool) -> set[str]:
        return {
            json.dumps({key: value for key, value in block.items() if key != "cache_control"}, sort_keys=True)
            for block in blocks(request)
            if ("cache_control" in block) is are
        }

    return any(
        marked(one, are=True) & marked(other, are=False)
        for place, one in enumerate(requests)
        for other in requests[place + 1 :]
    )


def system_speaks_later(requests: Sequence[RecordedRequest]) -> bool:
    roles = [[message.get("role") for message in messages(each)] for each in requests]
    return any("user" in each and "system" in each[each.index("user") :] for each in roles)


def turns_are_several_items(requests: Sequence[RecordedRequest]) -> bool:
    said = {"reasoning", "message", "function_call"}
    kinds = [[item.get("type") for item in messages(each) if item.get("role") != "user"] for each in requests]
    return any(said.issubset(each) for each in kinds)


def begin_alike(requests: Sequence[RecordedRequest]) -> bool:
    """True if two requests have the same messages and tools, and neither is a retry."""
    own = [each for each in requests if each.again in ("", "sibling")]
    asked = [([{**item, "id": None} for item in messages(each)], each.body.get("tools")) for each in own]
    return any(one == other for place, one in enumerate(asked) for other in asked[place + 1 :])


def named_apart(requests: Sequence[RecordedRequest]) -> bool:
    return begin_alike(requests) and all(each.headers and each.again == "" for each in requests)


def nameless(requests: Sequence[RecordedRequest]) -> bool:
    return begin_alike(requests) and found("again", "sibling")(requests)


def asks_aside(requests: Sequence[RecordedRequest]) -> bool:
    return {each.trained for each in requests} == {True, False}


def begins_anew(requests: Sequence[RecordedRequest]) -> bool:
    """True if a trained history starts again after another one, with none of its turns or only with the last ones."""
    own = [each for each in requests if each.trained]
    begun = [
        each for each in own if each.verdict in ("new", "edited") or (each.verdict == "rewound" and each.parent is None)
    ]
    return len(begun) > 1


def summary_by(role: str) -> Shows:
    """Return a test for a restarted history that has the summary as a message of this role."""

    def shows(requests: Sequence[RecordedRequest]) -> bool:
        own = [each for each in requests if each.trained]
        later = [each for each in own[1:] if each.verdict in ("new", "edited")]
        return any(role in [message.get("role") for message in messages(each)] for each in later)

    return lambda requests: begins_anew(requests) and shows(requests)


def tools_are_gone(requests: Sequence[RecordedRequest]) -> bool:
    return any(each.verdict == "tools" and not each.body.get("tools") for each in requests)


def somebody_else_spoke(requests: Sequence[RecordedRequest]) -> bool:
    first = next(each for each in requests if each.trained)
    return "assistant" in [message.get("role") for message in messages(first)]


def asks_for_sampling(requests: Sequence[RecordedRequest]) -> bool:
    return any(
        each.body.get("stop") or each.body.get("tool_choice") == "required" or "temperature" in each.body
        for each in requests
    )


def asks_otherwise(requests: Sequence[RecordedRequest]) -> bool:
    """True if a repeated request has another transport, and so another body."""
    retries = [place for place, each in enumerate(requests) if each.again == "taken_back"]
    return any(
        requests[place].body.get("stream") != requests[place - 1].body.get("stream")
        and messages(requests[place]) == messages(requests[place - 1])
        for place in retries
    )


def cut_parts_stay(requests: Sequence[RecordedRequest]) -> bool:
    """True if the parts of a cut turn stay in the retry and in the request after it."""
    kept = [each.verdict for each in requests if "cut_items" in each.tolerated]
    return kept == ["again", "append"]


MUTATIONS: Final = (
    Mutation(
        1,
        "reasoning left out",
        ("langgraph.tools", "autogen.tools", "openai-agents-chat.tools"),
        tolerated("reasoning_left_out"),
    ),
    Mutation(
        3, "arguments spelt in another way", ("langgraph.tools", "inspect-ai.tools"), tolerated("arguments_respelt")
    ),
    Mutation(4, "arguments as an object", ("claude.tools",), calls_have_objects),
    Mutation(5, "content null beside calls", ("pi.silent", "pydantic-ai.silent"), tolerated("content_null")),
    Mutation(6, "a newline before the content", ("inspect-ai.tools",), tolerated("white_space")),
    Mutation(7, "contents as parts", ("pi.tools", "qwen.tools", "smolagents.tools"), tolerated("content_parts")),
    Mutation(8, "cache_control that moves", ("claude.tools",), marks_move),
    Mutation(9, "further keys", ("mini-swe-agent.tools",), tolerated("extra_keys")),
    Mutation(10, "a volatile line in the system prompt", ("claude.billed",), tolerated("volatile_lines")),
    Mutation(11, "a system message in mid-conversation", ("claude.tools",), system_speaks_later),
    Mutation(
        12, "one turn as several items", ("codex.tools", "openai-agents-responses.tools"), turns_are_several_items
    ),
    Mutation(
        14,
        "the last turn dropped, a user message in its place",
        ("mini-swe-agent.tools", "mini-swe-agent.forgets"),
        found("rewound"),
    ),
    Mutation(15, "finished parts of a turn that was cut stay", ("codex.cut",), cut_parts_stay),
    Mutation(16, "a retry by another transport, without a mark", ("claude.cut",), asks_otherwise),
    Mutation(
        17,
        "identical requests of sub-agents that tell their names",
        ("claude.sub-agents", "codex.sub-agents", "opencode.sub-agents"),
        named_apart,
    ),
    Mutation(17, "identical requests that tell no name", ("qwen.sub-agents",), nameless),
    Mutation(18, "a side call of the same session", ("opencode.tools",), asks_aside),
    Mutation(19, "compaction with the summary as a user message", ("pi.compaction",), summary_by("user")),
    Mutation(
        19, "compaction with the summary as an assistant message", ("opencode.compaction",), summary_by("assistant")
    ),
    Mutation(20, "tools removed for one request", ("codex.compaction",), tools_are_gone),
    Mutation(21, "an assistant message that was not sampled", ("qwen.tools",), somebody_else_spoke),
    Mutation(22, "calls repeated as text", ("smolagents.tools", "smolagents.code"), found("retold")),
    Mutation(23, "sampling that the client fixes", ("smolagents.tools",), asks_for_sampling),
)
"""All recorded changes."""
