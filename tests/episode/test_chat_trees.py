"""Random trees of requests, compared with a model of the turn tree: paths are exact, and ids are trained once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner import Conversation, Outcome, Turn
from runner.testing import assert_exact, call
from tests.episode.awkward import misspelling
from tests.episode.client_recordings import RUN
from tests.playing import Plain, play_all


@dataclass(frozen=True)
class Ask:
    """A request: the index of the turn that it continues (-1 for the start), and the messages that it adds."""

    continues: int
    says: str


batches = st.lists(st.builds(Ask, st.integers(-1, 12), st.sampled_from("ab")), min_size=1, max_size=3)
"""Requests that are made at the same time."""


@dataclass
class Known:
    """The test's model of a turn: the messages of its prompt, and the turn before it."""

    messages: list[Any]
    turn: Turn
    before: Known | None
    path: tuple[int, ...] = field(default=())


def reply_of(calls: bool, number: int) -> Any:
    # The same words occur again and again, so that only the ids of calls distinguish such turns.
    return call("run", command="ls") if calls else ["It is done", "It is the end"][number % 2]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(batches, min_size=1, max_size=6), st.lists(st.booleans(), min_size=20, max_size=20))
def test_every_path_of_a_tree_is_exact_and_each_id_is_trained_once(steps: list[list[Ask]], calls: list[bool]) -> None:
    anyio.run(check, steps, calls)


async def check(steps: list[list[Ask]], calls: list[bool]) -> None:
    known: list[Known] = []

    async def ask(episode: Any, one: Ask) -> Known:
        before = known[one.continues % len(known)] if known and one.continues >= 0 else None
        messages: list[Any] = []
        if before is not None:
            said = before.turn.as_message()
            results = [
                {"role": "tool", "tool_call_id": each["id"], "content": one.says} for each in said.get("tool_calls", ())
            ]
            messages = [*before.messages, said, *results]
        messages = [*messages, {"role": "user", "content": one.says}]
        turn = await episode.chat(messages, tools=[RUN])
        return Known(messages, turn, before)

    class Foreign(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            for batch in steps:
                made: list[Known | None] = [None] * len(batch)

                async def keep(place: int, one: Ask, made: Any = made) -> None:
                    made[place] = await ask(self.episode, one)

                async with anyio.create_task_group() as group:
                    for place, one in enumerate(batch):
                        group.start_soon(keep, place, one)
                known.extend(each for each in made if each is not None)

    numbers = iter(range(100))
    engine = misspelling(lambda asked: reply_of(calls[(number := next(numbers))], number))
    trajectories = await play_all(Foreign, engine)
    turns = {(turn.agent, turn.number): turn for trajectory in trajectories for turn in trajectory.turns}
    parents = {}
    for trajectory in trajectories:
        assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
        assert_exact(trajectory, engine)
        trained = sum(sum(segment.log.mask()) for segment in trajectory.segments)
        assert trained == trajectory.sampled
        for request in trajectory.requests:
            assert request.turn is not None
            if request.parent_turn is not None:
                parents[trajectory.agent, request.turn] = turns[request.parent_agent, request.parent_turn]
    assert len(turns) == len(known)
    for each in known:
        check_parent(each, parents.get((each.turn.agent, each.turn.number)))


def check_parent(known: Known, found: Turn | None) -> None:
    """Assert that the parent is the turn that the client meant, or a turn with the same text at the same place."""
    if known.before is None:
        assert found is None
        return
    assert found is not None
    ids = found.log.ids[: found.end]
    assert known.turn.prompt_ids[: found.end] == ids
    meant = known.before.turn
    if meant.tool_calls:
        assert found is meant, "the id of its call named the turn"
    assert (found.text, found.reasoning, len(found.tool_calls)) == (meant.text, meant.reasoning, len(meant.tool_calls))
    assert ids == meant.log.ids[: meant.end]
