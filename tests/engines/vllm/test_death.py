"""The real engine dies: everything in flight ends with one cause, and finished episodes are kept."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from runner import Concurrency, EngineDead, Environment, Outcome, Run, RunFile, Sampling, Task, Trajectory, reward
from runner.engines.base import Finish, FinishReason, GenerationRequest
from runner.engines.vllm.engine import VllmEngine
from tests.faults.comparing import by_key

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

WATCHDOG_SECONDS = 1200.0
EPISODE_COUNT = 6
LONG_TURN_TOKENS = 1000  # the cache has room for one such turn in each place, also in float32


class Talker(Environment):
    """Environment that samples up to `LONG_TURN_TOKENS` ids. Each of its first two episodes samples only one id."""

    def tasks(self) -> list[Task]:
        return [Task(id=str(number), prompt="Tell me everything.") for number in range(12)]

    async def rollout(self, conversation: Any) -> None:
        length = 1 if int(self.task.id) < 2 else LONG_TURN_TOKENS
        await conversation.generate(sampling=Sampling(max_tokens=length, stop_ids=()))

    @reward
    def talked(self) -> bool:
        return True


def request(name: str) -> GenerationRequest:
    sampling = replace(Sampling.defaults(), max_tokens=LONG_TURN_TOKENS)
    return GenerationRequest(name=name, prompt=list(range(1000, 1040)), sampling=sampling)


async def test_death_ends_all_streams_and_keeps_finished_episodes(doomed_engine: VllmEngine, tmp_path: Path) -> None:
    engine, file = doomed_engine, tmp_path / "run.db"
    run = Run(Talker(), engine, file=file, concurrency=Concurrency(episodes=EPISODE_COUNT))
    played: list[Trajectory] = []
    deaths: list[EngineDead] = []
    finishes: list[Finish | None] = []

    async def play() -> None:
        async with run:
            async for trajectory in run:
                played.append(trajectory)  # noqa: PERF401  # the loop ends with an error

    async def read(number: int) -> None:
        stream = engine.stream(request(f"stream {number}"))
        try:
            async with stream:
                async for _ in stream:
                    pass
        finally:
            finishes.append(stream.finish)

    async def until_death(function: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        with pytest.raises(EngineDead) as death:
            await function(*arguments)
        deaths.append(death.value)

    with anyio.fail_after(WATCHDOG_SECONDS):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(until_death, play)
            while engine.stats().open < EPISODE_COUNT or len(played) < 2:  # noqa: ASYNC110  # there is no event
                await anyio.sleep(0.05)
            for number in range(engine.places - EPISODE_COUNT + 2):
                tasks.start_soon(until_death, read, number)
            # there is no event
            while engine.stats().open < engine.places or engine.stats().waiting < 2:  # noqa: ASYNC110
                await anyio.sleep(0.05)
            os.kill(engine.processes()[0], signal.SIGKILL)

    assert len(deaths) == engine.places - EPISODE_COUNT + 3, "the run, and every stream, including those at the gate"
    assert {str(death) for death in deaths} == {"The engine died: its process was ended by SIGKILL"}
    assert len({id(death.__cause__) for death in deaths if death.__cause__}) == 1
    ended = [finish for finish in finishes if finish is not None]
    assert len(ended) == engine.places - EPISODE_COUNT
    assert {finish.reason for finish in ended} == {FinishReason.ERROR}

    assert run.summary.outcomes == {Outcome.TOKEN_LIMIT: 2, Outcome.ENGINE_ERROR: EPISODE_COUNT}
    cut = [trajectory for trajectory in played if trajectory.outcome is Outcome.ENGINE_ERROR]
    assert {trajectory.error for trajectory in cut} == {str(deaths[0])}
    assert all(trajectory.sampled for trajectory in cut), "ids received before the death are kept"
    with RunFile(file) as run_file:
        assert by_key(run_file.trajectories()) == by_key(played)

    assert not engine.is_alive()
    with pytest.raises(EngineDead, match="SIGKILL"):
        await engine.health()
    with pytest.raises(EngineDead, match="SIGKILL"):
        async with engine.stream(request("late")):
            pytest.fail("it was admitted")
