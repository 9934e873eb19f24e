"""Between a trainer's steps: the engine sleeps and wakes, weights change, and no row is lost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any, Self

import anyio
import anyio.lowlevel
import pytest

from runner import BadControl, BadOption, RequestRejected
from runner.engines.scripted.runtime import ScriptedRuntime
from runner.engines.state import EngineState
from runner.generation import Generation
from runner.testing import Latency, ScriptedEngine
from runner.tokens.log import VersionSpan
from tests.engines.controlling import NotOurs, runs_as
from tests.generation.batching import EOS_ID, generating, loudly, padded, rows_of, texts_of
from tests.playing import assert_nothing_open

pytestmark = [pytest.mark.anyio, pytest.mark.both_backends]

COLOCATED = {"colocated": {"enabled": True, "resources": None}}
BATCH = padded(["ab", "c"])
SLOWLY = Latency(first=2, between=2)


class WatchedRuntime(ScriptedRuntime):
    """Runtime that records the calls to its engine, in order."""

    asked: list[str]

    async def sleep(self, level: int) -> None:
        self.asked.append(f"sleep {level}")
        await super().sleep(level)

    async def wake(self, tags: Collection[str]) -> None:
        self.asked.append(f"wake {' '.join(tags)}")
        await super().wake(tags)

    async def reset_prefix_cache(self) -> None:
        self.asked.append("reset")
        await super().reset_prefix_cache()


class Watched(ScriptedEngine):
    """Engine that records the calls to it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(loudly, record=True, **settings)
        self.asked: list[str] = []

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        runs_as(self, WatchedRuntime).asked = self.asked
        return self


@asynccontextmanager
async def watched(config: Any, **settings: Any) -> AsyncIterator[tuple[Generation, Watched]]:
    async with Watched(**settings) as engine, Generation(engine, config) as generation:
        yield generation, engine
        assert_nothing_open(engine)


async def test_colocated_engine_sleeps_between_phases_and_clears_its_cache() -> None:
    async with watched(COLOCATED) as (generation, engine):
        for _ in range(2):
            assert await generation.prepare_for_generation()
            assert await generation.prepare_for_generation()
            assert texts_of(await generation.generate(BATCH)) == ["AB", "C"]
            assert await generation.finish_generation()
            assert await generation.finish_generation()
            assert engine.state is EngineState.ASLEEP
    assert engine.asked == ["reset", "sleep 1", "wake kv_cache weights", "reset", "sleep 1"]


async def test_an_engine_of_its_own_stays_awake_and_forgets_its_cache() -> None:
    async with watched({"colocated": {"enabled": False}}) as (generation, engine):
        await generation.prepare_for_generation()
        await generation.finish_generation()
        assert texts_of(await generation.generate(BATCH)) == ["AB", "C"]
        await generation.finish_generation()
        assert engine.state is EngineState.RUNNING
    assert engine.asked == ["reset", "reset"]


async def test_colocated_engine_stays_awake_without_release_of_gpus() -> None:
    async with watched(COLOCATED) as (generation, engine):
        await generation.finish_generation(release_gpu=False)
        assert texts_of(await generation.generate(BATCH)) == ["AB", "C"]
    assert engine.asked == ["reset"]


async def test_weights_come_while_only_their_memory_is_awake() -> None:
    async with watched(COLOCATED) as (generation, engine):
        before = await generation.generate(BATCH)
        await generation.finish_generation()
        await generation.prepare_for_generation(tags=["weights"])
        assert engine.state is EngineState.ASLEEP
        await engine.update_weights("new ones", version="step 1")
        await generation.prepare_for_generation(tags=["kv_cache"])
        after = await generation.generate(BATCH)
    assert before["weight_versions"] == [[VersionSpan("scripted", 2, 5)], [VersionSpan("scripted", 1, 3)]]
    assert after["weight_versions"] == [[VersionSpan("step 1", 2, 5)], [VersionSpan("step 1", 1, 3)]]


async def test_a_part_that_no_engine_has_is_refused() -> None:
    async with watched(COLOCATED) as (generation, _):
        await generation.finish_generation()
        with pytest.raises(BadOption, match=r"wake\(tags=\['cache'\]\)"):
            await generation.prepare_for_generation(["cache"])


async def test_batch_for_a_sleeping_engine_is_refused() -> None:
    async with watched(COLOCATED) as (generation, engine):
        await generation.finish_generation()
        for generate in (generation.generate(BATCH), generation.generate_text({"prompts": ["a"]})):
            with pytest.raises(BadControl, match=r"the engine is asleep: await prepare_for_generation\(\)"):
                await generate
    assert engine.calls == []


async def test_engine_without_control_refuses_to_finish_generation() -> None:
    async with NotOurs(ScriptedEngine(loudly)) as engine, Generation(engine, COLOCATED) as generation:
        assert await generation.prepare_for_generation()
        with pytest.raises(BadControl, match="cannot be controlled"):
            await generation.finish_generation()


@asynccontextmanager
async def in_flight(
    generation: Generation, engine: ScriptedEngine, batch: Any, *, ids: int
) -> AsyncIterator[list[Any]]:
    """Yield when this many ids of a batch were sampled. The generated batch is in the list after the block."""
    said: list[Any] = []

    async def generate() -> None:
        said.append(await generation.generate(batch))

    async with anyio.create_task_group() as trainer:
        trainer.start_soon(generate)
        while engine.stats().sampled_tokens < ids or not engine.stats().open + engine.stats().waiting:
            await anyio.lowlevel.checkpoint()
        yield said


async def test_rows_in_flight_at_sleep_are_sampled_again_without_loss() -> None:
    batch = padded(["a long prompt", "b", "another one"])
    async with watched(COLOCATED | {"seed": 3}, latency=SLOWLY, chunks=1, places=2) as (generation, engine):
        async with in_flight(generation, engine, batch, ids=5) as said:
            await generation.finish_generation()
            assert said == []
            assert engine.stats().open == 0
            await generation.prepare_for_generation()
        (disturbed,) = said
    async with watched({"seed": 3}) as (generation, _):
        undisturbed = await generation.generate(batch)
    assert rows_of(disturbed) == rows_of(undisturbed)
    assert disturbed["logprobs"].tolist() == undisturbed["logprobs"].tolist()
    assert len(engine.calls) > 3


async def test_weight_versions_of_ids_are_returned_after_an_update() -> None:
    async with generating(latency=SLOWLY, chunks=1) as (generation, engine):
        async with in_flight(generation, engine, padded(["abcdefgh"]), ids=3) as said:
            await engine.update_weights("new ones", version="step 1", mode="keep")
        (output,) = said
    assert rows_of(output) == [[*b"abcdefghABCDEFGH", EOS_ID]]
    first, second = output["weight_versions"][0]
    assert (first.version, first.start) == ("scripted", 8)
    assert (second.version, second.start, second.end) == ("step 1", first.end, 17)
    assert 8 < first.end < 17


async def test_a_paused_engine_is_waited_for() -> None:
    async with generating() as (generation, engine):
        await engine.pause()
        async with in_flight(generation, engine, BATCH, ids=0) as said:
            assert engine.stats().waiting
            assert said == []
            await engine.resume()
    assert texts_of(said[0]) == ["AB", "C"]


async def test_an_adapter_of_the_engine_samples_every_row() -> None:
    async with generating(config={"adapter": "poet"}) as (generation, engine):
        with pytest.raises(RequestRejected, match=r"row 0: .* the engine has no adapter 'poet'"):
            await generation.generate(BATCH)
        version = await engine.add_adapter("poet", "a folder")
        output = await generation.generate(BATCH)
    assert {span.version for (span,) in output["weight_versions"]} == {f"scripted+{version}"}
