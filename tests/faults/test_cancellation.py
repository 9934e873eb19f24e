"""Cancellation at every point at which an episode or a run suspends: no request, session, thread or task stays open."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial

import pytest

from runner import Concurrency, Environment, Run, ScriptedEngine
from runner.concurrency.threads import Workers
from runner.engines.scripted.script import Latency
from runner.episode.key import EpisodeKey
from runner.episode.lifecycle import EpisodeRunner
from runner.episode.model import ChatModel
from runner.episode.shared import RunShared
from runner.options import Limits, Sampling
from runner.testing import cancel_everywhere, no_leaks
from runner.trajectory import Outcome
from tests.faults.crowd import Crowd, talk
from tests.faults.suspects import AsyncPupils, SyncPupils, speak
from tests.playing import assert_nothing_open

pytestmark = [pytest.mark.anyio, pytest.mark.both_backends, pytest.mark.slow, pytest.mark.sample_cases(5)]


def shared_by(environment: Environment, engine: ScriptedEngine) -> RunShared:
    return RunShared(
        environment=environment,
        chat=ChatModel(engine, options={}, now=datetime.now(UTC)),
        sampling=Sampling(),
        limits=Limits.defaults(),
        scorers=environment.scorers,
        seed=1,
        workers=Workers(8),
    )


@pytest.mark.parametrize("environment", [SyncPupils, AsyncPupils, Crowd])
async def test_cancelling_an_episode_anywhere_leaves_no_open_request(
    environment: type[Environment],
) -> None:
    async with ScriptedEngine(
        talk if environment is Crowd else speak, places=1, chunks=4, latency=Latency(first=1, between=1)
    ) as engine:
        shared = shared_by(environment(), engine)
        task = next(iter(environment().tasks()))  # type: ignore[arg-type]  # both are iterable
        kept: list[Outcome] = []

        async def episode() -> None:
            play = EpisodeRunner(shared, EpisodeKey(task=task, index=0))
            try:
                await play.run(in_this_task=True)  # so that its cancellation points belong to this task
            finally:
                kept.append(play.trajectories()[0].outcome)

        with no_leaks(engine):
            points = await cancel_everywhere(episode, check=partial(assert_nothing_open, engine))
        assert points > 20
        assert kept[-1] is Outcome.COMPLETED
        assert set(kept[:-1]) <= {Outcome.CANCELLED, Outcome.COMPLETED}


@pytest.mark.parametrize("environment", [SyncPupils, AsyncPupils])
async def test_cancelling_a_run_wherever_its_reader_waits_leaves_nothing(environment: type[Environment]) -> None:
    async with ScriptedEngine(speak, latency=Latency(between=1)) as engine:

        async def read() -> None:
            async with Run(environment(), engine, concurrency=Concurrency(episodes=16)) as run:
                async for _ in run:
                    if run.summary.episodes > 8:
                        break

        with no_leaks(engine):
            assert await cancel_everywhere(read, check=partial(assert_nothing_open, engine)) > 3
