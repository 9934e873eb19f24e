"""A turn's reasoning in Chat Completions: written into both fields that clients read, and accepted in all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from runner import Endpoint
from runner.testing import Reply, call
from tests.endpoint.serving import RUN, chat_body, events_of, http, openai_client, served, user
from tests.playing import recording

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone]

THOUGHT = "I look first.\n\nThen I say so."
SAYS = f"<think>\n{THOUGHT}\n</think>\n\nI will look."


def in_content(open_mark: str, close_mark: str) -> Callable[[dict[str, Any]], None]:
    def change(message: dict[str, Any]) -> None:
        message["content"] = f"{open_mark}{message.pop('reasoning_content')}{close_mark}{message['content'] or ''}"
        del message["reasoning"]

    return change


SENT_BACK: dict[str, tuple[Callable[[dict[str, Any]], Any], set[str]]] = {
    "both fields": (lambda message: None, set()),
    "deepseek's field": (lambda message: message.pop("reasoning"), set()),
    "vllm's field": (lambda message: message.pop("reasoning_content"), set()),
    "neither": (lambda message: (message.pop("reasoning"), message.pop("reasoning_content")), {"reasoning_left_out"}),
    "think": (in_content("<think>\n", "\n</think>\n\n"), {"reasoning_in_content"}),
    "think without lines": (in_content("<think>", "</think>"), {"reasoning_in_content"}),
    "think after white space": (in_content("\n <think>\n\n", "</think>\n"), {"reasoning_in_content"}),
    "thinking": (in_content("<thinking>", "</thinking>\n"), {"reasoning_in_content"}),
    "reasoning": (in_content("<reasoning>", "</reasoning>\n"), {"reasoning_in_content"}),
}


async def test_both_fields_have_the_reasoning_whole_and_streamed() -> None:
    async def loop(endpoint: Endpoint) -> None:
        async with openai_client(endpoint) as client:
            whole = await client.chat.completions.create(model="any", messages=[user("One.")])
            message: Any = whole.choices[0].message
            assert message.reasoning_content == message.reasoning == THOUGHT
            pieces: list[Any] = []
            async for chunk in await client.chat.completions.create(model="any", messages=[user("Two.")], stream=True):
                pieces += [choice.delta.model_dump() for choice in chunk.choices]
        for name in ("reasoning_content", "reasoning"):
            assert "".join(piece.get(name) or "" for piece in pieces).strip() == THOUGHT
        assert all(piece.get("reasoning_content") == piece.get("reasoning") for piece in pieces)

    await served(loop, recording([SAYS, SAYS], template="hermes"), serve={"train": True})


async def test_an_answer_without_reasoning_has_neither_field() -> None:
    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            whole = await client.post("/chat/completions", json=chat_body([user("One.")]))
            streamed = await client.post("/chat/completions", json=chat_body([user("Two.")], stream=True))
        messages = [
            whole.json()["choices"][0]["message"],
            *(event["choices"][0]["delta"] for event in events_of(streamed.text)),
        ]
        assert not [each for each in messages if {"reasoning", "reasoning_content"} & each.keys()]

    await served(loop, recording(["Done.", "Done."], template="hermes"), serve={"train": True})


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize("calls", [True, False], ids=["with calls", "without"])
@pytest.mark.parametrize("name", SENT_BACK)
async def test_reasoning_that_comes_back_in_any_place_is_that_turns(name: str, calls: bool) -> None:
    change, tolerated = SENT_BACK[name]

    async def loop(endpoint: Endpoint) -> None:
        messages: list[Any] = [user("One.")]
        async with http(endpoint) as client:
            for _ in range(3):
                answer = await client.post("/chat/completions", json=chat_body(messages, tools=[RUN]))
                assert answer.status_code == 200, answer.text
                message = answer.json()["choices"][0]["message"]
                change(message)
                messages.append(message)
                messages += [
                    {"role": "tool", "tool_call_id": each["id"], "content": "a file"}
                    for each in message.get("tool_calls", ())
                ] or [user("Continue.")]

    reply = Reply(SAYS, calls=[call("run", command="ls")] if calls else [])
    (trajectory,) = await served(loop, [reply, reply, reply], serve={"train": True})
    assert [request.verdict for request in trajectory.requests] == ["new", "append", "append"]
    assert len(trajectory.segments) == 1
    assert {each for request in trajectory.requests for each in request.tolerated} == tolerated


async def test_thought_in_the_content_of_a_foreign_message_is_kept() -> None:
    said: list[Any] = []

    async def loop(endpoint: Endpoint) -> None:
        foreign = {"role": "assistant", "content": "<think>Another one.</think>\n\nI will look."}
        async with http(endpoint) as client:
            await client.post("/chat/completions", json=chat_body([user("One.")]))
            await client.post("/chat/completions", json=chat_body([user("One."), foreign, user("Two.")]))
            said.append(foreign["content"])

    (trajectory,) = await served(loop, [SAYS, SAYS], serve={"train": True})
    assert [request.verdict for request in trajectory.requests] == ["new", "retold"]
    assert said[0] in [message["content"] for message in trajectory.segments[1].messages]
