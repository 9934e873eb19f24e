"""Conversations with a chat API: sent requests, received answers, and records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner import (
    BadOption,
    Concurrency,
    ContentPiece,
    Conversation,
    Limits,
    ReasoningPiece,
    Sampling,
    ToolCalled,
)
from runner.engines.base import FinishReason
from tests.engines.chat.adding import Adding, adds, all_agents, played
from tests.engines.chat.api import Says, asking, serving
from tests.playing import Plain, talking, tasks

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_pieces_arrive_while_the_turn_is_sampled() -> None:
    events: list[Any] = []

    async def talk(conversation: Conversation) -> None:
        async with conversation.stream() as said:
            async for event in said:
                events.append(event)
                if events == [ContentPiece("A lo"), ContentPiece("ng a")]:
                    api.released.set()
        assert said.turn.text == "A long answer"

    async with serving(Says("A long answer", hold_after=3)) as api:
        await played(talking(talk), asking(api))
    assert "".join(event.text for event in events) == "A long answer"


async def test_reasoning_and_tool_calls_arrive_as_events() -> None:
    events: list[Any] = []

    class Streaming(Adding):
        async def rollout(self, conversation: Conversation) -> None:
            async with conversation.stream() as said:
                events.extend([event async for event in said])

    async with serving(adds) as api:
        await played(Streaming, asking(api), tasks=1)
    assert "".join(event.text for event in events if isinstance(event, ReasoningPiece)) == "A sum."
    assert [event.call.name for event in events if isinstance(event, ToolCalled)] == ["add"]


async def test_streamed_turn_that_is_left_is_cut_at_its_last_piece() -> None:
    async def talk(conversation: Conversation) -> None:
        async with conversation.stream() as said:
            async for _ in said:
                break
        assert (said.turn.text, said.turn.finish) == ("A lo", FinishReason.ABORT)
        conversation.add("Again?")
        api.released.set()
        await conversation.generate()

    async with serving(Says("A long answer", hold_after=2)) as api:
        await played(talking(talk), asking(api))
    assert [message["content"] for message in api.bodies[1]["messages"]] == ["Question 0?", "A lo", "Again?"]


async def test_a_malformed_call_is_answered_as_on_any_engine() -> None:
    def says(body: dict[str, Any]) -> Says:
        return Says("Sorry.") if len(body["messages"]) > 3 else Says(calls=(("add", '{"a": 1'),))

    async with serving(says) as api:
        (trajectory,) = await played(Adding, asking(api), tasks=1)
    assert [bool(made.error) for made in trajectory.turns[0].tool_calls] == [True]
    assert "could not be read" in trajectory.messages[-2]["content"]
    assert trajectory.messages[-1]["content"] == "Sorry."


async def test_a_schema_and_tool_choice_are_asked_for_and_recorded() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}

    async def talk(conversation: Conversation) -> None:
        turn = await conversation.generate(sampling=Sampling(schema=schema))
        assert turn.constraint is not None
        assert json.loads(turn.constraint.value) == schema

    async with serving('{"a": 1}') as api:
        await played(talking(talk), asking(api))
        assert api.bodies[0]["response_format"]["json_schema"]["schema"] == schema

        class Forced(Adding):
            tool_choice = "add"

        async with serving(adds) as other:
            await played(Forced, asking(other), tasks=1, limits=Limits(turns=1))
            assert other.bodies[0]["tool_choice"] == {"type": "function", "function": {"name": "add"}}


async def test_rewritten_and_branched_histories_are_sent_as_given(tmp_path: Path) -> None:
    async def talk(conversation: Conversation) -> None:
        first = await conversation.generate()
        conversation.add("More?")
        await conversation.generate()
        branch = conversation.branch("branch", turn=first, train=False)
        branch.add("Less?")
        await branch.generate()
        conversation.replace("Again?")
        await conversation.generate()
        conversation.add("Which?")
        tried = await conversation.tries(2)
        conversation.keep(tried[1])
        assert tried[0].left_out
        conversation.add("And?")
        await conversation.generate()

    async with serving(lambda body: Says(f"{len(body['messages'])}!")) as api:
        main, branch = await all_agents(tmp_path / "run.db", talking(talk), asking(api))
    asked = [[message["content"] for message in body["messages"]] for body in api.bodies]
    assert asked[1] == ["Question 0?", "1!", "More?"]
    assert asked[2] == ["Question 0?", "1!", "Less?"]
    assert asked[3] == ["Again?"]
    assert asked[4] == asked[5] == ["Again?", "1!", "Which?"]
    assert asked[6] == ["Again?", "1!", "Which?", "3!", "And?"]
    assert [segment.cause for segment in main.segments] == ["start", "environment", "branch"]
    assert [message["content"] for message in branch.messages] == ["Question 0?", "1!", "Less?", "3!"]


async def test_asking_twice_for_nothing_new_is_refused_by_name() -> None:
    async def talk(conversation: Conversation) -> None:
        await conversation.generate()
        with pytest.raises(RuntimeError, match="nothing was added to conversation 'main'"):
            await conversation.generate()
        with pytest.raises(BadOption, match=r"remaining\(\) needs token ids"):
            await conversation.remaining()
        with pytest.raises(BadOption, match=r"score\(\) needs token ids, and this engine takes messages"):
            await conversation.score(["Yes"])

    async with serving("Yes") as api:
        await played(talking(talk), asking(api))


async def test_changing_tools_are_what_the_server_is_sent() -> None:
    async def talk(conversation: Conversation) -> None:
        await conversation.generate()
        conversation.replace(tools=[])
        conversation.add("And without?")
        await conversation.generate()

    class Changing(Adding):
        async def rollout(self, conversation: Conversation) -> None:
            await talk(conversation)

    async with serving("Yes") as api:
        (trajectory,) = await played(Changing, asking(api), tasks=1)
    assert ["tools" in body for body in api.bodies] == [True, False]
    assert len(api.bodies[1]["messages"]) == 4
    assert len(trajectory.segments) == 2


async def test_connections_are_used_again() -> None:
    peers: list[Any] = []

    async def note(request: Any) -> None:
        peers.append(request.transport.get_extra_info("peername"))

    async with serving("Yes", troubles=[note] * 5) as api:
        await played(Plain, asking(api), tasks=tasks(5), concurrency=Concurrency(episodes=1))
    assert len(set(peers)) == 1
