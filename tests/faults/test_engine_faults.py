"""Faults of the engine: it dies, refuses a request or becomes silent, and each episode ends by its own cause."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest

from runner import (
    Concurrency,
    EngineDead,
    Environment,
    Limits,
    Outcome,
    Run,
    RunFile,
    ScriptedEngine,
    Task,
    Trajectory,
    reward,
)
from runner.engines.scripted.script import Fault, Latency, ModelCall
from tests.faults.clocks import ASYNCIO, TRIO, put_forward
from tests.faults.comparing import by_key
from tests.faults.suspects import AsyncPupils, Pupils, SyncPupils, speak

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

WATCHDOG_SECONDS = 600.0


@pytest.fixture(params=[ASYNCIO, TRIO], ids=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


async def play_until_death(run: Run) -> tuple[list[Trajectory], EngineDead]:
    """Return the trajectories of the run, and the error that ended it."""
    played: list[Trajectory] = []
    try:
        await read(run, played)
    except EngineDead as death:
        return played, death
    raise AssertionError("the run came to its end")


async def read(run: Run, into: list[Trajectory]) -> None:
    async with run:
        async for trajectory in run:
            into.append(trajectory)  # noqa: PERF401  # trajectories before an error count


@pytest.mark.parametrize("environment", [SyncPupils, AsyncPupils])
async def test_engine_death_ends_all_episodes_and_keeps_finished_ones(
    tmp_path: Path, environment: type[Pupils]
) -> None:
    file = tmp_path / "run.db"

    def dies_late(call: ModelCall) -> Fault | None:
        return Fault.death(at=3, message="out of memory") if call.number == 60 else None

    engine = ScriptedEngine(speak, faults=dies_late, latency=Latency(between=1), chunks=1)
    with anyio.fail_after(WATCHDOG_SECONDS):
        played, death = await play_until_death(
            Run(environment(), engine, file=file, concurrency=Concurrency(episodes=16))
        )
    assert str(death) == "The engine died: out of memory"
    counts = Counter(trajectory.outcome for trajectory in played)
    assert counts.keys() == {Outcome.COMPLETED, Outcome.ENGINE_ERROR}
    assert counts[Outcome.ENGINE_ERROR] <= 16
    cut = [trajectory for trajectory in played if trajectory.outcome is Outcome.ENGINE_ERROR]
    assert {trajectory.error for trajectory in cut} == {str(death)}
    assert {trajectory.reward for trajectory in cut} == {None}
    assert any(trajectory.sampled for trajectory in cut), "ids received before the death are kept"
    with RunFile(file) as run_file:
        assert by_key(run_file.trajectories()) == by_key(played)
        assert not run_file.complete


async def test_after_engine_death_the_same_run_completes_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    dying = ScriptedEngine(speak, faults={60: Fault.death(at=3)})
    played, _ = await play_until_death(Run(AsyncPupils(), dying, file=file, concurrency=Concurrency(episodes=16)))
    finished = {t.task.id for t in played if t.outcome is Outcome.COMPLETED}
    async with Run(AsyncPupils(), ScriptedEngine(speak), file=file) as run:
        rest = {trajectory.task.id async for trajectory in run}
    assert finished
    assert finished | rest == {task.id for task in AsyncPupils().tasks()}
    assert not finished & rest
    with RunFile(file) as run_file:
        assert run_file.complete


class Silent(Environment):
    """Environment with one turn, which then waits for ever without a request to the engine."""

    waiting = 0

    def tasks(self) -> list[Task]:
        return [Task(id=str(number), prompt="hello") for number in range(8)]

    async def step(self, turn: Any) -> None:
        type(self).waiting += 1
        await anyio.sleep_forever()

    @reward
    def spoke(self) -> bool:
        return True


async def test_engine_death_is_noticed_while_the_engine_is_idle() -> None:
    class AllSilent(Silent):
        waiting = 0

    engine = ScriptedEngine("hi")
    run = Run(AllSilent(), engine, limits=Limits(step_seconds=None, seconds=None))
    deaths: list[EngineDead] = []

    async def play() -> None:
        _, death = await play_until_death(run)
        deaths.append(death)

    with anyio.fail_after(WATCHDOG_SECONDS):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(play)
            while AllSilent.waiting < 8:
                await anyio.lowlevel.checkpoint()
            engine.die("pulled the plug")
            put_forward(2)
    assert str(deaths[0]) == "The engine died: pulled the plug"
    assert run.summary.outcomes == {Outcome.ENGINE_ERROR: 8}


async def test_a_rejected_request_hurts_only_its_episode() -> None:
    def rejects(call: ModelCall) -> Fault | None:
        return Fault.reject("too odd") if call.episode == "13#0" and call.turn == 1 else None

    async def play(engine: ScriptedEngine) -> dict[Any, Any]:
        async with Run(AsyncPupils(), engine, retries=0) as run:
            return by_key([trajectory async for trajectory in run])

    undisturbed, played = await play(ScriptedEngine(speak)), await play(ScriptedEngine(speak, faults=rejects))
    hurt = ("13", 0, 0, "main")
    _, bad = played.pop(hurt)
    del undisturbed[hurt]
    assert played == undisturbed
    assert bad["outcome"] is Outcome.ENGINE_ERROR
    assert "too odd" in bad["error"]


async def test_stalled_request_is_an_engine_error_and_is_played_again() -> None:
    stalls = iter([Fault.stall(at=2)])

    def stalls_once(call: ModelCall) -> Fault | None:
        return next(stalls, None) if call.episode == "13#0" else None

    played: list[Trajectory] = []
    engine = ScriptedEngine(speak, faults=stalls_once)
    with anyio.fail_after(WATCHDOG_SECONDS * 10):
        async with Run(AsyncPupils(), engine, limits=Limits(stall_seconds=120)) as run:
            async for trajectory in run:
                played.append(trajectory)
                if len(played) == 63:
                    put_forward(121)
    assert {trajectory.outcome for trajectory in played} == {Outcome.COMPLETED}
    assert (run.summary.retried, played[-1].attempt) == (1, 1)


# --- the real engine
