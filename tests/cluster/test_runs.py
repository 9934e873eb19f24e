"""Runs on fleets with workers in this process: their results, also if workers die."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from runner import Outcome, Player, Run, RunFile, Sampling, Trajectory
from runner.cluster.driver import SILENT_SECONDS
from runner.cluster.protocol import AttemptResult
from runner.engines.scripted.script import Fault, ModelCall
from runner.testing import VirtualClock
from tests import sweeps
from tests.cluster.in_process import InProcess, InProcessWorker
from tests.cluster.playing import Dice, Grouped, compared, dice_engine, fleet, game_tasks, played

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.sample_functions(2)]


def kill_at(launcher: InProcess, plays: set[int], *, after: int = 0) -> None:
    """Kill the worker that gets the nth call of `play` of all workers, some rounds of the event loop later."""
    asked = 0

    def watch(worker: InProcessWorker) -> None:
        send = worker.send

        def counting(call: str, *arguments: Any) -> Any:
            nonlocal asked
            answer = send(call, *arguments)
            if call == "play":
                asked += 1
                if asked in plays:
                    launcher.group.start_soon(dies, worker)
            return answer

        worker.send = counting  # type: ignore[method-assign]

    async def dies(worker: InProcessWorker) -> None:
        for _ in range(after):
            await checkpoint()
        worker.kill()

    launcher.on_start = watch


def kills_whoever_plays(launcher: InProcess, *tasks: str, checkpoints: int = 20) -> list[int]:
    """Let these tasks kill their workers, and return the list of the killed workers."""
    killed: list[int] = []

    def watch(worker: InProcessWorker) -> None:
        play = worker.worker.play

        async def deadly(run_number: int, number: int, packed: bytes) -> AttemptResult:
            if pickle.loads(packed).task.id in tasks:
                for _ in range(checkpoints):
                    await checkpoint()
                killed.append(worker.worker.number)
                worker.kill()
                await checkpoint()
            came: AttemptResult = await play(run_number, number, packed)
            return came

        worker.worker.play = deadly

    launcher.on_start = watch
    return killed


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("environment", [Dice, Grouped])
async def test_any_number_of_workers_equals_one_process_bit_for_bit(
    workers: int, environment: type[Dice], tmp_path: Path
) -> None:
    alone = compared(await played(environment, dice_engine(), group_size=3))
    async with fleet(workers) as (engine, _):
        on_many = await played(environment, engine, group_size=3, file=tmp_path / "run.db")
    assert compared(on_many) == alone
    with RunFile(tmp_path / "run.db") as stored:
        assert compared(kept(stored)) == alone


FAILED: set[str] = set()
"""Names of the requests that have failed once. Workers are in this process, so they share this set."""


def fails_once(call: ModelCall) -> Fault | None:
    """Let every third request fail in its middle when it is made for the first time."""
    name = call.request.name
    if name in FAILED or sum(name.encode()) % 3:
        return None
    FAILED.add(name)
    return Fault.error(at=2)


@pytest.mark.parametrize("environment", [Dice, Grouped])
async def test_retries_on_two_workers_equal_those_of_one_process(
    environment: type[Dice],
) -> None:
    options: dict[str, Any] = {"group_size": 2, "retries": 4, "breaker": 1}
    FAILED.clear()
    alone = await played(environment, dice_engine(faults=fails_once), **options)
    failed = set(FAILED)
    FAILED.clear()
    async with fleet(2, dice_engine(faults=fails_once)) as (engine, launcher):
        on_two = await played(environment, engine, **options)
    assert compared(on_two) == compared(alone) == compared(await played(environment, dice_engine(), group_size=2))
    assert failed == FAILED
    assert {each.id: each.attempt for each in on_two} == {each.id: each.attempt for each in alone}
    assert max(each.attempt for each in on_two) > 0
    assert len(launcher.workers) == 2, "the error ended no worker"


@settings(max_examples=sweeps.times(40, 5))
@given(
    deaths=st.sets(st.integers(1, 24), min_size=1, max_size=3),
    after=st.integers(0, 30),
    workers=st.integers(2, 4),
    file=st.booleans(),
)
def test_worker_deaths_at_any_moment_do_not_change_the_results(
    deaths: set[int], after: int, workers: int, file: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("fleet") / "run.db" if file else None

    async def play() -> None:
        alone = compared(await played(Grouped, dice_engine(), group_size=2))
        async with fleet(workers) as (engine, launcher):
            kill_at(launcher, deaths, after=after)
            on_many = await played(Grouped, engine, group_size=2, retries=5, file=path)
        assert compared(on_many) == alone
        if path is not None:
            with RunFile(path) as stored:
                assert compared(kept(stored)) == alone

    VirtualClock().run(play)


async def test_announced_results_are_stored_and_other_workers_continue(
    tmp_path: Path,
) -> None:
    file = tmp_path / "run.db"
    first: list[Trajectory] = []
    async with fleet(3) as (engine, _), Run(Grouped, engine, group_size=2, file=file) as run:
        async for trajectory in run:
            first.append(trajectory)
            if len(first) == 6:
                break
    with RunFile(file) as stored:
        there = {(each.id, each.agent) for each in stored if not each.outcome.cut_short}
    assert {(each.id, each.agent) for each in first} <= there
    async with fleet(2) as (engine, _):
        rest = await played(Grouped, engine, group_size=2, file=file)
    assert not {each.id for each in rest} & {each.id for each in first}
    alone = compared(await played(Grouped, dice_engine(), group_size=2))
    with RunFile(file) as stored:
        assert compared(kept(stored)) == alone


def test_episode_that_kills_its_workers_is_given_up_by_name() -> None:
    async def run() -> None:
        async with fleet(2) as (engine, launcher):
            killed = kills_whoever_plays(launcher, "t3")
            got = await played(Dice, engine, retries=2, breaker=1)
        assert len(killed) == 3
        outcomes = {each.task.id: each.outcome for each in got}
        assert outcomes.pop("t3") is Outcome.ENGINE_ERROR
        assert set(outcomes.values()) == {Outcome.COMPLETED}
        (poison,) = (each for each in got if each.task.id == "t3")
        assert (
            poison.error
            == f"3 workers were lost while playing this episode, the last one {place(killed[-1])}: its process died"
        )

    VirtualClock().run(run)


@pytest.mark.sample_cases(9)
@pytest.mark.parametrize(
    ("workers", "places", "tasks", "group_size", "poison"),
    [
        (2, 1, 14, 1, ["t8", "t12"]),
        (2, 1, 8, 1, ["t2", "t5"]),
        (2, 4, 10, 1, ["t8", "t9"]),
        (3, 1, 12, 2, ["t2", "t3"]),
        (4, 2, 10, 2, ["t1", "t8"]),
        (4, 8, 11, 1, ["t4", "t5"]),
        (5, 1, 7, 1, ["t0", "t2", "t3"]),
        (5, 4, 9, 1, ["t4", "t8"]),
        (8, 2, 10, 2, ["t2", "t5", "t9"]),
    ],
)
def test_several_episodes_that_kill_workers_cost_no_other_one(
    workers: int, places: int, tasks: int, group_size: int, poison: list[str]
) -> None:
    async def run() -> None:
        async with fleet((1, workers), dice_engine(places=places)) as (engine, launcher):
            kills_whoever_plays(launcher, *poison, checkpoints=1)
            got = await played(Dice, engine, tasks=game_tasks(tasks), retries=2, group_size=group_size, breaker=1)
        assert {each.task.id for each in got if each.outcome is not Outcome.COMPLETED} == {*poison}
        assert len(got) == tasks * group_size
        for each in got:
            assert not each.error or each.error.startswith("3 workers were lost while playing this episode")

    VirtualClock().run(run)


async def test_worker_plays_its_full_width_also_without_retries() -> None:
    playing, most = set[int](), 0

    def watch(worker: InProcessWorker) -> None:
        play = worker.worker.play

        async def counted(run_number: int, number: int, packed: bytes) -> AttemptResult:
            nonlocal most
            playing.add(number)
            most = max(most, len(playing))
            came: AttemptResult = await play(run_number, number, packed)
            playing.remove(number)
            return came

        worker.worker.play = counted

    async with fleet(1) as (engine, launcher):
        launcher.on_start = watch
        await played(Dice, engine, retries=0)
        assert most == engine.driver.fleet.width == 6


def test_silent_worker_is_lost_and_its_episodes_play_elsewhere() -> None:
    async def run() -> None:
        async with fleet(2) as (engine, launcher):
            began = anyio.current_time()

            def silence_worker(trajectory: Trajectory) -> None:
                launcher.workers[0].silent = True

            got = await played(Dice, engine, on_trajectory=silence_worker, group_size=4)
            assert {each.outcome for each in got} == {Outcome.COMPLETED}
            assert len(compared(got)) == 32
            assert launcher.workers[0].killed
            assert anyio.current_time() - began >= SILENT_SECONDS

    VirtualClock().run(run)


def kept(file: RunFile) -> list[Trajectory]:
    """Return the rows of finished episodes in the file."""
    return [file.trajectory(row) for row in file if not row.superseded and not row.outcome.cut_short]


def place(number: int) -> str:
    import socket

    return f"worker {number} on {socket.gethostname()}"


@pytest.mark.asyncio_alone  # as a player is
async def test_sampling_of_a_players_call_reaches_the_worker() -> None:
    async with fleet() as (engine, _), Player(Dice, engine, sampling=Sampling(max_tokens=77)) as player:
        (task,) = game_tasks(1)
        for given, expected in ((Sampling(temperature=0.5), (0.5, 77)), (None, (1.0, 77))):
            (trajectory,) = await player.play(task, sampling=given)
            used = {(turn.sampling.temperature, turn.sampling.max_tokens) for turn in trajectory.turns if turn.sampling}
            assert used == {expected}
