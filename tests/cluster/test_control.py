"""A fleet as one engine for its trainer: weights, adapters, pauses, and workers that join or die during updates."""

from __future__ import annotations

from typing import Any, ClassVar

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from runner import (
    BadControl,
    BadOption,
    BadWeights,
    Conversation,
    EngineDead,
    EngineError,
    Run,
    Sampling,
    Trajectory,
)
from runner.engines.scripted.script import Latency
from runner.engines.state import EngineState
from runner.testing import ScriptedEngine, VirtualClock
from tests import sweeps
from tests.cluster.in_process import InProcessWorker
from tests.cluster.playing import Dice, compared, dice_engine, fleet, game_tasks, played
from tests.playing import until

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.sample_functions(2)]


class Once(Dice):
    """Environment with one turn."""

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate()


class Held(Dice):
    """Environment whose tasks, except the first two, wait after their first turn until `released` is true."""

    waiting: ClassVar[list[str]] = []
    released: ClassVar[bool] = False

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate()
        if self.task.id not in ("t0", "t1"):
            Held.waiting.append(self.task.id)
            await until(lambda: Held.released)
        await super().rollout(conversation)


def versions(trajectory: Trajectory) -> list[str]:
    spans = [span.version for segment in trajectory.segments for span in segment.log.versions if span.version]
    return [version for version in dict.fromkeys(spans) if version]


def state_of(worker: InProcessWorker) -> str:
    state: str = worker.worker.engine.state
    return state


def asked_of(worker: InProcessWorker, *names: str) -> list[str]:
    return [call for call, _ in worker.calls if call in names]


async def test_update_reaches_all_workers_and_ids_have_their_versions() -> None:
    async with fleet(3) as (engine, launcher), Run(Dice, engine, tasks=game_tasks(120)) as run:
        # The run may begin this many episodes ahead of its reader, so they may have begun before the update.
        ahead = 2 * engine.driver.fleet.width
        seen = []
        async for trajectory in run:
            seen.append(trajectory)
            if len(seen) == 20:
                update = await engine.update_weights("new")
                assert update.version == "1"
                assert {each.version for each in engine.workers()} == {"1"}
                assert {each.worker.engine.weight_version for each in launcher.alive} == {"1"}
        assert {version for each in seen[:20] for version in versions(each)} == {"scripted"}
        assert {version for each in seen[20 + ahead :] for version in versions(each)} == {"1"}
        assert all(versions(each) in (["scripted"], ["scripted", "1"], ["1"]) for each in seen)
        assert engine.weight_version == "1"


async def test_episode_after_an_update_never_has_older_weights() -> None:
    async with fleet(2) as (engine, _), engine:
        for number in range(1, 4):
            await engine.update_weights("new")
            got = await played(Dice, engine)
            assert {version for each in got for version in versions(each)} == {str(number)}


async def test_weights_refused_by_one_of_several_change_nothing() -> None:
    async with fleet(2) as (engine, launcher), engine:
        for worker in launcher.alive:
            worker.fail_in["check_weights"] = BadWeights("tensor 'a' has another shape")
        with pytest.raises(BadWeights, match="tensor 'a'"):
            await engine.update_weights("bad")
        assert engine.weight_version == "scripted"
        assert [asked_of(worker, "update_weights") for worker in launcher.alive] == [[], []]
        for worker in launcher.alive:
            worker.fail_in.clear()
        assert (await engine.update_weights("good")).version == "1"


async def test_weights_refused_by_one_worker_change_nothing_and_name_it() -> None:
    async with fleet(2) as (engine, launcher), engine:
        blind = launcher.workers[1]
        blind.fail_in["check_weights"] = BadWeights("no such folder: /models/new")
        with pytest.raises(BadWeights, match=r"no such folder: /models/new \(worker 1 on "):
            await engine.update_weights("/models/new")
        assert [each.number for each in engine.workers()] == [0, 1]
        assert [asked_of(worker, "update_weights") for worker in launcher.alive] == [[], []]
        await anyio.wait_all_tasks_blocked()
        assert launcher.workers[0].worker._checked is None, "a refused update is kept"
        blind.fail_in.clear()
        assert (await engine.update_weights("/models/new")).version == "1"


async def test_weights_compared_earlier_are_those_that_are_loaded() -> None:
    async with fleet(2) as (engine, launcher), engine:
        first = await engine.check_update("a", version="a")
        await engine.check_update("b", version="b")
        await engine.apply_update(first)
        assert {each.worker.engine.weight_version for each in launcher.alive} == {"a"}


@pytest.mark.parametrize(
    ("stage", "error"),
    [("check_weights", EngineError("its engine hangs")), ("update_weights", BadWeights("its disk is full"))],
)
def test_failed_worker_is_replaced_and_starts_with_the_new_weights(stage: str, error: Exception) -> None:
    async def run() -> None:
        async with fleet(2) as (engine, launcher), engine:
            launcher.workers[1].fail_in[stage] = error
            await engine.update_weights("new", version="seven")
            await until(lambda: len(engine.workers()) == 2)
            assert launcher.workers[1].killed
            assert {each.version for each in engine.workers()} == {"seven"}
            assert asked_of(launcher.workers[2], "catch_up", "play") == ["catch_up"]
            assert str(error) in engine.driver.events[-1]
            got = await played(Dice, engine)
            assert {version for each in got for version in versions(each)} == {"seven"}

    VirtualClock().run(run)


HANGS = {
    "check_weights": lambda engine: engine.update_weights("new"),
    "update_weights": lambda engine: engine.update_weights("new"),
    "control": lambda engine: engine.pause("keep"),
    "add_adapter": lambda engine: engine.add_adapter("poet", "folder"),
}
"""Calls for a trainer in which a worker may hang, and the method that causes each call."""


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize("call", HANGS)
def test_hanging_worker_is_replaced_and_the_call_returns(call: str) -> None:
    async def run() -> None:
        async with fleet(2, stall_seconds=40.0) as (engine, launcher), engine:
            launcher.workers[1].held_in[call] = anyio.Event()
            began = anyio.current_time()
            await HANGS[call](engine)
            assert 40 < anyio.current_time() - began < 50
            await until(lambda: len(engine.workers()) == 2)
            assert f"{call}: no answer within 40 s" in engine.events[0]
            assert launcher.workers[1].killed
            now, info = (launcher.workers[number].worker.engine for number in (0, 2))
            assert info.weight_version == now.weight_version
            assert info.state == now.state
            assert set(info.adapters) == set(now.adapters)

    VirtualClock().run(run)


def test_worker_that_waits_for_turns_is_never_late() -> None:
    async def run() -> None:
        # The turn takes twenty times as long as `stall_seconds`.
        talker = ScriptedEngine("word " * 400, latency=Latency(first=1, between=1), tick=1.0, places=2)
        async with fleet(2, talker, stall_seconds=20.0) as (engine, launcher), engine:
            async with Run(Once, engine, tasks=game_tasks(1)) as run:
                await until(lambda: any(worker.playing for worker in engine.workers()))
                await engine.update_weights("new", mode="wait")
                (trajectory,) = [each async for each in run]
            assert versions(trajectory) == ["scripted"]
            assert trajectory.sampled > 390
            assert len(launcher.workers) == 2, "no worker was dismissed"
            assert {worker.version for worker in engine.workers()} == {"1"}

    VirtualClock().run(run)


@pytest.mark.parametrize("joiners", [pytest.param(1, marks=pytest.mark.whole), 6])
def test_workers_catch_up_in_parallel_and_updates_do_not_wait(joiners: int) -> None:
    async def run() -> None:
        async with fleet((1, joiners + 1)) as (engine, launcher), engine:
            await until(lambda: len(engine.workers()) == joiners + 1)
            await engine.update_weights("new")
            launcher.on_start = lambda worker: load_slowly(worker, 60.0)
            for number in range(joiners):
                launcher.workers[number + 1].kill()
            began = anyio.current_time()
            await anyio.sleep(10)
            await engine.update_weights("newer")
            assert anyio.current_time() - began < 11
            await until(lambda: len(engine.workers()) == joiners + 1)
            # Sixty seconds to load the version that was replaced during the load, and sixty to load the newest one.
            assert 120 <= anyio.current_time() - began < 130
            assert {worker.worker.engine.weight_version for worker in launcher.alive} == {"2"}

    VirtualClock().run(run)


def test_worker_overtaken_again_and_again_is_added_in_the_end() -> None:
    async def run() -> None:
        async with fleet((1, 2)) as (engine, launcher), engine:
            await until(lambda: len(engine.workers()) == 2)
            await engine.update_weights("new")
            launcher.on_start = lambda worker: load_slowly(worker, 60.0)
            launcher.workers[1].kill()
            for _ in range(12):
                await anyio.sleep(40)
                await engine.update_weights("newer")
            assert len(engine.workers()) == 2
            assert {worker.worker.engine.weight_version for worker in launcher.alive} == {"13"}

    VirtualClock().run(run)


def test_worker_overtaken_while_starting_has_the_remaining_adapters() -> None:
    async def run() -> None:
        async with fleet((1, 2)) as (engine, launcher), engine:
            await until(lambda: len(engine.workers()) == 2)
            await engine.add_adapter("poet", "folder")
            await engine.add_adapter("clerk", "folder")
            launcher.on_start = lambda worker: load_slowly(worker, 60.0)
            launcher.workers[1].kill()
            await anyio.sleep(10)
            await engine.remove_adapter("clerk")
            await engine.add_adapter("poet", "folder")
            await engine.add_adapter("judge", "folder")
            await until(lambda: len(engine.workers()) == 2)
            here, info = (launcher.workers[number].worker.engine.adapters for number in (0, 2))
            assert dict(info) == dict(here)
            assert set(info) == {"poet", "judge"}

    VirtualClock().run(run)


def load_slowly(worker: InProcessWorker, seconds: float) -> None:
    """Let a worker take this many seconds to apply a snapshot. Its event loop stays free."""
    catch_up = worker.worker.catch_up

    async def slower(snapshot: Any) -> None:
        await anyio.sleep(seconds)
        await catch_up(snapshot)

    worker.worker.catch_up = slower


def test_new_worker_has_newest_state_before_its_first_episode() -> None:
    async def run() -> None:
        async with fleet((1, 2)) as (engine, launcher), engine:
            await until(lambda: len(engine.workers()) == 2)
            await engine.update_weights("a")
            await engine.update_weights("b", version="b")
            await engine.add_adapter("poet", "folder")
            assert await engine.add_adapter("poet", "folder") == "poet@2"
            await engine.pause("keep")
            launcher.workers[0].kill()
            await until(lambda: len(engine.workers()) == 2 and 0 not in {each.number for each in engine.workers()})
            info = launcher.workers[2]
            assert info.worker.engine.weight_version == "b"
            assert state_of(info) == "paused"
            await engine.resume()
            assert state_of(info) == "running"
            got = await played(Dice, engine, sampling=Sampling(adapter="poet"))
            assert {version for each in got for version in versions(each)} == {"b+poet@2"}

    VirtualClock().run(run)


@settings(max_examples=sweeps.times(40, 5))
@given(kills=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2)), max_size=4), updates=st.integers(1, 4))
def test_versions_never_decrease_whatever_dies_under_updates(kills: list[tuple[int, int]], updates: int) -> None:
    async def run() -> None:
        async with fleet(3) as (engine, launcher), Run(Dice, engine, tasks=game_tasks(40), retries=9) as run:

            async def train() -> None:
                for _ in range(updates):
                    await engine.update_weights("new")
                    await anyio.sleep(0.1)

            async def kill() -> None:
                for steps, which in kills:
                    for _ in range(steps):
                        await checkpoint()
                    if alive := launcher.alive:
                        alive[which % len(alive)].kill()

            got = []
            async with anyio.create_task_group() as group:
                group.start_soon(train)
                group.start_soon(kill)
                got += [trajectory async for trajectory in run]
        assert len(compared(got)) == 40
        known = ["scripted", *map(str, range(1, updates + 1))]
        for each in got:
            numbers = [known.index(version) for version in versions(each)]
            assert numbers == sorted(numbers)
        for worker in launcher.workers.values():
            runtime = worker.worker.engine.runtime
            assert runtime is not None
            assert runtime.versions == sorted(runtime.versions, key=known.index)

    VirtualClock().run(run)


def test_an_update_that_too_few_workers_survive_ends_the_run_by_name() -> None:
    async def run() -> None:
        async with fleet(2, stall_seconds=30) as (engine, launcher), engine:
            launcher.on_start = lambda worker: worker.fail_in.update(catch_up=BadWeights("no"))
            launcher.workers[1].fail_in["update_weights"] = BadWeights("its disk is full")
            with pytest.raises(EngineDead, match=r"fewer than 2 workers|1 workers are left of at least 2"):
                await engine.update_weights("new")

    VirtualClock().run(run)


def test_stale_episode_is_dropped_and_replayed_also_on_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Held, "waiting", [])
    monkeypatch.setattr(Held, "released", False)

    async def run() -> None:
        async with fleet(2) as (engine, _), Run(Held, engine, tasks=game_tasks(12), max_version_lag=0) as run:
            got = []
            async for trajectory in run:
                got.append(trajectory)
                if len(got) == 2:
                    await until(lambda: Held.waiting)
                    await engine.update_weights("new")
                    Held.released = True
                if len(got) == 5:
                    await engine.update_weights("new")
        assert len(compared(got)) == 12
        assert run.summary.stale > 0
        assert all(len(versions(each)) == 1 for each in got)

    VirtualClock().run(run)


async def test_pause_keeps_samples_and_resume_continues_on_all_workers() -> None:
    async with fleet(2) as (engine, launcher), Run(Dice, engine, tasks=game_tasks(20)) as run:
        alone = compared(await played(Dice, dice_engine(), tasks=game_tasks(20)))
        got = []
        async for trajectory in run:
            got.append(trajectory)
            if len(got) == 3:
                await engine.pause("keep")
                assert {worker.worker.engine.state for worker in launcher.alive} == {EngineState.PAUSED}
                with pytest.raises(BadControl, match="paused, not running"):
                    await engine.pause()
                await engine.resume()
        assert compared(got) == alone


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("parts", [[], ["weights"]])
def test_new_worker_of_a_sleeping_fleet_sleeps_and_wakes_with_it(parts: list[str], paused: bool) -> None:
    async def run() -> None:
        async with fleet((1, 2)) as (engine, launcher), engine:
            await until(lambda: len(engine.workers()) == 2)
            if paused:
                await engine.pause()
            await engine.sleep()
            if parts:
                await engine.wake(parts)
            launcher.workers[0].kill()
            await until(lambda: len(engine.workers()) == 2 and 2 in {each.number for each in engine.workers()})
            there, info = (launcher.workers[number].worker.engine.runtime for number in (1, 2))
            assert info.asleep == there.asleep == {"weights", "kv_cache"} - set(parts)
            assert info.state == there.state == EngineState.ASLEEP
            await engine.wake()
            assert info.state == there.state == (EngineState.PAUSED if paused else EngineState.RUNNING)

    VirtualClock().run(run)


async def test_sleep_and_wake_reach_every_worker() -> None:
    async with fleet(2) as (engine, launcher), engine:
        await engine.sleep()
        assert {worker.worker.engine.state for worker in launcher.alive} == {EngineState.ASLEEP}
        await engine.wake()
        assert {worker.worker.engine.state for worker in launcher.alive} == {EngineState.RUNNING}
        assert len(await played(Dice, engine)) == 8
        await engine.reset_prefix_cache()
        assert await engine.devices() == []


async def test_existing_version_is_refused_before_any_worker_is_called() -> None:
    async with fleet(2) as (engine, launcher), engine:
        await engine.update_weights("new", version="a")
        with pytest.raises(BadOption, match="version='a'"):
            await engine.update_weights("new", version="a")
        assert [asked_of(worker, "check_weights") for worker in launcher.alive] == [["check_weights"]] * 2


def test_removed_adapter_is_absent_on_all_workers_and_new_ones() -> None:
    async def run() -> None:
        async with fleet(2) as (engine, launcher), engine:
            await engine.add_adapter("poet", "folder")
            await engine.add_adapter("judge", "folder")
            assert all("poet" in worker.worker.engine.adapters for worker in launcher.alive)
            await engine.remove_adapter("poet")
            assert not any("poet" in worker.worker.engine.adapters for worker in launcher.alive)
            with pytest.raises(BadOption, match="no adapter"):
                await played(Dice, engine, sampling=Sampling(adapter="poet"))
            launcher.workers[0].kill()
            await until(lambda: [each.number for each in engine.workers()] == [1, 2])
            assert list(launcher.workers[2].worker.engine.adapters) == ["judge"]

    VirtualClock().run(run)


async def test_a_fleet_samples_nothing_by_itself() -> None:
    async with fleet(1) as (engine, _), engine:
        with pytest.raises(BadControl, match="plays whole episodes"):
            engine.stream(None)  # type: ignore[arg-type]  # the argument is not read


async def test_several_runs_share_a_fleet() -> None:
    async with fleet(2) as (engine, _), engine:
        results: list[Any] = []

        async def play() -> None:
            results.append(compared(await played(Dice, engine, group_size=2)))

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(play)
    assert results == [compared(await played(Dice, dice_engine(), group_size=2))] * 3
