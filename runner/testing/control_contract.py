"""Tests of the contract of `Engine`: pause, sleep, new weights and adapters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import anyio
import pytest

from runner.engines.base import FinishReason
from runner.engines.state import EngineState
from runner.errors import BadControl, BadInput, RequestRejected
from runner.testing.cancellation_points import cancel_everywhere
from runner.testing.engine_under_test import (
    ENDLESS_TOKENS,
    LONG_TOKENS,
    SHORT_TOKENS,
    EngineUnderTest,
    complete,
    control_test,
    running_request,
)

__all__ = ["ControlContract"]


class ControlContract:
    """Tests of an engine that a trainer controls."""

    @control_test(
        pause=lambda under_test: under_test.engine.pause(), keep=lambda under_test: under_test.engine.pause("keep")
    )
    async def test_pause_keep_resumes_turns_where_they_were(self, under_test: EngineUnderTest) -> None:
        engine, undisturbed = under_test.engine, await under_test.sample(LONG_TOKENS)
        async with running_request(engine, under_test.request(LONG_TOKENS)) as said:
            await engine.pause("keep")
            await under_test.settle()
            before = list(said.ids)
            await under_test.settle()
            assert said.ids == before
            assert len(before) < LONG_TOKENS
            assert engine.stats().state is EngineState.PAUSED
            assert engine.is_alive()
            await engine.health()
            await engine.resume()
        assert said.ids == undisturbed
        assert said.finish is not None
        assert said.finish.reason is FinishReason.LENGTH

    @control_test(pause=lambda under_test: under_test.engine.pause())
    async def test_pause_wait_ends_turns_and_begins_none(self, under_test: EngineUnderTest) -> None:
        engine, undisturbed = under_test.engine, await under_test.sample(LONG_TOKENS)
        async with anyio.create_task_group() as group:
            async with running_request(engine, under_test.request(LONG_TOKENS)) as said:
                await engine.pause("wait")
                assert engine.stats().open == 0
            assert said.ids == undisturbed
            group.start_soon(under_test.sample, SHORT_TOKENS)
            await under_test.settle()
            assert (engine.stats().open, engine.stats().waiting) == (0, 1)
            await engine.resume()

    @control_test(pause=lambda under_test: under_test.engine.pause())
    async def test_pause_abort_keeps_the_ids_so_far(self, under_test: EngineUnderTest) -> None:
        engine, undisturbed = under_test.engine, await under_test.sample(SHORT_TOKENS)
        async with running_request(engine, under_test.request()) as said:
            await engine.pause("abort")
            assert engine.stats().open == 0
        assert said.finish is not None
        assert said.finish.reason is FinishReason.ABORT
        assert said.ids[:SHORT_TOKENS] == undisturbed[: len(said.ids)]
        assert len(said.ids) < ENDLESS_TOKENS
        await engine.resume()
        assert await under_test.sample(SHORT_TOKENS) == undisturbed

    @control_test(
        pause=lambda under_test: under_test.engine.pause(), keep=lambda under_test: under_test.engine.pause("keep")
    )
    async def test_cancelled_pause_leaves_the_engine_running(self, under_test: EngineUnderTest) -> None:
        engine = under_test.engine
        paused = False

        async def pause() -> None:
            nonlocal paused
            paused = False
            await engine.pause("keep")
            paused = True

        async def require_running() -> None:
            if paused:  # the cancellation came after the pause was complete
                await engine.resume()
            assert (engine.state, engine.pause_state.on) == (EngineState.RUNNING, False)

        async with engine.stream(under_test.request()):
            await cancel_everywhere(pause, check=require_running)
        assert len(await under_test.sample(SHORT_TOKENS)) == SHORT_TOKENS

    @control_test(sleep=lambda under_test: under_test.engine.sleep())
    async def test_sleep_aborts_turns_until_all_parts_are_awake(self, under_test: EngineUnderTest) -> None:
        engine, undisturbed = under_test.engine, await under_test.sample(SHORT_TOKENS)
        async with running_request(engine, under_test.request()) as said:
            await engine.sleep()
            assert (engine.stats().state, engine.stats().open) == (EngineState.ASLEEP, 0)
        assert said.finish is not None
        assert said.finish.reason is FinishReason.ABORT
        assert engine.is_alive()
        await engine.health()
        await engine.wake(["kv_cache"])
        assert engine.stats().state is EngineState.ASLEEP
        await engine.wake(["weights"])
        assert engine.stats().state is EngineState.RUNNING
        assert await under_test.sample(SHORT_TOKENS) == undisturbed

    @control_test(sleep=lambda under_test: under_test.engine.sleep())
    async def test_call_in_the_wrong_state_is_refused(self, under_test: EngineUnderTest) -> None:
        engine = under_test.engine

        async def refuses(*calls: Callable[[], Awaitable[Any]]) -> None:
            state, version = engine.state, engine.weight_version
            for call in calls:
                with pytest.raises(BadInput):
                    await call()
                assert (engine.state, engine.weight_version) == (state, version)

        await refuses(engine.resume, engine.wake, lambda: engine.pause("hard"), lambda: engine.sleep(3))
        await engine.pause()
        await refuses(engine.pause, engine.wake)
        await engine.sleep()
        await refuses(
            engine.sleep, engine.pause, engine.resume, engine.reset_prefix_cache, lambda: engine.wake("weights")
        )
        with pytest.raises(BadControl, match="memory of the weights is asleep"):
            await engine.update_weights(under_test.weights)
        await engine.wake()
        assert engine.state is EngineState.PAUSED, "the state before the sleep"
        await engine.resume()

    @control_test(update_weights=lambda under_test: under_test.engine.update_weights(under_test.weights))
    async def test_update_during_a_turn_records_weights_of_each_id(self, under_test: EngineUnderTest) -> None:
        engine, undisturbed = under_test.engine, await under_test.sample(LONG_TOKENS)
        first = engine.weight_version
        async with running_request(engine, under_test.request(LONG_TOKENS)) as said:
            update = await engine.update_weights(under_test.weights)
        assert said.ids == undisturbed
        assert said.finish is not None
        spans = said.finish.versions
        assert [span.version for span in spans] == [first, update.version]
        assert (spans[0].start, spans[-1].end) == (0, LONG_TOKENS)
        assert all(before.end == after.start for before, after in pairwise(spans))
        assert engine.weight_version == engine.stats().weight_version == update.version != first
        with pytest.raises(BadInput, match="this version was used before"):
            await engine.update_weights(under_test.weights, version=first)

    @control_test(update_weights=lambda under_test: under_test.engine.update_weights(under_test.weights))
    async def test_update_leaves_a_paused_engine_paused(self, under_test: EngineUnderTest) -> None:
        engine = under_test.engine
        await engine.pause()
        update = await engine.update_weights(under_test.weights)
        assert (engine.state, engine.weight_version) == (EngineState.PAUSED, update.version)
        await engine.resume()
        _, finish = await complete(engine, under_test.request(SHORT_TOKENS))
        assert [span.version for span in finish.versions] == [update.version]

    @control_test(
        add_adapter=lambda under_test: under_test.engine.add_adapter("poet", under_test.adapter),
        remove_adapter=lambda under_test: under_test.engine.remove_adapter("poet"),
    )
    async def test_adapter_samples_turns_until_it_is_removed(self, under_test: EngineUnderTest) -> None:
        engine = under_test.engine

        async def refused() -> None:
            with pytest.raises(RequestRejected, match="no adapter 'poet'"):
                await engine.stream(under_test.request(SHORT_TOKENS, adapter="poet")).__aenter__()

        undisturbed = await under_test.sample(SHORT_TOKENS)
        await refused()
        label = await engine.add_adapter("poet", under_test.adapter)
        assert list(engine.adapters) == ["poet"]
        async with running_request(engine, under_test.request(LONG_TOKENS, adapter="poet")) as said:
            await engine.remove_adapter("poet")
            await refused()
        assert said.finish is not None
        assert said.finish.reason is FinishReason.LENGTH, "a turn in flight continues"
        assert [span.version for span in said.finish.versions] == [f"{engine.weight_version}+{label}"]
        assert await under_test.sample(SHORT_TOKENS) == undisturbed
        assert not engine.adapters
