"""Changes of agent programs to the histories that they send back, each with its verdict, from reduced recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from typer.testing import CliRunner

from runner import Conversation, Outcome, RunFile, Trajectory
from runner.chat_requests import ChatRequest
from runner.cli.app import app
from runner.testing import assert_exact
from tests.episode.awkward import misspelling
from tests.episode.client_recordings import RECORDINGS, SENT_TOKENS, Recording, Request, filled_in
from tests.episode.mutations import MUTATIONS, Mutation
from tests.episode.recorded import NAMES, recorded, replay, replies
from tests.playing import Plain, play_all, recording
from tests.verifying import verify

pytestmark = pytest.mark.anyio


async def ask(episode: Any, request: Request, turns: list[Any]) -> None:
    turns.append(await episode.chat(filled_in(request.messages, turns), tools=request.tools))


async def ask_and_go_away(episode: Any, request: Request, turns: list[Any], engine: Any) -> None:
    enough = engine.stats().sampled_tokens + SENT_TOKENS
    async with anyio.create_task_group() as group:
        group.start_soon(ask, episode, request, turns)
        while engine.stats().sampled_tokens < enough:
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    turns.append(None)
    await anyio.wait_all_tasks_blocked()


async def played(recorded: Recording, path: Path | None = None) -> tuple[list[Trajectory], Any]:
    class Foreign(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            turns: list[Any] = []
            for request in recorded.requests:
                if request.cut:
                    await ask_and_go_away(self.episode, request, turns, engine)
                else:
                    await ask(self.episode, request, turns)

    words = iter(recorded.says)
    # Verification does not support the vocabulary of `misspelling`.
    engine = misspelling(recorded.says) if path is None else recording(lambda asked: next(words), template="hermes")
    return await play_all(Foreign, engine, file=path), engine


@pytest.mark.parametrize("name", RECORDINGS)
async def test_history_change_of_a_client_has_the_expected_verdict(name: str) -> None:
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
        if number not in by_number:  # the thread is not trained
            assert not wanted.tools
            continue
        request = by_number[number]
        assert (request.verdict.value, request.again.value) == (wanted.verdict, wanted.again), number
        assert {each.value for each in request.tolerated} == wanted.tolerated, number
        assert request.parent_turn == wanted.parent, number
    last = next(each for each in trajectories if by_number[max(by_number)] in each.requests)
    assert tuple(segment.cause for segment in last.segments) == recorded.causes


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize("name", NAMES)
async def test_verdicts_of_a_named_recording_verify_and_are_shown(name: str, tmp_path: Path) -> None:
    requests, path = recorded(name), tmp_path / "run.db"
    words = iter(replies(requests))
    engine = recording(lambda asked: next(words), template="hermes", context=1_000_000)
    trajectories = (await replay(requests, engine, file=path)).trajectories
    result = await anyio.to_thread.run_sync(verify, path)
    assert result.exit_code == 0, result.output
    with RunFile(path) as run_file:
        stored = [run_file.trajectory(row) for row in run_file]
    assert by_number(stored) == by_number(trajectories)
    shown = await anyio.to_thread.run_sync(show, path)
    for request in requests:
        if request.trained:
            assert request.verdict in shown
            assert all(name in shown for name in request.tolerated)


@pytest.mark.parametrize("name", RECORDINGS)
async def test_verdicts_of_a_history_change_verify_and_are_shown(name: str, tmp_path: Path) -> None:
    recorded, path = RECORDINGS[name], tmp_path / "run.db"
    trajectories, _ = await played(recorded, path)
    result = await anyio.to_thread.run_sync(verify, path)
    assert result.exit_code == 0, result.output
    with RunFile(path) as run_file:
        stored = [run_file.trajectory(row) for row in run_file]
    assert [each.requests for each in stored] == [each.requests for each in trajectories]
    shown = await anyio.to_thread.run_sync(show, path)
    for request in recorded.requests:
        assert request.verdict in shown
        assert all(name in shown for name in request.tolerated)


def by_number(trajectories: list[Trajectory]) -> list[ChatRequest]:
    return sorted((each for own in trajectories for each in own.requests), key=lambda each: each.number)


def show(path: Path) -> str:
    result = CliRunner().invoke(app, ["show", str(path), "t0#0", "--requests"], terminal_width=400)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    ("mutation", "name"),
    [
        pytest.param(mutation, name, id=f"{mutation.number}-{name}")
        for mutation in MUTATIONS
        for name in mutation.recordings
    ],
)
def test_a_mutation_is_shown_by_the_recordings_that_are_named_for_it(mutation: Mutation, name: str) -> None:
    assert mutation.shows(recorded(name)), mutation.what


def test_every_mutation_is_among_the_recordings() -> None:
    by_hand = {int(name.split()[0]) for name in RECORDINGS}
    assert by_hand | {mutation.number for mutation in MUTATIONS} == set(range(1, 24))
