"""Turns written as answers of Anthropic's Messages API, and read back by Anthropic's own client."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx2
from hypothesis import strategies as st

from runner import ContentPiece, ReasoningPiece, Sampling, ToolCalled
from runner.chat_requests import ChatCall
from runner.endpoint.anthropic_messages import AnthropicMessages
from runner.endpoint.wire_form import Answered, AnswerWriter, WireRequest
from runner.engines.base import FinishReason
from runner.messages import ToolCall
from runner.testing.strategies import awkward_text
from runner.tokens.log import Source, TokenLog
from runner.trajectory import Turn
from runner.turn_events import IdsSampled, TurnAdmitted, TurnProgress

__all__ = [
    "ASKED",
    "FORM",
    "HANDLE",
    "ORDERED",
    "PARTS",
    "PROMPT",
    "Said",
    "client",
    "events",
    "rebuilt",
    "said",
    "streamed",
    "whole",
    "writer",
]

FORM = AnthropicMessages()
HANDLE = "call_0123456789ab"
PROMPT = [5, 6, 7]


@dataclass
class Said:
    """A turn and its progress events."""

    turn: Turn
    progress: list[TurnProgress] = field(default_factory=list)


def said(parts: Sequence[TurnProgress], **settings: Any) -> Said:
    """Return a turn with these parts. Each piece of a part was sampled as one id just before its event."""
    log = TokenLog()
    log.append_prompt(PROMPT, Source.PROMPT)
    progress: list[TurnProgress] = [TurnAdmitted(HANDLE, PROMPT)]
    calls = [part.call for part in parts if isinstance(part, ToolCalled)]
    for number, part in enumerate(parts):
        log.append_sampled([100 + number], [-0.5 * number])
        progress += [IdsSampled([100 + number], [-0.5 * number], None), part]
    log.append_sampled([2], None)
    progress.append(IdsSampled([2], None, None))
    turn = Turn(
        agent="main",
        number=0,
        log=log,
        start=len(PROMPT),
        end=len(log),
        text="".join(part.text for part in parts if isinstance(part, ContentPiece)),
        reasoning="".join(part.text for part in parts if isinstance(part, ReasoningPiece)),
        tool_calls=calls,
        handle=HANDLE,
        **{"finish": FinishReason.STOP, "stop": 2, "cached_tokens": 1, **settings},
    )
    return Said(turn, progress)


def request(**fields: Any) -> WireRequest:
    stop = fields.pop("stop", ())
    asked = ChatCall(messages=[], sampling=Sampling(stop=stop) if stop else None)
    return WireRequest(chat_call=asked, stream=True, **fields)


def writer(**fields: Any) -> AnswerWriter:
    return FORM.writer(request(**fields), "demo", lambda ids: "".join(map(chr, ids)))


def streamed(sample: Said, cuts: Iterable[int] = (), **fields: Any) -> bytes:
    """Return the bytes of a stream whose writer receives the progress events in groups, divided at `cuts`."""
    writes, begin, written = writer(**fields), 0, b""
    for end in [*sorted(cuts), len(sample.progress)]:
        written += writes.write(sample.progress[begin:end])
        begin = end
    return written + writes.end(Answered.of(sample.turn))


def whole(sample: Said, **fields: Any) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(writer(**fields).whole(Answered.of(sample.turn)))
    return answer


def events(written: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream, each with the name in its data."""
    found = []
    for block in written.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


@contextmanager
def client(body: bytes, *, status: int = 200, kind: str = "application/json") -> Iterator[anthropic.Anthropic]:
    """Anthropic's client, which gets this answer to every request."""
    transport = httpx2.MockTransport(
        lambda asked: httpx2.Response(status, content=body, headers={"content-type": kind})
    )
    with httpx2.Client(transport=transport, verify=PLAIN) as http:
        yield anthropic.Anthropic(api_key="key", base_url="http://here", http_client=http, max_retries=0)


PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Context without certificate authorities: reading them takes longer than a test."""
ASKED: Any = {"model": "demo", "max_tokens": 9, "messages": [{"role": "user", "content": "Mend it."}]}


def rebuilt(written: bytes) -> dict[str, Any]:
    """Return the message that the client builds from a stream."""
    with client(written, kind="text/event-stream") as api, api.messages.stream(**ASKED) as stream:
        message: dict[str, Any] = stream.get_final_message().to_dict()
    assert message.pop("stop_details") is None  # the client adds this field itself
    return message


ORDERED: list[TurnProgress] = [
    ReasoningPiece("I look"),
    ReasoningPiece(" first."),
    ContentPiece("I will "),
    ContentPiece("look."),
    ToolCalled(ToolCall("t0", "run", {"command": "ls", "seconds": 2.5})),
    ToolCalled(ToolCall("t1", "", {}, "it cannot be read")),
    ToolCalled(ToolCall("t2", "run", {})),
]


VALUES: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | awkward_text(max_pieces=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(awkward_text(max_pieces=1), inner, max_size=3),
    max_leaves=5,
)
CALLS = st.builds(
    ToolCall,
    st.just("t0"),
    st.sampled_from(["run", "ré n"]),
    st.dictionaries(st.text("abc", min_size=1), VALUES, max_size=3),
    st.sampled_from([None, None, "it cannot be read"]),
)
TEXT = awkward_text(max_pieces=3).filter(bool)
PARTS = st.lists(
    st.builds(ReasoningPiece, TEXT) | st.builds(ContentPiece, TEXT) | st.builds(ToolCalled, CALLS), max_size=8
)
