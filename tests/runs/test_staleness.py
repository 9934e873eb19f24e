"""Weight updates during a run: the maximum age of episodes, and turns that the engine cut for its trainer."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from runner import BadOption, Conversation, FinishReason, Outcome, Run, RunFile, Task, Trajectory, reward
from runner.engines.base import GenerationRequest
from runner.engines.scripted.script import Latency, ModelCall, Reply
from runner.engines.state import EngineState, PauseMode
from runner.options import Limits, Sampling
from runner.testing import ScriptedEngine, assert_exact
from tests.engines.controlling import NotOurs
from tests.playing import Plain, assert_nothing_open, recording, tasks

pytestmark = pytest.mark.anyio


class TwoTurns(Plain):
    """Environment that calls the test's function between its two turns."""

    def __init__(self, between: Any = None) -> None:
        self.between = between

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate()
        if self.between is not None:
            await self.between(self.episode)
        conversation.add("Continue.")
        await conversation.generate()


def versions(trajectory: Trajectory) -> list[str]:
    return [span.version for segment in trajectory.segments for span in segment.log.versions]


async def played(run: Run) -> list[Trajectory]:
    async with run:
        return [trajectory async for trajectory in run]


@pytest.mark.parametrize("lag", [None, 0, 1, 2])
async def test_episode_over_max_version_lag_is_dropped_and_repeated(lag: int | None, tmp_path: Path) -> None:
    engine = recording("Yes")
    updates = 2

    async def update(episode: Any) -> None:
        nonlocal updates
        with anyio.CancelScope(shield=True):  # both updates complete, although the first may already be one too many
            while updates:
                updates -= 1
                await engine.update_weights(None)

    run = Run(TwoTurns(update), engine, file=tmp_path / "run.db", max_version_lag=lag)
    (trajectory,) = await played(run)
    assert_exact(trajectory)
    assert trajectory.outcome is Outcome.COMPLETED
    dropped = lag is not None and lag < 2
    assert run.summary.stale == int(dropped)
    assert versions(trajectory) == (["2", "2"] if dropped else ["scripted", "2"])
    assert trajectory.attempt == int(dropped)
    with RunFile(tmp_path / "run.db") as file:
        assert [t.id for t in file.trajectories()] == [trajectory.id]
        assert file.header.max_version_lag == lag


async def test_update_cancels_episodes_in_flight_that_are_too_old() -> None:
    engine = recording("Yes")
    waits, goes_on = anyio.Event(), anyio.Event()
    reached: list[str] = []

    async def wait(episode: Any) -> None:
        if not waits.is_set():
            waits.set()
            await goes_on.wait()  # waits for ever: only the cut ends it
            reached.append("the second turn of the old attempt")

    run = Run(TwoTurns(wait), engine, max_version_lag=0)
    async with run:
        await waits.wait()
        await engine.update_weights(None)
        (trajectory,) = [each async for each in run]
    assert (versions(trajectory), reached, run.summary.stale) == (["1", "1"], [], 1)


async def test_dropping_for_age_uses_up_no_retry_of_the_engine() -> None:
    engine = recording("Yes")
    left = 4

    async def update(episode: Any) -> None:
        nonlocal left
        if left:
            left -= 1
            await engine.update_weights(None)

    run = Run(TwoTurns(update), engine, max_version_lag=0, retries=0)
    (trajectory,) = await played(run)
    assert (trajectory.outcome, trajectory.attempt, run.summary.stale, run.summary.retried) == (
        Outcome.COMPLETED,
        4,
        4,
        0,
    )


async def test_stale_episode_of_a_draining_run_is_left_to_the_next(tmp_path: Path) -> None:
    engine = recording("Yes")
    runs: list[Run] = []

    async def update(episode: Any) -> None:
        runs[0].drain()
        await engine.update_weights(None)

    runs.append(Run(TwoTurns(update), engine, file=tmp_path / "run.db", max_version_lag=0))
    (trajectory,) = await played(runs[0])
    assert (trajectory.outcome, trajectory.reward, trajectory.rewards) == (Outcome.CANCELLED, None, {})
    assert "too old: weights 'scripted' are 1 updates older than '1'" in trajectory.error

    async def nothing(episode: Any) -> None: ...

    (again,) = await played(Run(TwoTurns(nothing), recording("Yes"), file=tmp_path / "run.db", max_version_lag=0))
    assert again.outcome is Outcome.COMPLETED


async def test_episode_too_old_after_scoring_loses_its_reward() -> None:
    engine = recording("Yes")

    class Late(Plain):
        async def close(self) -> None:
            await engine.update_weights(None)
            run.drain()

    run = Run(Late, engine, max_version_lag=0)
    (trajectory,) = await played(run)
    assert (trajectory.outcome, trajectory.reward, trajectory.rewards) == (Outcome.CANCELLED, None, {})


async def test_old_ids_of_an_agent_that_is_not_trained_drop_no_episode() -> None:
    engine = recording("Yes")

    class AskedBefore(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await self.episode.conversation("judge", prompt="Well?").generate()
            if engine.weight_version == "scripted":
                await engine.update_weights(None)
            await conversation.generate()

    run = Run(AskedBefore, engine, max_version_lag=0)
    (trajectory,) = await played(run)
    assert (trajectory.outcome, trajectory.attempt, run.summary.stale) == (Outcome.COMPLETED, 0, 0)
    assert versions(trajectory) == ["1"]


async def test_a_group_reward_never_gets_an_episode_that_is_too_old() -> None:
    engine = recording("Yes")
    updated = False

    async def update(episode: Any) -> None:
        nonlocal updated
        if episode.index == 1 and not updated:
            updated = True
            await engine.update_weights(None)

    run = Run(TwoTurns(update), engine, group_size=3, max_version_lag=0)
    async with run:
        (group,) = [group async for group in run.groups()]
    assert group.complete
    assert [t.index for t in group.trajectories] == [0, 1, 2]
    assert all(t.outcome is Outcome.COMPLETED and t.reward == 1 for t in group.trajectories)
    assert run.summary.stale >= 1


@pytest.mark.parametrize("lag", [-1, 1.5, True, "2"], ids=str)
def test_invalid_lag_is_refused(lag: Any) -> None:
    with pytest.raises(BadOption, match=r"max_version_lag=.*whole number of at least 0"):
        Run(Plain, recording("Yes"), max_version_lag=lag)


async def test_max_version_lag_refuses_engines_without_versions() -> None:
    with pytest.raises(BadOption, match="max_version_lag=1: NotOurs has no weight updates"):
        await played(Run(Plain, NotOurs(ScriptedEngine("Yes")), max_version_lag=1))


# --- turns during a pause


def slow(**settings: Any) -> ScriptedEngine:
    """Return an engine with one id per tick, so that a pause occurs during a turn."""
    return recording("A long answer.", chunks=1, latency=Latency(between=10), **settings)


async def begun(engine: ScriptedEngine) -> None:
    """Wait until the engine has sampled a further id and has an open request."""
    before = engine.stats().sampled_tokens
    while not engine.stats().open or engine.stats().sampled_tokens == before:
        await checkpoint()


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_under_every_mode_of_an_update_no_episode_is_lost(mode: PauseMode) -> None:
    engine = slow(places=4)
    run = Run(TwoTurns(), engine, tasks=tasks(8))
    async with run:
        for _ in range(3):
            await begun(engine)
            await engine.update_weights(None, mode=mode)
            for _ in range(5):
                await checkpoint()
        got = [trajectory async for trajectory in run]
    assert Counter(t.outcome for t in got) == {Outcome.COMPLETED: 8}
    for trajectory in got:
        assert_exact(trajectory)
        assert [turn.text for turn in trajectory.turns] == ["A long answer."] * 2
    assert_nothing_open(engine)
    whole = all(len(_versions_of(turn)) == 1 for t in got for turn in t.turns)
    assert whole == (mode is not PauseMode.KEEP), "only the mode keep allows two versions in a turn"
    assert (run.summary.resampled > 0) == (mode is PauseMode.ABORT)


def _versions_of(turn: Any) -> set[str]:
    return {s.version for s in turn.log.versions if s.start < turn.end and turn.start < s.end}


async def cut_once(environment: type[Plain], engine: ScriptedEngine) -> Trajectory:
    """Return the only trajectory of a run in whose first turn the engine cuts the sampling."""
    async with Run(environment, engine) as run:
        await begun(engine)
        for _ in range(6):
            await checkpoint()
        await engine.pause("abort")
        await engine.resume()
        (trajectory,) = [each async for each in run]
    return trajectory


async def test_turn_cut_by_the_engine_is_resampled_from_its_prompt() -> None:
    engine = slow()
    trajectory = await cut_once(Plain, engine)
    first, second = engine.calls
    assert first.prompt == second.prompt
    assert first.finish is not None
    assert first.finish.reason == "abort"
    (turn,) = trajectory.turns
    assert (turn.text, turn.resampled) == ("A long answer.", len(first.sampled))
    assert turn.resampled > 0
    assert list(turn.token_ids) == list(second.sampled)
    assert len(trajectory.segments[0].log) == turn.end


async def test_resampled_turn_has_no_text_of_the_cut_try() -> None:
    class Stops(Plain):
        sampling = Sampling(stop=("answer.",))

    trajectory = await cut_once(Stops, slow())
    (turn,) = trajectory.turns
    assert turn.resampled > 0
    assert turn.text == "A long "


async def test_sleep_cuts_turns_that_a_pause_kept() -> None:
    engine = slow()
    run = Run(Plain, engine, retries=0)
    async with run:
        await begun(engine)
        await engine.pause("keep")
        await engine.sleep()
        assert engine.stats().open == 0
        await engine.wake()
        assert engine.state is EngineState.PAUSED
        await engine.resume()
        (trajectory,) = [each async for each in run]
    assert (trajectory.text, len(engine.calls)) == ("A long answer.", 2)
    assert (trajectory.outcome, trajectory.turns[0].resampled > 0) == (Outcome.COMPLETED, True), (
        "a cut turn is not a failure"
    )


async def test_turn_aborted_by_its_engine_fails_without_retries() -> None:
    engine = recording([Reply("Yes", finish=FinishReason.ABORT)])
    (trajectory,) = await played(Run(Plain, engine, retries=1, breaker=1))
    assert trajectory.outcome is Outcome.ENGINE_ERROR
    assert "the engine ended the request by itself" in trajectory.error
    assert len(engine.calls) == 2


async def test_clocks_do_not_run_while_the_engine_is_paused() -> None:
    class Slow(Plain):
        limits = Limits(seconds=0.2, stall_seconds=0.2)

    engine = slow()
    run = Run(Slow, engine)
    async with run:
        await begun(engine)
        await engine.pause("keep")
        assert engine.state is EngineState.PAUSED
        await anyio.sleep(0.5)
        await engine.resume()
        (trajectory,) = [each async for each in run]
    assert (trajectory.outcome, trajectory.error) == (Outcome.COMPLETED, "")


async def test_episode_cancelled_on_a_paused_engine_leaves_no_request() -> None:
    engine = slow()
    async with engine:
        async with Run(Plain, engine):
            await begun(engine)
            await engine.pause("abort")
        assert engine.stats().open == 0
        await engine.resume()
        request = GenerationRequest(name="later", prompt=[1, 2], sampling=_sampling())
        async with engine.stream(request) as deltas:
            assert [i async for delta in deltas for i in delta.token_ids]


def _sampling() -> Any:
    return Sampling().over(Sampling.defaults())


async def test_rewards_may_not_see_a_turn_of_mixed_versions_as_two() -> None:
    """The spans of a turn that continued with new weights are in order and without a gap."""

    class Scored(Plain):
        @reward
        def spans(self) -> float:
            (turn,) = self.episode.turns
            spans = turn.log.versions
            assert spans[0].start == turn.start
            assert spans[-1].end == turn.end
            assert all(a.end == b.start for a, b in pairwise(spans))
            return float(len(spans))

    engine = slow()
    run = Run(Scored, engine)
    async with run:
        await begun(engine)
        for _ in range(4):
            await checkpoint()
        await engine.update_weights(None, version="new")
        (trajectory,) = [each async for each in run]
    assert trajectory.rewards["spans"] == 2.0
    assert versions(trajectory) == ["scripted", "new"]


async def test_sampled_text_may_follow_the_weights() -> None:
    def model(call: ModelCall) -> str:
        return "new" if engine.weight_version == "1" else "old"

    engine = recording(model)
    async with engine:
        first = await played(Run(Plain, engine, tasks=[Task(id="a", prompt="?")]))
        await engine.update_weights(None)
        second = await played(Run(Plain, engine, tasks=[Task(id="a", prompt="?")]))
    assert [t.text for t in first + second] == ["old", "new"]
