"""Episodes whose LoRA adapter is removed during sampling."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest
from anyio.lowlevel import checkpoint

from runner import Outcome, Run, Sampling, ScriptedEngine, Trajectory
from runner.engines.base import Engine
from runner.testing import Latency
from tests.playing import Plain

pytestmark = pytest.mark.anyio


class Spoken(Plain):
    """Environment with one turn, with an adapter."""

    sampling = Sampling(adapter="poet")


async def abort(engine: Engine) -> None:
    await engine.pause("abort")
    await engine.resume()


async def keep(engine: Engine) -> None:
    await engine.pause("keep")
    await engine.resume()


async def wait(engine: Engine) -> None:
    await engine.pause("wait")
    await engine.resume()


async def sleep(engine: Engine) -> None:
    await engine.sleep()
    await engine.wake()


async def played(change: Callable[[Engine], Awaitable[None]]) -> Trajectory:
    """Return an episode whose adapter is removed during its turn, and call `change` after the removal."""
    engine = ScriptedEngine("a long sentence", adapters=["poet", "critic"], chunks=1, latency=Latency(between=1))
    trajectories: list[Trajectory] = []

    async def play(run: Run) -> None:
        trajectories.extend([trajectory async for trajectory in run])

    async with engine, Run(Spoken, engine, breaker=1) as run, anyio.create_task_group() as tasks:
        tasks.start_soon(play, run)
        while not engine.stats().sampled_tokens:
            await checkpoint()
        assert engine.stats().open == 1
        await engine.remove_adapter("poet")
        await change(engine)
    (trajectory,) = trajectories
    return trajectory


@pytest.mark.parametrize("cut", [abort, sleep])
async def test_turn_cut_after_adapter_removal_ends_its_episode(
    cut: Callable[[Engine], Awaitable[None]],
) -> None:
    trajectory = await played(cut)
    assert trajectory.outcome is Outcome.ENGINE_ERROR
    assert "no adapter 'poet'; it has 'critic'" in trajectory.error


@pytest.mark.parametrize("pause", [keep, wait])
async def test_uncut_turn_ends_with_its_removed_adapter(
    pause: Callable[[Engine], Awaitable[None]],
) -> None:
    trajectory = await played(pause)
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
    assert [span.version for span in trajectory.segments[0].log.versions] == ["scripted+poet@1"]
