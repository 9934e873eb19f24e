"""A turn of the real engine that is streamed during sampling: its events equal the finished turn."""

from __future__ import annotations

import pytest

from runner import (
    ContentPiece,
    Conversation,
    Environment,
    Run,
    Sampling,
    Task,
    ToolCalled,
    TurnEvent,
    VllmEngine,
    reward,
    tool,
)
from runner.testing import assert_exact

pytestmark = [pytest.mark.anyio, pytest.mark.engine]


async def test_turns_of_the_real_engine_arrive_as_events(engine: VllmEngine) -> None:
    events: list[TurnEvent] = []

    class Streaming(Environment):
        def tasks(self) -> list[Task]:
            return [Task("sum", prompt="What is 1 + 2?")]

        @tool
        def add(self, a: int, b: int) -> int:
            """Add two integers."""
            return a + b

        async def rollout(self, conversation: Conversation) -> None:
            async with conversation.stream(tool_choice="required") as stream:
                events.extend([event async for event in stream])
            conversation.add(*await conversation.call_tools(stream.turn))
            async with conversation.stream(tool_choice="none", sampling=Sampling(max_tokens=24)) as stream:
                events.extend([event async for event in stream])

        @reward
        def done(self) -> bool:
            return True

    async with Run(Streaming, engine, sampling=Sampling(max_tokens=64), seed=1) as run:
        (trajectory,) = [trajectory async for trajectory in run]
    assert not trajectory.outcome.failed, trajectory.error
    assert_exact(trajectory)
    first, second = trajectory.turns
    assert [event.call for event in events if isinstance(event, ToolCalled)] == first.tool_calls
    pieces = [event.text for event in events if isinstance(event, ContentPiece)]
    assert len(pieces) > 1
    assert "".join(pieces) == first.text + second.text
