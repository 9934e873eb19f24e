"""Workers that die or join while a trainer sends weights to a whole fleet, and the weights that they then have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from runner import EngineDead, EngineError, Run, WeightTransfer
from runner.cluster.broadcast import GRACE_SECONDS
from runner.runs.player import IdleReason
from tests import sweeps
from tests.cluster.in_process import InProcessWorker
from tests.cluster.playing import Dice, compared, dice_engine, fleet, game_tasks, played
from tests.cluster.rehearsed_trainer import Parts
from tests.cluster.sending import KINDS, by_virtual_time, either, elsewhere, here, members, of_version, unranked
from tests.cluster.test_control import asked_of, state_of, versions
from tests.playing import until

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.sample_cases(5), pytest.mark.sample_functions(2)]


# --- deaths during a transfer


@pytest.mark.parametrize("at", ["check_weights", "meet", "hold", "take_step"])
def test_trainer_here_reconnects_without_the_dead_workers(at: str) -> None:
    async def run() -> None:
        source = Parts()
        async with fleet((2, 3)) as (engine, launcher), Run(Dice, engine, tasks=game_tasks(150), retries=9) as run:
            await until(lambda: len(engine.workers()) == 3)
            launcher.workers[1].killed_in = at
            got = []
            async for trajectory in run:
                got.append(trajectory)
                if len(got) == 5:
                    update = await engine.update_weights(here(source))
                    assert update.version == engine.weight_version == "1"
                    assert {worker.version for worker in engine.workers()} == {"1"}
                    assert len(engine.workers()) >= 2
                    assert {
                        state_of(worker) for worker in launcher.alive if worker.worker.number in members(engine)
                    } == {"running"}
        assert launcher.workers[1].killed
        assert compared(got) == compared(await played(Dice, dice_engine(), tasks=game_tasks(150)))
        assert source.met[-1] == (4 if at == "take_step" else 3)

    by_virtual_time(run)


def test_trainer_here_sends_again_to_new_workers() -> None:
    async def run() -> None:
        source = Parts()
        async with fleet(2) as (engine, launcher), engine:
            launcher.workers[1].killed_in = "take_step"
            await engine.update_weights(here(source), version="new")
            assert source.met == [3, 2], "both workers, and then the one that replaces the dead worker"
            assert source.sent == list(source.names) * 2
            assert of_version(launcher) == ["new", "new"]
            assert len(asked_of(launcher.workers[0], "receive_weights")) == 1
            got = await played(Dice, engine)
            assert {version for each in got for version in versions(each)} == {"new"}

    by_virtual_time(run)


def hang(worker: InProcessWorker, at: str) -> None:
    """Let a worker wait in a call for ever, like a worker whose partner left a collective."""
    worker.held_in[at] = anyio.Event()


@pytest.mark.parametrize("at", ["meet", "take_step"])
def test_hanging_worker_is_ended_after_the_grace_of_a_lost_one(at: str) -> None:
    async def run() -> None:
        async with fleet((1, 3)) as (engine, launcher), Run(Dice, engine, tasks=game_tasks(150), retries=9) as run:
            await until(lambda: len(engine.workers()) == 3)
            launcher.workers[0].killed_in = at
            hang(launcher.workers[1], at)
            got = []
            async for trajectory in run:
                got.append(trajectory)
                if len(got) == 5:
                    began = anyio.current_time()
                    await engine.update_weights(here())
                    assert anyio.current_time() - began >= GRACE_SECONDS
                    assert "may wait forever for worker 0" in " ".join(engine.events)
                    assert launcher.workers[1].killed
                    assert {worker.version for worker in engine.workers()} == {"1"}
        assert compared(got) == compared(await played(Dice, dice_engine(), tasks=game_tasks(150)))

    by_virtual_time(run)


@pytest.mark.whole
def test_broadcast_that_hangs_in_the_trainer_is_sent_again() -> None:
    async def run() -> None:
        source = Parts(hangs=True)
        # The trainer's thread hangs for real seconds while virtual time continues. The large limit keeps workers from
        # being lost by that.
        async with fleet(2, stall_seconds=1e6) as (engine, launcher), engine, anyio.create_task_group() as group:
            group.start_soon(engine.update_weights, here(source))
            await until(lambda: source.sent == list(source.names))
            launcher.workers[1].kill()
            await until(lambda: engine.weight_version == "1")
        assert launcher.workers[0].killed, "it waited for weights that were never sent"
        first, *later = source.met
        assert first == 3, "the trainer and both workers"
        assert sum(ranks - 1 for ranks in later) == 2, "the replacements, one by one or together"

    by_virtual_time(run)


@pytest.mark.parametrize("at", ["check_weights", "meet", "hold"])
def test_trainer_waiting_for_a_dead_worker_changes_nothing(at: str) -> None:
    async def run() -> None:
        async with fleet((1, 2)) as (engine, launcher), engine:
            await until(lambda: len(engine.workers()) == 2)
            launcher.workers[1].killed_in = at
            with pytest.raises(
                EngineError, match=r"weights are the old ones: worker 1 on \S+ was lost .*connects to the workers again"
            ):
                await engine.update_weights(elsewhere(), version="new")
            assert engine.weight_version == "scripted"
            await anyio.wait_all_tasks_blocked()
            assert state_of(launcher.workers[0]) == "running"
            assert launcher.workers[0].worker._checked is None, "an update that was never sent is kept"
            await until(lambda: members(engine) == {0, 2})
            await engine.update_weights(elsewhere(), version="new")
            assert of_version(launcher) == ["new", "new"]

    by_virtual_time(run)


def test_weights_from_elsewhere_are_not_sent_if_all_workers_are_lost() -> None:
    async def run() -> None:
        async with fleet(2) as (engine, launcher), engine:
            checked = await engine.check_update(unranked(), version="new")
            for worker in launcher.alive:
                worker.kill()
            await until(lambda: members(engine) == {2, 3})
            with pytest.raises(
                EngineError, match=r"weights are the old ones: worker 0 on \S+ was lost .*; worker 1 on"
            ):
                await engine.apply_update(checked)
            assert of_version(launcher) == ["scripted", "scripted"]

    by_virtual_time(run)


async def test_worker_that_dies_with_new_weights_gets_no_episode() -> None:
    async with fleet((1, 2)) as (engine, launcher), engine:
        await until(lambda: len(engine.workers()) == 2)
        handle = next(handle for handle in engine.driver.members if handle.number == 1)
        launcher.workers[1].kill()
        await handle.gone.wait()
        engine.driver.has_weights(handle, "new")
        assert handle.slot not in engine.driver.fleet.ready
        assert len(await played(Dice, engine)) == 8


@pytest.mark.parametrize("kind", [elsewhere, unranked])
def test_weights_from_elsewhere_on_the_least_workers_are_an_update(kind: Callable[[], WeightTransfer]) -> None:
    async def run() -> None:
        async with fleet((1, 2)) as (engine, launcher), engine:
            await until(lambda: len(engine.workers()) == 2)
            launcher.workers[1].killed_in = "take_step"
            assert (await engine.update_weights(kind())).version == "1"
            assert [worker.version for worker in engine.workers()] == ["1"]
            assert engine.weight_version == "1"

    by_virtual_time(run)


def test_weights_from_elsewhere_on_too_few_workers_are_an_error() -> None:
    async def run() -> None:
        async with fleet(2) as (engine, launcher), engine:
            launcher.workers[1].killed_in = "take_step"
            with pytest.raises(
                EngineError, match=r"only 1 of \d workers have the weights 'new', and 2 are needed: worker 1 on"
            ) as error:
                await engine.update_weights(elsewhere(), version="new")
            assert not isinstance(error.value, EngineDead)
            assert "Call update_weights again" in str(error.value)
            await until(lambda: members(engine) == {0, 2})
            assert len(await engine.devices()) in (0, 2)
            await engine.update_weights(elsewhere(), version="newer")
            assert of_version(launcher) == ["newer", "newer"]
            got = await played(Dice, engine)
            assert {version for each in got for version in versions(each)} == {"newer"}

    by_virtual_time(run)


@pytest.mark.parametrize("source", [Parts(fails=True), Parts(ends_early=True)], ids=["fails", "ends early"])
def test_half_sent_transfer_ends_workers_and_new_have_old_weights(source: Parts) -> None:
    async def run() -> None:
        async with fleet(2) as (engine, launcher), engine:
            await engine.update_weights("a folder", version="old")
            with pytest.raises(EngineError, match=r"'new' are on 0 of \d workers: the trainer (failed|ended)"):
                await engine.update_weights(here(source), version="new")
            assert launcher.workers[0].killed
            assert launcher.workers[1].killed
            assert engine.weight_version == "old"
            await until(lambda: members(engine) == {2, 3})
            got = await played(Dice, engine)
            assert {version for each in got for version in versions(each)} == {"old"}

    by_virtual_time(run)


def test_silent_trainer_elsewhere_ends_the_waiting_workers() -> None:
    async def run() -> None:
        async with fleet(1) as (engine, launcher), engine:
            hang(launcher.workers[0], "take_step")
            with pytest.raises(EngineError, match="sent nothing for 60 s"):
                await engine.update_weights(elsewhere(2, seconds=60))
            await until(lambda: members(engine) == {1})
            assert len(await played(Dice, engine)) == 8

    by_virtual_time(run)


# --- workers that join during a transfer


@pytest.mark.parametrize("given", ["a folder", *KINDS.values()], ids=["a folder", *KINDS.keys()])
def test_late_worker_after_a_transfer_waits_for_the_next_weights(given: Any) -> None:
    async def run() -> None:
        async with fleet((1, 2)) as (engine, launcher), engine:
            await until(lambda: len(engine.workers()) == 2)
            await engine.add_adapter("poet", "folder")
            await engine.update_weights(here(), version="sent")
            launcher.workers[1].kill()
            await until(lambda: members(engine) == {0, 2})
            assert [worker.number for worker in engine.workers()] == [0]
            assert engine.absent() == {IdleReason.WAITING: 1}
            assert "worker 2 on" in engine.events[-1]
            assert "waits for the next weights" in engine.events[-1]
            late = launcher.workers[2]
            assert "poet" in late.worker.engine.adapters
            got = await played(Dice, engine)
            assert {version for each in got for version in versions(each)} == {"sent"}
            assert not asked_of(late, "play")
            await engine.update_weights(given() if callable(given) else given, version="next")
            assert {worker.number for worker in engine.workers()} == {0, 2}
            got = await played(Dice, engine, tasks=game_tasks(30))
            assert {version for each in got for version in versions(each)} == {"next"}
            assert asked_of(late, "play")

    by_virtual_time(run)


def test_worker_waiting_for_weights_joins_runs_and_pauses() -> None:
    async def run() -> None:
        async with fleet((1, 2)) as (engine, launcher), engine:
            await until(lambda: len(engine.workers()) == 2)
            await engine.update_weights(here())
            launcher.workers[1].kill()
            await until(lambda: members(engine) == {0, 2})
            await engine.pause()
            assert state_of(launcher.workers[2]) == "paused"
            await engine.resume()
            async with Run(Dice, engine, tasks=game_tasks(200)) as run:
                got = []
                async for trajectory in run:
                    got.append(trajectory)
                    if len(got) == 3:
                        await engine.update_weights(here())
            assert asked_of(launcher.workers[2], "play")
            assert len(compared(got)) == 200

    by_virtual_time(run)


def test_fleet_whose_workers_all_lack_the_weights_ends_with_an_error() -> None:
    async def run() -> None:
        async with fleet(1, stall_seconds=50) as (engine, launcher), engine:
            await engine.update_weights(here())
            launcher.workers[0].kill()
            with pytest.raises(EngineDead, match="1 wait for the next weights"):
                await played(Dice, engine)

    by_virtual_time(run)


def test_fleet_continues_with_the_one_worker_that_has_the_weights() -> None:
    async def run() -> None:
        async with fleet(2, stall_seconds=5) as (engine, launcher), engine:
            await engine.update_weights(here())
            launcher.workers[1].kill()
            await until(lambda: members(engine) == {0, 2})
            await anyio.sleep(60)
            assert len(await played(Dice, engine)) == 8

    by_virtual_time(run)


@either
def test_late_worker_between_check_and_update_has_new_weights(
    kind: Callable[[], Any],
) -> None:
    async def run() -> None:
        async with fleet((1, 2)) as (engine, launcher):
            late = anyio.Event()
            launcher.on_start = lambda worker: worker.held_in.update({"hello": late} if worker.worker.number else {})
            async with engine:
                given = kind()
                if given == elsewhere():
                    given = elsewhere(2)
                checked = await engine.check_update(given, version="new")
                late.set()
                await until(lambda: members(engine) == {0, 1})
                await engine.apply_update(checked)
                assert {worker.version for worker in engine.workers()} == {"new"}
                assert launcher.workers[1].killed is isinstance(given, WeightTransfer)
                got = await played(Dice, engine, tasks=game_tasks(30))
                assert {version for each in got for version in versions(each)} == {"new"}

    by_virtual_time(run)


@either
async def test_weights_checked_in_between_do_not_confuse_workers(kind: Callable[[], Any]) -> None:
    async with fleet(2) as (engine, launcher), engine:
        sent = await engine.check_update(kind(), version="sent")
        folder = await engine.check_update("a folder", version="folder")
        await engine.apply_update(sent)
        await engine.apply_update(folder)
        assert of_version(launcher) == ["folder", "folder"]
        assert len(launcher.alive) == 2


# --- random deaths and updates


@pytest.mark.whole
@settings(max_examples=sweeps.times(60, 6))
@given(
    kills=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 2)), max_size=3),
    given_kinds=st.lists(st.sampled_from(["here", "without ranks", "folder"]), min_size=1, max_size=4),
)
def test_versions_never_decrease_whatever_dies_under_transfers(
    kills: list[tuple[int, int]], given_kinds: list[str]
) -> None:
    async def run() -> None:
        source = Parts()
        known, failures = ["scripted"], []
        async with fleet((1, 3)) as (engine, launcher), Run(Dice, engine, tasks=game_tasks(40), retries=9) as run:

            async def give(kind: str) -> None:
                known.append(version := f"v{len(known)}")
                given = {"here": here(source), "folder": "a folder"}.get(kind) or unranked()
                try:
                    await engine.update_weights(given, version=version)
                except EngineDead:
                    raise
                except EngineError as error:
                    failures.append(str(error))
                else:
                    assert {worker.version for worker in engine.workers()} <= {version}
                await anyio.sleep(0.1)

            async def train() -> None:
                for kind in given_kinds:
                    await give(kind)
                while True:
                    # If all workers with the weights died, the workers that joined later can only wait for weights.
                    if engine.driver.fleet.waiting_for_weights and not engine.driver.fleet.ready:
                        await give("folder")
                    await anyio.sleep(1)

            async def kill() -> None:
                for steps, which in kills:
                    for _ in range(steps):
                        await checkpoint()
                    if len(launcher.alive) > 1:
                        launcher.alive[which % len(launcher.alive)].kill()

            got = []
            async with anyio.create_task_group() as group:
                group.start_soon(train)
                group.start_soon(kill)
                got += [trajectory async for trajectory in run]
                group.cancel_scope.cancel()
        assert len(compared(got)) == 40
        assert all("was lost" in failure for failure in failures), failures
        for each in got:
            numbers = [known.index(version) for version in versions(each)]
            assert numbers == sorted(numbers)
        for worker in launcher.alive:
            assert state_of(worker) == "running"

    by_virtual_time(run)
