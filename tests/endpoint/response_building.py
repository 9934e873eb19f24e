"""Turns with progress events in any division, and events and requests of OpenAI's Responses API."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

from hypothesis import strategies as st
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from runner.chat_requests import ChatCall
from runner.endpoint.response_events import ResponseWriter
from runner.endpoint.responses import Responses
from runner.endpoint.wire_form import Answered, WireRequest
from runner.engines.base import FinishReason
from runner.messages import ToolCall
from runner.parsing.events import ContentPiece, ReasoningPiece
from runner.tokens.log import Source, TokenLog
from runner.trajectory import Turn
from runner.turn_events import IdsSampled, ToolCalled, TurnAdmitted, TurnProgress

__all__ = [
    "EVENT",
    "HANDLE",
    "PROMPT",
    "TALKS",
    "TOOLS",
    "Part",
    "TurnCase",
    "as_codex_keeps",
    "ask",
    "asked",
    "deltas",
    "events_of",
    "joined",
    "letters",
    "spoken",
    "stream_of",
    "turn_cases",
    "turn_of",
    "writer",
]

HANDLE = "call_0123456789ab"
PROMPT = [7, 8, 9]

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

Part: TypeAlias = ReasoningPiece | ContentPiece | ToolCall

TALKS: list[Part] = [ReasoningPiece("Hm."), ContentPiece("I look."), ToolCall("x", "shell", {"command": "ls"})]

TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "shell",
        "description": "Run a command.",
        "strict": False,
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
    {
        "type": "namespace",
        "name": "agents",
        "description": "Other agents.",
        "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {}}}],
    },
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Change files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
    },
    {"type": "web_search", "external_web_access": False},
]


def ask(headers: Mapping[str, str] | None = None, /, **body: Any) -> WireRequest:
    """Parse a request."""
    return Responses().read({"model": "m", "input": "Mend it.", **body}, headers or {})


def asked(items: Sequence[Any], **body: Any) -> ChatCall:
    """Return the model call of a request with these items."""
    return ask(input=items, **body).chat_call


def letters(ids: Sequence[int]) -> str:
    return "".join(f"<{each}>" for each in ids)


def writer(request: WireRequest | None = None) -> ResponseWriter:
    made = Responses().writer(request or ask(tools=TOOLS), "m", letters)
    assert isinstance(made, ResponseWriter)
    return made


def turn_of(parts: Iterable[Part], ids: Sequence[int] = (1, 2, 3), *, finish: FinishReason = FinishReason.STOP) -> Turn:
    """Return a turn with these parts and these ids."""
    parts = list(parts)
    log = TokenLog()
    log.append_prompt(PROMPT, Source.PROMPT)
    log.append_sampled(ids, [-float(each) / 8 for each in ids])
    return Turn(
        agent="main",
        number=0,
        log=log,
        start=len(PROMPT),
        end=len(log),
        text="".join(part.text for part in parts if isinstance(part, ContentPiece)),
        reasoning="".join(part.text for part in parts if isinstance(part, ReasoningPiece)),
        tool_calls=[part for part in parts if isinstance(part, ToolCall)],
        finish=finish,
        handle=HANDLE,
    )


@dataclass(frozen=True)
class TurnCase:
    """A turn and its progress events."""

    turn: Turn
    parts: Sequence[Part]
    progress: Sequence[Sequence[TurnProgress]]
    """The events of each call of the writer."""


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
calls = st.one_of(
    st.builds(ToolCall, st.just("x"), st.just("shell"), st.fixed_dictionaries({"command": texts})),
    st.builds(ToolCall, st.just("x"), st.just("agents__spawn"), st.just({})),
    st.builds(ToolCall, st.just("x"), st.just("nobody_s"), st.dictionaries(texts, st.integers() | texts, max_size=2)),
    st.builds(ToolCall, st.just("x"), st.just("apply_patch"), st.fixed_dictionaries({"input": texts})),
    st.builds(ToolCall, st.just("x"), st.just("apply_patch"), st.dictionaries(texts, texts, max_size=2)),
    st.builds(ToolCall, st.just("x"), st.just(""), st.just({}), st.just("not JSON")),
)


@st.composite
def spoken(draw: st.DrawFn) -> list[Part]:
    """Parts of a turn: possibly a thought, then contents and calls in any order."""
    parts: list[Part] = draw(st.lists(st.builds(ReasoningPiece, texts), max_size=1))
    return parts + draw(st.lists(st.builds(ContentPiece, texts) | calls, max_size=4))


@st.composite
def turn_cases(draw: st.DrawFn) -> TurnCase:
    """A turn with its ids and texts in pieces of any size. The progress events may end before the turn does."""
    parts = draw(spoken())
    ids = draw(st.lists(st.integers(0, 2**20), min_size=1, max_size=12))
    finish = draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    turn = turn_of(parts, ids, finish=finish)
    if draw(st.integers(0, 4)) == 0:
        return TurnCase(turn, parts, [])
    progress: list[TurnProgress] = []
    for part in parts:
        if isinstance(part, ToolCall):
            progress.append(ToolCalled(part))
            continue
        progress += [type(part)(piece) for piece in _cut(part.text, draw(_cuts(len(part.text)))) if piece]
    progress = progress[: draw(st.integers(0, len(progress)))]
    places = sorted(draw(st.lists(st.integers(0, len(progress)), min_size=3, max_size=3)), reverse=True)
    slices = [piece for piece in _cut(ids, draw(_cuts(len(ids), 2))) if piece]
    for place, piece in zip(places, reversed(slices), strict=False):
        progress.insert(place, IdsSampled(piece, [-float(each) / 8 for each in piece], None))
    progress.insert(0, TurnAdmitted(HANDLE, PROMPT))
    return TurnCase(turn, parts, _cut(progress, draw(_cuts(len(progress)))))


def _cuts(length: int, most: int = 3) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, length), max_size=most)


def _cut(whole: Any, cuts: Sequence[int]) -> list[Any]:
    at = [0, *sorted(cuts), len(whole)]
    return [whole[start:end] for start, end in pairwise(at)]


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream, after checking that `event:` is their type and that they are numbered."""
    events: list[dict[str, Any]] = []
    for block in raw.decode().split("\n\n")[:-1]:
        kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        assert event["sequence_number"] == len(events)
        events.append(event)
    return events


def stream_of(case: TurnCase, request: WireRequest) -> bytes:
    """The stream of a turn."""
    made = writer(request)
    return b"".join([*map(made.write, case.progress), made.end(Answered.of(case.turn))])


def deltas(events: Iterable[Mapping[str, Any]], kind: str) -> str:
    return "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta")


def joined(events: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    """Return the texts of the delta events, joined."""
    return [each for event in events for each in event.get(name, ())]


def as_codex_keeps(output: Iterable[Mapping[str, Any]], *, ids: bool = True) -> list[dict[str, Any]]:
    """Return the items of an answer as Codex sends them back. Its older versions send no ids."""
    kept = {
        "reasoning": ("summary", "encrypted_content"),  # the text of a thought is never sent
        "message": ("role",),
        "function_call": ("name", "namespace", "arguments", "call_id"),
        "custom_tool_call": ("name", "namespace", "input", "call_id"),
    }
    items = []
    for item in output:
        names = ("type", *kept[item["type"]], *(("id",) if ids else ()))
        items.append({name: item[name] for name in names if name in item})
        if item["type"] == "message":
            items[-1]["content"] = [{"type": "output_text", "text": part["text"]} for part in item["content"]]
    return items
