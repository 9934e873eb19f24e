"""An engine whose control is cancelled natively, as by `asyncio.timeout`: no step stays unfinished."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from runner import WeightProof
from runner.concurrency.cancellation import to_its_end
from runner.engines.scripted.runtime import ScriptedRuntime
from runner.engines.state import EngineState, PauseMode
from runner.testing import ScriptedEngine
from tests.engines.controlling import runs_as
from tests.playing import recording

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # native cancellations of asyncio reach no anyio scope


class SlowRuntime(ScriptedRuntime):
    """Runtime in which each step waits until the test sets `released`."""

    reached: list[str]
    released: anyio.Event

    async def _wait(self, step: str) -> None:
        self.reached.append(step)
        await self.released.wait()

    async def load_weights(self, checked: Any, version: str) -> None:
        await self._wait("load")
        await super().load_weights(checked, version)

    async def score_while_paused(self, ids: Any) -> Any:
        await self._wait("score")
        return await super().score_while_paused(ids)

    async def sleep(self, level: int) -> None:
        await self._wait("sleep")
        await super().sleep(level)

    async def wake(self, tags: Any) -> None:
        await self._wait("wake")

    async def resume(self) -> None:
        await self._wait("resume")
        await super().resume()


async def cancelled_at(runtime: SlowRuntime, step: str, call: Callable[[], Awaitable[Any]]) -> None:
    """Cancel `call` natively, twice, while `step` runs, and check that it returns only after the step."""
    task = asyncio.ensure_future(call())
    while step not in runtime.reached:
        await checkpoint()
    for _ in range(2):
        task.cancel()
        for _ in range(3):
            await checkpoint()
    assert not task.done(), "the step must not end early"
    runtime.released.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def controlled(engine: ScriptedEngine) -> SlowRuntime:
    runtime = runs_as(engine, SlowRuntime)
    runtime.reached, runtime.released = [], anyio.Event()
    return runtime


async def test_native_cancellation_waits_for_the_end_of_a_load() -> None:
    async with recording("Yes") as engine:
        runtime = await controlled(engine)
        versions: list[str] = []
        engine.runtime.listeners.add(lambda: versions.append(engine.weight_version))
        await cancelled_at(runtime, "load", lambda: engine.update_weights(None))
        assert (engine.state, engine.weight_version, versions) == (EngineState.RUNNING, "1", ["1"])
        assert not engine.pause_state.on
        await engine.pause()
        await engine.resume()


@pytest.mark.parametrize("holds", [True, False])
async def test_native_cancellation_waits_for_the_end_of_a_proof(holds: bool) -> None:
    async with recording("Yes") as engine:
        proof = WeightProof(range(40), [each if holds else each - 1 for each in await engine.score(range(40))])
        runtime = await controlled(engine)

        async def load_weights(checked: Any, version: str) -> None:
            """Return at once, so that only the proof waits."""

        runtime.load_weights = load_weights  # type: ignore[method-assign]  # so that the proof is cancelled
        await cancelled_at(runtime, "score", lambda: engine.update_weights(None, proof=proof))
        if holds:
            assert (engine.state, engine.weight_version) == (EngineState.RUNNING, "1")
            assert engine.proof_figures is not None
        assert engine.is_alive() == holds


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_a_timeout_around_an_update_leaves_no_engine_paused(mode: PauseMode) -> None:
    async with recording("Yes") as engine:
        runtime = await controlled(engine)
        asyncio.get_running_loop().call_later(0.1, runtime.released.set)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.update_weights(None, mode=mode), 0.01)
        assert (engine.state, engine.weight_version) == (EngineState.RUNNING, "1")


async def test_a_sleep_that_is_cancelled_natively_is_done_and_can_be_woken() -> None:
    async with recording("Yes") as engine:
        runtime = await controlled(engine)
        await cancelled_at(runtime, "sleep", engine.sleep)
        states = [engine.state]
        await engine.wake()
        assert [*states, engine.state] == [EngineState.ASLEEP, EngineState.RUNNING]


async def test_a_wake_that_is_cancelled_natively_is_done() -> None:
    async with recording("Yes") as engine:
        await engine.sleep()
        runtime = await controlled(engine)
        await cancelled_at(runtime, "wake", engine.wake)
        assert engine.state is EngineState.RUNNING


async def test_a_resume_that_is_cancelled_natively_is_done() -> None:
    async with recording("Yes") as engine:
        await engine.pause()
        runtime = await controlled(engine)
        await cancelled_at(runtime, "resume", engine.resume)
        assert engine.state is EngineState.RUNNING
        assert not engine.pause_state.on


async def test_call_awaited_to_its_end_returns_or_raises_as_usual() -> None:
    async def raises() -> None:
        await checkpoint()
        raise ValueError("as it is")

    async def returns() -> int:
        await checkpoint()
        return 7

    assert await to_its_end(returns) == 7
    with pytest.raises(ValueError, match="as it is"):
        await to_its_end(raises)


# --- regressions


async def test_versions_are_counted_past_those_that_were_given() -> None:
    async with recording("Yes") as engine:
        await engine.update_weights(None, version="2")
        assert (await engine.update_weights(None)).version == "3"
        assert (await engine.update_weights(None)).version == "4"


async def test_a_version_that_would_stand_for_an_adapter_is_refused() -> None:
    from runner import BadOption

    async with recording("Yes") as engine:
        with pytest.raises(BadOption, match="separates the version from an adapter's name"):
            await engine.update_weights(None, version="run+lr@3")


async def test_concurrent_calls_to_finish_or_prepare_count_as_one() -> None:
    async with recording("Yes") as engine:
        runtime = await controlled(engine)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.finish_generation)
            tasks.start_soon(engine.finish_generation)
            while not runtime.reached:
                await checkpoint()
            tasks.start_soon(engine.prepare_for_generation)  # while it goes to sleep
            tasks.start_soon(engine.prepare_for_generation)
            runtime.released.set()
        assert runtime.reached[:2] == ["sleep", "wake"]
        assert engine.state is EngineState.RUNNING
