"""Engine control beyond the contract of every engine: one change at a time, and waiting turns lose nothing."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.from_thread
import pytest
import trio.testing
from anyio.lowlevel import checkpoint

from runner import BadControl, BadOption, Conversation, Limits, Outcome, Run
from runner.engines.base import Engine
from runner.engines.scripted.script import Latency
from runner.engines.state import EngineState, PauseMode
from runner.testing import ScriptedEngine, assert_exact
from runner.tokens.log import VersionSpan
from tests.engines.controlling import MODES, TEXT, NotOurs, a_while, ask, saying, slow
from tests.playing import Plain, tasks
from tests.repository import DOCS

pytestmark = [pytest.mark.anyio, pytest.mark.both_backends]

# --- refusals


async def nothing(engine: Engine) -> None: ...


async def paused(engine: Engine) -> None:
    await engine.pause()


async def asleep(engine: Engine) -> None:
    await engine.sleep()


async def half_awake(engine: Engine) -> None:
    await engine.sleep()
    await engine.wake(["kv_cache"])


async def discarded(engine: Engine) -> None:
    await engine.sleep(2)
    await engine.wake()


REFUSED: list[Any] = [
    pytest.param(nothing, lambda e: e.resume(), r"resume\(\): the engine is running, not paused", id="resume unpaused"),
    pytest.param(nothing, lambda e: e.wake(), r"wake\(\): the engine is running, not asleep", id="wake awake"),
    pytest.param(
        paused, lambda e: e.pause(), r"pause\(\): the engine is paused, not running. resume\(\)", id="pause twice"
    ),
    pytest.param(paused, lambda e: e.wake(), r"wake\(\): the engine is paused, not asleep", id="wake paused"),
    pytest.param(asleep, lambda e: e.sleep(), r"sleep\(\): the engine is asleep already", id="sleep twice"),
    pytest.param(
        asleep, lambda e: e.pause(), r"pause\(\): the engine is asleep, not running. wake\(\)", id="pause asleep"
    ),
    pytest.param(asleep, lambda e: e.resume(), r"resume\(\): the engine is asleep.* wake\(\)", id="resume asleep"),
    pytest.param(
        asleep, lambda e: e.update_weights(None), r"weights is asleep; call wake\(\['weights'\]\)", id="update"
    ),
    pytest.param(half_awake, lambda e: e.update_weights(None), "memory of the weights is asleep", id="update half"),
    pytest.param(asleep, lambda e: e.reset_prefix_cache(), "the engine is asleep and has no cache", id="reset asleep"),
    pytest.param(discarded, lambda e: e.resume(), r"discarded the weights; call update_weights", id="no weights"),
    pytest.param(nothing, lambda e: e.start_profile(), "a scripted engine has no profiler", id="profile"),
    pytest.param(nothing, lambda e: e.pause("hard"), "mode='hard': give one of wait, keep, abort", id="mode"),
    pytest.param(nothing, lambda e: e.sleep(3), r"sleep\(level=3\): give 1, .* or 2", id="level"),
    pytest.param(asleep, lambda e: e.wake(["cache"]), "give a list of weights and kv_cache", id="tag"),
    pytest.param(asleep, lambda e: e.wake("weights"), "give a list of weights and kv_cache", id="tag no list"),
    pytest.param(
        nothing, lambda e: e.update_weights(None, version="scripted"), "this version was used before", id="version"
    ),
    pytest.param(
        nothing, lambda e: e.update_weights(None, version=""), "give a name, or None for the next", id="empty"
    ),
]


@pytest.mark.parametrize(("before", "refused", "said"), REFUSED)
async def test_control_impossible_in_this_state_raises_and_changes_nothing(
    before: Callable[[Engine], Awaitable[None]], refused: Callable[[Engine], Awaitable[None]], said: str
) -> None:
    async with slow() as engine:
        await before(engine)
        state, version, gate = engine.state, engine.weight_version, engine.runtime.gate._held
        with pytest.raises((BadControl, BadOption), match=said):
            await refused(engine)
        assert (engine.state, engine.weight_version, engine.runtime.gate._held) == (state, version, gate)
        assert engine.pause_state.on is gate


async def test_engine_without_control_refuses_a_pause_by_name() -> None:
    engine = NotOurs(slow())
    with pytest.raises(BadControl, match=r"NotOurs cannot be controlled"):
        await engine.pause()
    assert (engine.state, engine.weight_version) == (EngineState.RUNNING, "")


def test_an_engine_of_another_event_loop_is_left_alone() -> None:
    with anyio.from_thread.start_blocking_portal() as portal, portal.wrap_async_context_manager(slow()) as engine:
        with pytest.raises(BadControl, match="ScriptedEngine belongs to another event loop"):
            anyio.run(engine.pause)
        portal.call(engine.pause)
        assert engine.state is EngineState.PAUSED


# --- turns during sampling


@pytest.mark.parametrize("mode", MODES)
async def test_no_episode_of_a_run_is_lost_or_inexact(mode: PauseMode) -> None:
    engine = slow(places=3)
    async with Run(Plain, engine, tasks=tasks(6)) as run:
        for _ in range(4):
            while not engine.stats().open and run.summary.episodes < 6:
                await checkpoint()
            await engine.pause(mode)
            await a_while()
            assert mode is PauseMode.KEEP or engine.stats().open == 0
            await engine.resume()
            await a_while(3)
        got = [trajectory async for trajectory in run]
        stats = engine.stats()
    assert {trajectory.outcome for trajectory in got} == {Outcome.COMPLETED}
    assert [turn.text for trajectory in got for turn in trajectory.turns] == [TEXT] * 6
    assert {trajectory.attempt for trajectory in got} == {0}
    for trajectory in got:
        assert_exact(trajectory)
    assert (stats.open, stats.waiting, stats.live_sessions) == (0, 0, 0)
    assert (len(engine.calls) > 6) is (mode is PauseMode.ABORT), "only turns that were cut are requested again"


async def test_sleep_cuts_turns_and_the_run_continues_after_wake() -> None:
    engine = slow(places=3)
    async with Run(Plain, engine, tasks=tasks(6)) as run:
        while engine.stats().open < 3:
            await checkpoint()
        await engine.finish_generation()
        await engine.finish_generation()
        assert engine.stats().state is EngineState.ASLEEP
        await engine.health()
        await a_while()
        assert (engine.stats().open, engine.stats().waiting) == (0, 6)
        await engine.prepare_for_generation()
        await engine.prepare_for_generation()
        assert engine.stats().state is EngineState.RUNNING
        got = [trajectory async for trajectory in run]
    assert {trajectory.outcome for trajectory in got} == {Outcome.COMPLETED}
    assert len(engine.calls) == 9


# --- clocks


class Timed(Plain):
    """Environment with a hook between its two turns, in which a test can pause the engine."""

    def __init__(self, between: Callable[[], Awaitable[None]] = checkpoint) -> None:
        self.between = between

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate()
        await self.between()
        conversation.add("Continue.")
        await conversation.generate()


async def in_a_pause(mode: str, *, environment: Plain, clock: trio.testing.MockClock, **limits: Any) -> list[Any]:
    engine = slow(places=1)
    async with Run(environment, engine, tasks=tasks(2), limits=Limits(**limits), retries=0) as run:
        while not engine.stats().open:
            await checkpoint()
        await a_while(3)
        await engine.pause(mode)
        await a_while()
        clock.jump(1000)
        await a_while()
        await engine.resume()
        return [trajectory async for trajectory in run]


# Only trio has a clock that a test can move.
@pytest.mark.parametrize("mode", MODES)
def test_episode_clocks_stop_while_the_engine_is_paused(mode: PauseMode, clock: trio.testing.MockClock) -> None:
    async def main() -> None:
        trajectories = await in_a_pause(mode, environment=Timed(), clock=clock, seconds=50)
        assert [each.outcome for each in trajectories] == [Outcome.COMPLETED] * 2

    trio.run(main, clock=clock)


def test_environment_clock_runs_while_the_engine_is_paused(clock: trio.testing.MockClock) -> None:
    async def main() -> None:
        engine = ScriptedEngine("Yes")

        async def work() -> None:
            await engine.pause()
            clock.jump(1000)
            await checkpoint()
            await engine.resume()

        async with Run(Timed(work), engine, limits=Limits(seconds=50)) as run:
            (trajectory,) = [each async for each in run]
        assert (trajectory.outcome, trajectory.limit) == (Outcome.TIME_LIMIT, "seconds")

    trio.run(main, clock=clock)


# --- weights


async def test_update_during_a_turn_has_exact_spans_and_calls_listeners() -> None:
    versions: list[str] = []
    async with slow() as engine:
        undisturbed, _ = await ask(engine)
        engine.runtime.listeners.add(lambda: versions.append(engine.weight_version))
        before = engine.stats().sampled_tokens
        sampled: list[int] = []
        engine.runtime.listeners.add(lambda: sampled.append(engine.stats().sampled_tokens - before))
        async with saying(engine) as said:
            await engine.update_weights(None, version="new")
        update = await engine.update_weights(None)
        _, finish = await ask(engine)
        lags = [engine.lag(version) for version in ("scripted", "new", "2", "never there")]
    assert said.ids == undisturbed
    assert said.finish is not None
    old, new = said.finish.versions
    assert (old.version, old.start, new.version, new.end) == ("scripted", 0, "new", len(undisturbed))
    assert old.end == new.start == sampled[0]
    assert (update.version, versions, lags) == ("2", ["new", "2"], [2, 1, 0, 0])
    assert finish.versions == (VersionSpan("2", 0, len(undisturbed)),)
    assert min(update.check_seconds, update.pause_seconds, update.load_seconds) >= 0


async def updated_in_the_midst() -> int:
    """Return the number of ids that the old weights sampled, if they are replaced between two deltas."""
    async with ScriptedEngine(TEXT, chunks=8, latency=Latency(between=1)) as engine, saying(engine) as said:
        clock = engine.runtime.tick_clock
        begun = clock.now
        while clock.now < begun + 3:
            await checkpoint()
        await engine.update_weights(None, version="new")
    assert said.finish is not None
    old, new = said.finish.versions
    assert (old.start, old.end) == (0, new.start)
    return old.end


async def test_unsent_ids_keep_the_version_that_sampled_them() -> None:
    # With another order of tasks, a delta may be complete exactly at the update.
    assert any([await updated_in_the_midst() % 8 for _ in range(5)])


async def test_update_keeps_paused_and_sleeping_states() -> None:
    async with slow() as engine:
        await engine.pause()
        await engine.update_weights(None)
        assert (engine.state, engine.weight_version) == (EngineState.PAUSED, "1")
        await engine.sleep()
        await engine.wake(["weights"])
        await engine.update_weights(None)
        assert (engine.state, engine.weight_version) == (EngineState.ASLEEP, "2")
        await engine.wake()
        assert engine.state is EngineState.PAUSED, "paused as before the sleep"
        await engine.resume()
        assert engine.stats().weight_version == (await ask(engine))[1].versions[0].version == "2"


async def test_discarded_weights_are_required_before_resume() -> None:
    async with slow() as engine, anyio.create_task_group() as group:
        await discarded(engine)
        assert engine.stats().state is EngineState.PAUSED
        group.start_soon(ask, engine)
        await a_while()
        assert engine.stats().waiting == 1
        await engine.update_weights(None)
        assert engine.stats().state is EngineState.RUNNING


async def test_changes_come_one_after_another_however_many_ask_at_once() -> None:
    async with slow() as engine, anyio.create_task_group() as group:
        undisturbed, _ = await ask(engine)
        async with saying(engine) as said:
            for mode in ("wait", "keep", "keep") * 3:
                group.start_soon(lambda mode: engine.update_weights(None, mode=mode), mode)
        assert said.ids == undisturbed
    assert engine.state is EngineState.RUNNING
    assert engine.runtime.versions == ["scripted", *map(str, range(1, 10))]


# --- the page


async def test_the_trainer_of_the_page_trains(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "engine-control.md").read_text()
    source = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0]
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(source, "engine-control.md", "exec"), names)
    engine = ScriptedEngine("Paris.")
    await names["train"](engine, None)
    assert engine.weight_version == "2"
    assert len(capsys.readouterr().out.splitlines()) == 14


async def test_checked_weights_are_applied_once_and_in_their_order() -> None:
    """Otherwise ids of two weights would have the same version."""
    async with ScriptedEngine("Yes") as engine:
        first, second = await engine.check_update("a"), await engine.check_update("b")
        await engine.apply_update(first)
        for checked in (first, second):
            with pytest.raises(BadControl, match=r"got weights of the version '1' since the check"):
                await engine.apply_update(checked)
        assert (engine.weight_version, engine.state) == ("1", EngineState.RUNNING)
        assert (await engine.apply_update(await engine.check_update("b"))).version == "2"
