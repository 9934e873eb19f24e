"""Recordings of agent programs: their reduced requests, and the verdict on each.

They are files in `recordings/`, one for each client and scenario; `python -m tests.clients.recording` writes them. A
recording is replayed by sending its requests to an episode in the same order, with the new turns' ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.lowlevel

from runner import Conversation, Trajectory
from runner.chat_requests import ChatCall, ChatRequest
from runner.endpoint.anthropic_messages import AnthropicMessages
from runner.endpoint.chat_completions import ChatCompletions
from runner.endpoint.responses import Responses
from runner.endpoint.wire_form import WireForm
from runner.episode.turn_tree import TurnNode
from runner.testing import Fault, Reply
from runner.trajectory import Turn
from tests.filler import expanded
from tests.playing import Plain, play_all

__all__ = ["FOLDER", "NAMES", "Found", "RecordedRequest", "Replayed", "recorded", "replay", "replies"]

FOLDER: Final = Path(__file__).parent / "recordings"

NAMES: Final = sorted(each.stem for each in FOLDER.glob("*.json"))
"""The names of all recordings: the client and the scenario."""

_FORMS: Final[Mapping[str, WireForm]] = {
    form.name: form for form in (ChatCompletions(), Responses(), AnthropicMessages())
}
_LISTS: Final = ("system", "tools", "messages", "input")
_PLACEHOLDER: Final = re.compile(r"\$(\d+)\$")


@dataclass(frozen=True, slots=True)
class Found:
    """The verdict on a request."""

    verdict: str
    again: str
    tolerated: frozenset[str]
    parent: int | None
    """The request whose turn it continues."""
    cause: str
    """The cause of the segment with its turn."""


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request of a recording."""

    form: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    says: str
    """The model's reply to the request, up to the cut if it was cut."""
    ends: str
    """The delivery of the answer: delivered, undelivered, or cut during sampling."""
    trained: bool
    verdict: str
    again: str
    tolerated: frozenset[str]
    parent: int | None
    cause: str

    def chat_call(self, handles: Mapping[int, str]) -> ChatCall:
        """Return the request as a model call, with the handles of the new turns."""
        body, headers = _filled((self.body, self.headers), handles)
        chat_call = _FORMS[self.form].read(body, headers).chat_call
        return replace(chat_call, train=self.trained)

    @property
    def found(self) -> Found:
        """Return the verdict on the request."""
        return Found(self.verdict, self.again, self.tolerated, self.parent, self.cause)


@cache
def recorded(name: str) -> tuple[RecordedRequest, ...]:
    """Return the requests of a recording, with its marks expanded."""
    read = json.loads((FOLDER / f"{name}.json").read_text())
    parts = expanded(read["parts"])
    return tuple(_request(each, parts) for each in read["requests"])


def _request(given: Any, parts: list[Any]) -> RecordedRequest:
    made = expanded(given)
    body = made["body"]
    body |= {key: [parts[part] for part in body[key]] for key in _LISTS if isinstance(body.get(key), list)}
    return RecordedRequest(**{**made, "tolerated": frozenset(made["tolerated"])})


def _filled(value: Any, handles: Mapping[int, str]) -> Any:
    match value:
        case dict():
            return {key: _filled(each, handles) for key, each in value.items()}
        case list() | tuple():
            return [_filled(each, handles) for each in value]
        case str():
            return _PLACEHOLDER.sub(lambda found: handles[int(found[1])].removeprefix("call_"), value)
        case _:
            return value


@dataclass(slots=True)
class Replayed:
    """Results of a recording."""

    trajectories: list[Trajectory]
    found: list[Found]
    """The verdict on each request, in order."""
    forms: list[str]
    """The wire format of each request."""


class _Gone(Exception):
    """Raised if the client left."""


async def replay(
    requests: Sequence[RecordedRequest],
    engine: Any,
    *,
    ask: Callable[[RecordedRequest, Mapping[int, str]], ChatCall] = RecordedRequest.chat_call,
    **options: Any,
) -> Replayed:
    """Send the requests of a recording to an episode.

    Args: requests: the recorded requests. engine: the engine, with the recorded replies. ask: builds a request from a
    recorded one and the handles of the new turns. options: as for a run.
    """
    replayed = Replayed([], [], [])

    class Foreign(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            chat_service = self.episode._chat_service
            handles: dict[int, str] = {}
            for number, request in enumerate(requests):
                await _ask(chat_service, ask(request, handles), request, engine)
                handles[number] = _node(chat_service, number).turn.handle
            # If one turn answered two requests, the first request counts.
            turns = [(_node(chat_service, number).turn, number) for number in reversed(range(len(requests)))]
            own = {(turn.agent, turn.number): number for turn, number in turns}
            for number in range(len(requests)):
                record = _record(chat_service, number)
                parent = None if record.parent_turn is None else own[record.parent_agent, record.parent_turn]
                tolerated = frozenset(each.value for each in record.tolerated)
                cause = _node(chat_service, number).segment.cause
                replayed.found.append(Found(record.verdict.value, record.again.value, tolerated, parent, cause))
                replayed.forms.append(record.form)

    replayed.trajectories = await play_all(Foreign, engine, **options)
    return replayed


def replies(requests: Sequence[RecordedRequest]) -> list[Reply]:
    """Return the model's replies to the requests, without requests that are answered with an earlier reply."""
    return [_reply(each) for each in requests if each.again != "replayed"]


def _reply(request: RecordedRequest) -> Reply:
    if request.ends != "cut":
        return Reply(request.says)
    return Reply(request.says + "and so on", fault=Fault.stall(at=_ids(request)), chunks=1)


def _ids(request: RecordedRequest) -> int:
    # The tokenizer of a scripted model encodes bytes.
    return len(request.says.encode())


async def _ask(chat_service: Any, asked: ChatCall, request: RecordedRequest, engine: Any) -> None:
    async def give(turn: Turn, continued: Turn | None) -> None:
        if request.ends == "undelivered":
            raise _Gone

    if request.ends != "cut":
        with suppress(_Gone):
            await chat_service.ask(asked, deliver=give)
        return
    enough = engine.stats().sampled_tokens + _ids(request)
    async with anyio.create_task_group() as group:
        group.start_soon(chat_service.ask, asked)
        while engine.stats().sampled_tokens < enough:
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    await anyio.wait_all_tasks_blocked()


def _record(chat_service: Any, number: int) -> ChatRequest:
    records: Iterator[ChatRequest] = (each for thread in chat_service.threads for each in thread.requests)
    return next(each for each in records if each.number == number)


def _node(chat_service: Any, number: int) -> TurnNode:
    """Return the node of the turn that answered a request."""
    record = _record(chat_service, number)
    thread = next(each for each in chat_service.threads if record in each.requests)
    nodes: Iterator[TurnNode] = iter(thread.nodes)
    return next(each for each in nodes if each.turn.number == record.turn)
