"""Clients of OpenAI's Responses and an episode: the items that they send back lead to the sampled ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from runner import Conversation, Outcome, Trajectory, Turn
from runner.chat_requests import ChatCall
from runner.endpoint.responses import Responses
from runner.endpoint.wire_form import Answered
from runner.testing import Fault, Reply, assert_exact, call
from runner.turn_events import TurnProgress
from tests.endpoint.response_building import as_codex_keeps, deltas, events_of, letters
from tests.endpoint.serving import ImmediateSink
from tests.episode.awkward import misspelling
from tests.episode.client_recordings import RECORDINGS, SENT_TOKENS, Recording, Request, filled_in
from tests.episode.recorded import NAMES, RecordedRequest, recorded, replay, replies
from tests.playing import Plain, play_all

pytestmark = pytest.mark.anyio

SHELL = {
    "type": "function",
    "name": "shell",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "tools": [{**SHELL, "name": "spawn"}],
}
PATCH = {"type": "custom", "name": "apply_patch", "format": {"type": "text"}}
TOOLS = [SHELL, AGENTS, PATCH, {"type": "web_search"}]


async def respond(
    episode: Any,
    body: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
    *,
    stream: bool = True,
    written: list[bytes] | None = None,
) -> tuple[Turn, list[dict[str, Any]]]:
    """Return the turn that answers a request, and the items of the written answer."""
    form = Responses()
    request = form.read({"return_token_ids": True, **body}, headers or {})
    writer = form.writer(request, "m", letters)
    written = [] if written is None else written

    def tell(progress: TurnProgress) -> None:
        if stream:
            written.append(writer.write([progress]))

    async def give(turn: Turn, continued: Turn | None) -> None:
        answered = Answered.of(turn, continued)
        written.append(writer.end(answered) if stream else writer.whole(answered))

    turn = await episode._chat_service.ask(request.chat_call, sink=ImmediateSink(tell), deliver=give)
    if not stream:
        output: list[dict[str, Any]] = json.loads(written[-1])["output"]
        return turn, output
    events = events_of(b"".join(written))
    assert [each for event in events for each in event.get("token_ids", ())] == list(turn.token_ids)
    return turn, events[-1]["response"]["output"]


async def played(loop: Any, says: Sequence[Any]) -> list[Trajectory]:
    class Foreign(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await loop(self.episode)

    engine = misspelling(says)
    trajectories = await play_all(Foreign, engine)
    for trajectory in trajectories:
        assert (trajectory.outcome, trajectory.error) == (Outcome.COMPLETED, "")
        assert_exact(trajectory, engine)
        kept = [turn for turn in trajectory.turns if not turn.retried]
        masks = sum(sum(segment.log.mask()) for segment in trajectory.segments)
        assert masks == sum(turn.end - turn.start for turn in kept)
    return trajectories


def answers(output: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a client's results for the calls of an answer."""
    return [
        {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "three files"}
        for item in output
        if "call_id" in item
    ]


BEGUN: list[Any] = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You may write."}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Mend it."}]},
]
SAYS = [
    Reply(
        "<think>\nI look first.\n</think>\n\n\n\nI will look.  \n",
        calls=[call("shell", command="ls  -l"), call("agents__spawn", command="é")],
    ),
    Reply("", calls=[call("apply_patch", input='*** "Begin" Patch\n')]),
    Reply("Wrong:", calls=[call("apply_patch", patch="x", again=1.0)]),
    "Done.",
]


@pytest.mark.parametrize("client", ["verbatim", "codex", "codex without ids", "by whole answers"])
async def test_client_that_appends_items_continues_the_sampled_ids(client: str) -> None:
    async def loop(episode: Any) -> None:
        items = list(BEGUN)
        for _ in SAYS:
            body = {
                "instructions": "You mend programs.",
                "input": items,
                "tools": TOOLS,
                "store": False,
            }
            _, output = await respond(episode, body, {"thread-id": "t"}, stream=client != "by whole answers")
            items += as_codex_keeps(output, ids=client == "codex") if client.startswith("codex") else output
            items += answers(output)

    (trajectory,) = await played(loop, SAYS)
    assert [request.verdict for request in trajectory.requests] == ["new", "append", "append", "append"]
    assert [segment.cause for segment in trajectory.segments] == ["start"]
    assert [request.form for request in trajectory.requests] == ["responses"] * 4
    last = {each.value for each in trajectory.requests[-1].tolerated}
    dropped = {"codex": {"reasoning_left_out"}, "codex without ids": {"reasoning_left_out", "joined"}}
    assert last == dropped.get(client, set())


async def test_cut_turn_continues_if_its_items_are_last() -> None:
    async def loop(episode: Any) -> None:
        _, output = await respond(episode, {"input": BEGUN, "tools": TOOLS})
        items = [*BEGUN, *as_codex_keeps(output), *answers(output)]
        cut, _ = await respond(episode, {"input": items, "tools": TOOLS, "max_output_tokens": 4})
        left = [{"type": "message", "role": "assistant", "id": f"msg_{cut.handle[5:]}", "content": cut.text}]
        # A turn that was cut at max_output_tokens continues; the answer contains only the new text.
        _, rest = await respond(episode, {"input": [*items, *left], "tools": TOOLS})
        items += [*left, *as_codex_keeps(rest), {"role": "user", "content": "And?"}]
        await respond(episode, {"input": items, "tools": TOOLS})

    long = Reply("It was a long way to where the files are.", chunks=1)
    (trajectory,) = await played(loop, [SAYS[0], long, " And so on.", "Yes."])
    assert [request.verdict for request in trajectory.requests] == ["new", "append", "continued", "append"]


async def test_broken_stream_in_codex_keeps_the_prompt() -> None:
    thinks = "<think>\nHm.\n</think>\n\nIt was a long way to where the files are."
    enough = thinks.index("long")

    async def loop(episode: Any) -> None:
        _, output = await respond(episode, {"input": BEGUN, "tools": TOOLS})
        items = [*BEGUN, *as_codex_keeps(output), *answers(output)]
        broken: list[bytes] = []
        async with anyio.create_task_group() as group:
            group.start_soon(partial(respond, episode, {"input": items, "tools": TOOLS}, written=broken))
            while not deltas(events_of(b"".join(broken)), "output_text").startswith("It was"):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        await anyio.wait_all_tasks_blocked()
        events = events_of(b"".join(broken))
        kept = as_codex_keeps([event["item"] for event in events if event["type"] == "response.output_item.done"])
        assert [item["type"] for item in kept] == ["reasoning"], "the message was not finished"
        items += kept
        _, output = await respond(episode, {"input": items, "tools": TOOLS})
        items += [*as_codex_keeps(output), {"role": "user", "content": "And?"}]
        await respond(episode, {"input": items, "tools": TOOLS})

    cut = Reply(thinks, fault=Fault.stall(at=enough), chunks=1)
    (trajectory,) = await played(loop, [SAYS[0], cut, "<think>\nSo.\n</think>\n\nDone.", "Yes."])
    assert [(request.verdict, request.again) for request in trajectory.requests] == [
        ("new", ""),
        ("append", ""),
        ("again", "taken_back"),
        ("append", ""),
    ]
    assert [segment.cause for segment in trajectory.segments] == ["start", "retry"]


async def test_compaction_is_recorded_from_the_metadata_of_its_request() -> None:
    async def loop(episode: Any) -> None:
        headers = {
            kind: {"x-codex-turn-metadata": json.dumps({"request_kind": kind})} for kind in ("turn", "compaction")
        }
        _, output = await respond(episode, {"input": BEGUN, "tools": TOOLS}, headers["turn"])
        items = [*BEGUN, *as_codex_keeps(output), *answers(output), {"role": "user", "content": "Sum up."}]
        await respond(episode, {"input": items, "tools": []}, headers["compaction"])
        await respond(episode, {"input": [{"role": "user", "content": "So far: x"}], "tools": TOOLS}, headers["turn"])

    trajectories = await played(loop, [SAYS[0], "A summary.", "Done."])
    requests = sorted((each for one in trajectories for each in one.requests), key=lambda each: each.number)
    assert [(each.verdict, each.purpose) for each in requests] == [
        ("new", "turn"),
        ("tools", "compaction"),
        ("new", "turn"),
    ]


# --- the recordings of other clients, as items


def items_of(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message.get("content")
        if role == "tool":
            items.append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": content})
            continue
        if reasoning := message.get("reasoning_content"):
            items.append({"type": "reasoning", "content": [{"type": "reasoning_text", "text": reasoning}]})
        if content or role != "assistant":
            items.append({"type": "message", "role": role, "content": content})
        for made in message.get("tool_calls", ()):
            function = made["function"]
            arguments = function["arguments"]
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            items.append({"type": "function_call", "call_id": made["id"], "name": function["name"], "arguments": text})
    return items


def as_items(request: RecordedRequest, handles: Mapping[int, str]) -> ChatCall:
    """Return a chat request in the format of Responses."""
    chat = request.chat_call(handles)
    body: dict[str, Any] = {
        "input": items_of(chat.messages),
        "tools": [{"type": "function", **tool["function"]} for tool in chat.tools],
        "tool_choice": chat.tool_choice,
    }
    return replace(Responses().read(body, request.headers).chat_call, train=chat.train)


OF_CHAT = [name for name in NAMES if {each.form for each in recorded(name)} == {"chat"}]


@pytest.mark.parametrize("name", OF_CHAT)
async def test_recorded_items_have_the_verdict_of_messages(name: str) -> None:
    requests = recorded(name)
    replayed = await replay(requests, misspelling(replies(requests), context=1_000_000), ask=as_items)
    found = [replace(each, tolerated=frozenset()) for each in replayed.found]
    assert found == [replace(each.found, tolerated=frozenset()) for each in requests]
    assert replayed.forms == ["responses"] * len(requests)


async def ask_again(episode: Any, request: Request, turns: list[Any]) -> None:
    tools = [{"type": "function", **tool["function"]} for tool in request.tools]
    body: dict[str, Any] = {"input": items_of(filled_in(request.messages, turns)), "tools": tools}
    turn, _ = await respond(episode, body)
    turns.append(turn)


async def ask_and_go_away(episode: Any, request: Request, turns: list[Any], engine: Any) -> None:
    enough = engine.stats().sampled_tokens + SENT_TOKENS
    async with anyio.create_task_group() as group:
        group.start_soon(ask_again, episode, request, turns)
        while engine.stats().sampled_tokens < enough:
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    turns.append(None)
    await anyio.wait_all_tasks_blocked()


@pytest.mark.parametrize("name", RECORDINGS)
async def test_changed_items_have_the_verdict_of_messages(name: str) -> None:
    recorded: Recording = RECORDINGS[name]

    class Foreign(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            turns: list[Any] = []
            for request in recorded.requests:
                if request.cut:
                    await ask_and_go_away(self.episode, request, turns, engine)
                else:
                    await ask_again(self.episode, request, turns)

    engine = misspelling(recorded.says)
    trajectories = await play_all(Foreign, engine)
    for trajectory in trajectories:
        assert (trajectory.outcome, trajectory.error) == (Outcome.COMPLETED, "")
        assert_exact(trajectory, engine)
    requests = {request.number: request for trajectory in trajectories for request in trajectory.requests}
    for number, wanted in enumerate(recorded.requests):
        if number not in requests:  # the thread is not trained
            assert not wanted.tools
            continue
        request = requests[number]
        assert (request.verdict.value, request.again.value) == (wanted.verdict, wanted.again), number
        assert request.parent_turn == wanted.parent, number
    last = next(each for each in trajectories if requests[max(requests)] in each.requests)
    assert tuple(segment.cause for segment in last.segments) == recorded.causes
