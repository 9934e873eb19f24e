"""What agent programs do to the histories that they send back, each with its verdict, from reduced recordings."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from runner import Conversation, Outcome, Trajectory
from runner.testing import assert_exact
from tests.episode.awkward import misspelling
from tests.episode.client_recordings import RECORDINGS, Recording, Request, filled_in
from tests.playing import Plain, play_all

pytestmark = pytest.mark.anyio


async def ask(episode: Any, request: Request, turns: list[Any]) -> None:
    turn = await episode.chat(
        filled_in(request.messages, turns),
        tools=request.tools,
        label=request.label,
        sampling=request.sampling,
        tool_choice=request.tool_choice,
    )
    turns.append(turn)


async def ask_and_go_away(episode: Any, request: Request, turns: list[Any]) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(ask, episode, request, turns)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    turns.append(None)
    await anyio.wait_all_tasks_blocked()


async def played(recorded: Recording) -> tuple[list[Trajectory], Any]:
    class Foreign(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            turns: list[Any] = []
            for request in recorded.requests:
                await (ask_and_go_away if request.cut else ask)(self.episode, request, turns)

    engine = misspelling(recorded.says)
    return await play_all(Foreign, engine), engine


@pytest.mark.parametrize("name", RECORDINGS)
async def test_what_a_client_does_to_its_history_has_its_verdict(name: str) -> None:
    recorded = RECORDINGS[name]
    trajectories, engine = await played(recorded)
    for trajectory in trajectories:
        assert (trajectory.outcome, trajectory.error) == (Outcome.COMPLETED, "")
        assert_exact(trajectory, engine)
        kept = [turn for turn in trajectory.turns if not turn.retried]
        masks = sum(sum(segment.log.mask()) for segment in trajectory.segments)
        assert masks == sum(turn.end - turn.start for turn in kept)
    by_number = {request.number: request for trajectory in trajectories for request in trajectory.requests}
    for number, wanted in enumerate(recorded.requests):
        if number not in by_number:  # of a thread that is not trained
            assert not wanted.tools
            continue
        request = by_number[number]
        assert (request.verdict.value, request.again.value) == (wanted.verdict, wanted.again), number
        assert {each.value for each in request.tolerated} == wanted.tolerated, number
        assert request.parent_turn == wanted.parent, number
    last = next(each for each in trajectories if by_number[max(by_number)] in each.requests)
    assert tuple(segment.cause for segment in last.segments) == recorded.causes


def test_every_mutation_is_among_the_recordings() -> None:
    assert {int(name.split()[0]) for name in RECORDINGS} == set(range(1, 24))
