"""Engine control: a failed step is undone or ends the engine, and a cancelled call is complete or did not begin."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.from_thread
import pytest
from anyio.lowlevel import checkpoint

from runner import EngineDead, Outcome, Run, Trajectory
from runner.engines.base import Engine
from runner.engines.scripted.runtime import ScriptedRuntime
from runner.engines.state import EngineState, PauseMode
from runner.errors import EngineError
from runner.testing import ScriptedEngine, cancel_everywhere
from tests.engines.controlling import ask, runs_as, saying, slow
from tests.playing import Plain, assert_nothing_open, tasks, until_end

pytestmark = [pytest.mark.anyio, pytest.mark.both_backends]


class Careful(ScriptedRuntime):
    """Runtime that yields before and after each step, and fails in the step that `fails` names."""

    fails = ""
    dies = False

    async def _do(self, name: str, call: Callable[..., Awaitable[None]], *given: Any) -> None:
        await checkpoint()
        await call(*given)
        if name == self.fails:
            self.fails = ""
            if self.dies:
                self.die("half way")
                raise self.dead()
            raise EngineError(f"{name} failed")
        await checkpoint()

    async def pause(self, mode: PauseMode) -> None:
        await self._do("pause", super().pause, mode)

    async def resume(self) -> None:
        await self._do("resume", super().resume)

    async def check_weights(self, given: Any) -> None:
        await self._do("check", super().check_weights, given)

    async def load_weights(self, checked: Any, version: str) -> None:
        await self._do("load", super().load_weights, checked, version)

    async def sleep(self, level: int) -> None:
        await self._do("sleep", super().sleep, level)

    async def wake(self, tags: Collection[str]) -> None:
        await self._do("wake", super().wake, tags)


@asynccontextmanager
async def careful(fails: str = "", **settings: Any) -> AsyncIterator[tuple[ScriptedEngine, Careful]]:
    async with slow(**settings) as engine:
        runtime = runs_as(engine, Careful)
        runtime.fails = fails
        yield engine, runtime


async def test_a_pause_that_fails_is_undone() -> None:
    async with careful("pause") as (engine, _):
        undisturbed, _ = await ask(engine)
        async with saying(engine) as said:
            with pytest.raises(EngineError, match="pause failed"):
                await engine.pause("keep")
            assert engine.state is EngineState.RUNNING
        assert said.ids == undisturbed
        assert (await ask(engine))[0] == undisturbed


async def test_a_pause_that_can_not_be_undone_can_be_resumed_later() -> None:
    async with careful("pause") as (engine, runtime):
        held = runtime.pause

        async def pause(mode: PauseMode) -> None:
            runtime.fails = "pause"
            try:
                await held(mode)
            finally:
                runtime.fails = "resume"

        runtime.pause = pause  # type: ignore[method-assign]  # only this time
        with pytest.raises(EngineError, match="resume failed"):
            await engine.pause("keep")
        assert engine.state is EngineState.PAUSED
        await engine.resume()
        assert (await ask(engine))[0]


async def test_weights_that_are_refused_leave_everything_as_it_was() -> None:
    async with careful("check") as (engine, _):
        async with saying(engine) as said:
            with pytest.raises(EngineError, match="check failed"):
                await engine.update_weights(None)
            assert not engine.pause_state.on
        assert said.finish is not None
        assert [span.version for span in said.finish.versions] == ["scripted"]
        assert (engine.state, engine.weight_version) == (EngineState.RUNNING, "scripted")


async def test_failed_load_ends_all_episodes_and_keeps_the_version() -> None:
    got: list[Trajectory] = []
    async with careful("load", places=3) as (engine, runtime):
        runtime.dies = True

        async def update() -> None:
            while not engine.stats().open:
                await checkpoint()
            with pytest.raises(EngineDead, match="half way"):
                await engine.update_weights(None)

        async with anyio.create_task_group() as group:
            group.start_soon(update)
            with pytest.raises(EngineDead, match="half way"):
                await until_end(Run(Plain, engine, tasks=tasks(6), breaker=1.0), got)
        assert (engine.weight_version, engine.is_alive()) == ("scripted", False)
    assert got
    assert {trajectory.outcome for trajectory in got} == {Outcome.ENGINE_ERROR}
    assert len({trajectory.error for trajectory in got}) == 1
    assert_nothing_open(engine)


async def pausing(engine: Engine, mode: str) -> None:
    await engine.pause(mode)
    try:
        await checkpoint()
    finally:
        with anyio.CancelScope(shield=True):
            await engine.resume()


async def updating(engine: Engine, mode: str) -> None:
    await engine.update_weights(None, mode=mode)


SCENARIOS = [
    *(pytest.param(pausing, mode, id=f"pause {mode}") for mode in PauseMode),
    *(pytest.param(updating, mode, id=f"update {mode}") for mode in PauseMode),
]


@pytest.mark.parametrize(("scenario", "how"), SCENARIOS)
async def test_call_cancelled_at_any_point_is_done_or_never_begun(
    scenario: Callable[[Engine, str], Awaitable[None]], how: str
) -> None:
    async with careful() as (engine, _):
        undisturbed, _ = await ask(engine)

        async def meanwhile() -> None:
            async with saying(engine):
                await scenario(engine, how)

        async def nothing_is_left() -> None:
            assert (engine.state, engine.pause_state.on) == (EngineState.RUNNING, False)
            assert (engine.stats().open, engine.stats().waiting) == (0, 0)
            ids, finish = await ask(engine)
            assert ids == undisturbed
            assert [span.version for span in finish.versions] == [engine.weight_version]

        assert await cancel_everywhere(meanwhile, check=nothing_is_left) > 5


@pytest.mark.parametrize("level", [1, 2])
async def test_a_sleep_that_is_cancelled_is_whole_or_not_at_all(level: int) -> None:
    async with careful() as (engine, _):
        undisturbed, _ = await ask(engine)

        async def whole_or_not_at_all() -> None:
            if engine.state is EngineState.ASLEEP:
                assert engine.runtime.asleep == {"weights", "kv_cache"}
                await engine.wake()
            if engine.state is EngineState.PAUSED:
                assert level == 2
                await engine.update_weights(None)
            assert (engine.state, (await ask(engine))[0]) == (EngineState.RUNNING, undisturbed)

        assert await cancel_everywhere(lambda: engine.sleep(level), check=whole_or_not_at_all) > 2
