"""Trajectories as Python objects: how they are shown."""

from __future__ import annotations

import pytest

from runner import Conversation, tool
from runner.testing import call
from tests.playing import Plain, play

pytestmark = pytest.mark.anyio


class Talks(Plain):
    async def rollout(self, conversation: Conversation) -> None:
        for _ in range(50):
            await conversation.generate()
            conversation.add("Continue.\n" * 20)


class Adds(Plain):
    @tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


async def test_records_have_a_short_repr_whatever_they_hold() -> None:
    trajectory = await play(Talks, lambda asked: "It is so.\n" * 30)
    (segment,) = trajectory.segments
    assert repr(trajectory) == "<Trajectory 't0#0' 'main': completed, reward 1.0, 50 turns, 15050 sampled ids>"
    assert repr(segment) == f"<Segment 'start': 101 messages, {len(segment.log)} ids>"
    assert repr(trajectory.turns[3]) == r"<Turn 3 of 'main': 'It is so.\nI...\nIt is so.\n', 301 ids, stop>"
    assert repr(segment.log) == f"<TokenLog of {len(segment.log)} ids>"


async def test_repr_of_a_turn_lists_its_calls() -> None:
    trajectory = await play(Adds, [call("add", a=1, b=2), "3"])
    assert repr(trajectory.turns[0]) == "<Turn 0 of 'main': '', calls ['add'], 16 ids, stop>"
