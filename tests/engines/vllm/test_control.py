"""Control of the real engine: pauses, cut turns, the weights that sampled each id, and no stale cache.

All tests use one engine in float32, in which greedy ids do not depend on how requests are batched.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from runner import BadControl, Conversation, EngineDead, Limits, Outcome, Run, Sampling, Trajectory
from runner.engines.base import Finish, FinishReason, GenerationRequest
from runner.engines.state import EngineState, PauseMode
from runner.engines.vllm.engine import VllmEngine
from runner.engines.vllm.weight_loading import CheckedWeights
from runner.testing import assert_exact, cancel_everywhere
from runner.testing.engine_pool import PooledEngine
from runner.tokens.log import VersionSpan
from tests.engines import controlling
from tests.engines.changed_weights import changed_weights
from tests.engines.vllm.memories import open_memories
from tests.playing import Plain, tasks, until_end

pytestmark = pytest.mark.engine

WATCHDOG_SECONDS = 1200.0
NORM = "model.norm.weight"
PROMPT = range(1000, 1160)  # five blocks of the cache
SHORT = range(1000, 1040)

_names = itertools.count()


@pytest.fixture(scope="session")
def other_weights(small_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of other weights for the small model."""
    return changed_weights(tmp_path_factory.mktemp("other-weights"), small_model_folder)


Scenario = Callable[[VllmEngine], Awaitable[None]]


def playing_on(engine: PooledEngine) -> Callable[[Scenario], None]:
    """Play a scenario on the engine's event loop, and check that nothing stays open."""

    async def main(scenario: Scenario) -> None:
        inner: Any = engine.inner
        with anyio.fail_after(WATCHDOG_SECONDS):
            await scenario(inner)
            gate = inner.vllm.gate
            assert (inner.stats().open, inner.stats().waiting, gate.inside, gate.kept) == (0, 0, 0, 0)

    return lambda scenario: engine.home.call(main, scenario)


@pytest.fixture
def on_engine(float32_engine: PooledEngine) -> Callable[[Scenario], None]:
    return playing_on(float32_engine)


def request(max_tokens: int, prompt: range = PROMPT, **fields: Any) -> GenerationRequest:
    sampling = dataclasses.replace(Sampling.defaults(), max_tokens=max_tokens, temperature=0.0)
    return GenerationRequest(
        name=f"control {next(_names)}", prompt=list(prompt), sampling=sampling, acts_on_deltas=True, **fields
    )


async def ask(engine: VllmEngine, max_tokens: int, prompt: range = PROMPT) -> tuple[list[int], Finish]:
    return await controlling.ask(engine, request(max_tokens, prompt))


@asynccontextmanager
async def speaking(engine: VllmEngine) -> AsyncIterator[None]:
    """A request that runs during the block."""
    async with engine.stream(request(2000)) as stream:
        for _ in range(4):
            await anext(stream)
        yield


async def stands_still(engine: VllmEngine) -> None:
    """Assert that vLLM's core is paused, several times, since it may step between two calls."""
    for _ in range(20):
        assert await engine.vllm.llm.is_paused()


# --- turns during sampling


def test_start_leaves_other_programs_no_library_to_load(on_engine: Any) -> None:
    """vLLM adds OpenMP and an allocator to `LD_PRELOAD`, which every program that an environment starts would load."""

    async def scenario(engine: VllmEngine) -> None:
        assert engine.is_alive()
        assert "libgomp" not in os.environ.get("LD_PRELOAD", "")

    on_engine(scenario)


def test_only_worker_is_inside_the_core_of_a_later_engine_too(on_engine: Any) -> None:
    """An earlier start left `LD_PRELOAD` changed. Later engines then ran their worker as a separate process."""

    async def scenario(engine: VllmEngine) -> None:
        (core,) = engine.processes()
        assert [each.name() for each in psutil.Process(core).children(recursive=True)] == []

    on_engine(scenario)


@pytest.mark.whole
def test_keep_changes_no_id_even_after_a_cache_reset(on_engine: Any) -> None:
    async def scenario(engine: VllmEngine) -> None:
        prompts = [range(start, start + 100) for start in (1000, 2000, 3000)]
        undisturbed = [(await ask(engine, 24, prompt))[0] for prompt in prompts]
        async with anyio.create_task_group() as group:
            async with (
                controlling.saying(engine, request(24, prompts[0])) as one,
                controlling.saying(engine, request(24, prompts[1])) as two,
                controlling.saying(engine, request(24, prompts[2])) as three,
            ):
                await engine.pause("keep")
                await stands_still(engine)
                before = [list(said.ids) for said in (one, two, three)]
                group.start_soon(ask, engine, 3)
                await stands_still(engine)
                await engine.health()
                stats = engine.stats()
                assert (stats.state, stats.running, stats.open, stats.waiting) == (EngineState.PAUSED, 3, 3, 1)
                await engine.reset_prefix_cache()
                assert [said.ids for said in (one, two, three)] == before
                assert all(len(ids) < 24 for ids in before)
                await engine.resume()
            assert [said.ids for said in (one, two, three)] == undisturbed
        with pytest.raises(BadControl, match="running, not paused"):
            await engine.resume()

    on_engine(scenario)


def test_a_pause_cancelled_at_any_point_leaves_the_engine_going(on_engine: Any) -> None:
    async def scenario(engine: VllmEngine) -> None:
        async def pause() -> None:
            await engine.pause("keep")
            await engine.resume()

        async def goes_on() -> None:
            assert (engine.state, engine.pause_state.on) == (EngineState.RUNNING, False)
            assert not await engine.vllm.llm.is_paused()

        async with speaking(engine):
            assert await cancel_everywhere(pause, check=goes_on) >= 2
        assert len((await ask(engine, 3))[0]) == 3

    on_engine(scenario)


class Endless(Plain):
    sampling = Sampling(max_tokens=900, stop_ids=())


class TwoTurns(Plain):
    sampling = Sampling(max_tokens=24, temperature=0)

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate()
        conversation.add("Go on.")
        await conversation.generate()


async def begun(engine: VllmEngine) -> None:
    """Wait until something is being sampled."""
    sampled = engine.stats().sampled_tokens
    while engine.vllm.sent_all or engine.stats().sampled_tokens < sampled + 8:
        await engine.vllm.process.stats.wait_for_step()


def assert_stamped(trajectory: Trajectory) -> None:
    """Every sampled id has exactly one version."""
    for turn in trajectory.turns:
        spans = [s for s in turn.log.versions if s.start < turn.end and turn.start < s.end]
        assert spans[0].start <= turn.start
        assert turn.end <= spans[-1].end
        assert all(one.end == two.start for one, two in itertools.pairwise(spans))


def test_run_loses_nothing_under_all_control_calls(
    on_engine: Any, small_model_folder: Path, other_weights: Path
) -> None:
    async def scenario(engine: VllmEngine) -> None:
        run = Run(TwoTurns, engine, tasks=tasks(6), limits=Limits(seconds=200))
        got: list[Trajectory] = []
        first = engine.weight_version
        async with run:
            await begun(engine)
            await engine.pause("abort")
            assert engine.stats().open == 0
            await engine.resume()

            await begun(engine)
            await engine.finish_generation(level=2)
            stats = engine.stats()
            assert (stats.state, stats.open) == (EngineState.ASLEEP, 0)
            assert engine.is_alive(), "a sleeping engine is alive"
            await engine.health()
            with pytest.raises(BadControl, match="the memory of the weights is asleep"):
                await engine.update_weights(other_weights)
            await engine.prepare_for_generation(["weights"])
            other = (await engine.update_weights(other_weights)).version
            assert engine.stats().state is EngineState.ASLEEP
            await stands_still(engine)
            await engine.prepare_for_generation()
            assert engine.stats().state is EngineState.RUNNING
            assert not await engine.vllm.llm.is_paused()

            await begun(engine)
            back = (await engine.update_weights(small_model_folder, mode=PauseMode.KEEP)).version
            got += [trajectory async for trajectory in run]
        # The model's text is free, so some turns are as long as the limit allows.
        assert {trajectory.outcome for trajectory in got} <= {Outcome.COMPLETED, Outcome.TOKEN_LIMIT}
        assert (len(got), {trajectory.attempt for trajectory in got}) == (6, {0})
        for trajectory in got:
            assert_exact(trajectory)
            assert_stamped(trajectory)
        seen = {span.version for t in got for segment in t.segments for span in segment.log.versions}
        assert {other, back} <= seen <= {first, other, back}
        assert run.summary.resampled > 0
        assert engine.weight_version == engine.stats().weight_version == back

    on_engine(scenario)


# --- sleep


def test_sleep_forgets_the_cache_and_wakes_part_by_part(on_engine: Any) -> None:
    async def scenario(engine: VllmEngine) -> None:
        ids, _ = await ask(engine, 8)
        assert (await ask(engine, 8))[1].cached_tokens
        await engine.pause("keep")
        await engine.sleep(1)
        assert await engine.vllm.llm.is_sleeping()
        await engine.wake(["kv_cache"])
        assert engine.stats().state is EngineState.ASLEEP
        await engine.wake(["weights"])
        assert engine.stats().state is EngineState.PAUSED, (
            "paused as before the sleep, although vLLM continues after waking"
        )
        await stands_still(engine)
        await engine.resume()
        again, finish = await ask(engine, 8)
        assert (again, finish.cached_tokens) == (ids, 0)

    on_engine(scenario)


# --- weights


def greedy_by_transformers(folder: Path, count: int) -> list[int]:
    """Return the output of another implementation for the same weights and prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.tensor([list(PROMPT)])
    with torch.inference_mode():
        made = model.generate(prompt, do_sample=False, max_new_tokens=count, eos_token_id=-1, pad_token_id=0)
    ids: list[int] = made[0, len(PROMPT) :].tolist()
    return ids


def test_spans_are_exact_and_old_caches_are_not_reused(
    on_engine: Any, small_model_folder: Path, other_weights: Path
) -> None:
    first_ids, other_ids = (greedy_by_transformers(folder, 12) for folder in (small_model_folder, other_weights))
    assert first_ids != other_ids

    async def scenario(engine: VllmEngine) -> None:
        llm, first = engine.vllm.llm, engine.weight_version
        undisturbed, _ = await ask(engine, 24, SHORT)
        assert (await ask(engine, 12))[0] == first_ids
        async with speaking(engine):
            async with controlling.saying(engine, request(24, SHORT)) as said:
                await engine.pause("keep")
                await stands_still(engine)
                sampled = len(said.ids)
                other = (await engine.update_weights(other_weights)).version
                assert engine.stats().state is EngineState.PAUSED
                await engine.resume()
            assert said.finish is not None
            assert said.finish.versions == (VersionSpan(first, 0, sampled), VersionSpan(other, sampled, 24))
            assert said.ids[:sampled] == undisturbed[:sampled]
            assert said.ids != undisturbed
            ids, finish = await ask(engine, 12)
            assert (ids, finish.versions) == (other_ids, (VersionSpan(other, 0, 12),))

            await engine.update_weights(small_model_folder)
            assert (await ask(engine, 12))[0] == first_ids

            # Without `reset_running_requests`, vLLM resets nothing while a request runs, and returns False.
            await llm.pause_generation(mode="keep", clear_cache=False)
            await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other_weights)})
            assert not await llm.reset_prefix_cache()
            await llm.resume_generation()
            stale, finish = await ask(engine, 12)
            assert finish.cached_tokens
            assert stale not in (first_ids, other_ids)
        await engine.update_weights(small_model_folder)
        assert (await ask(engine, 24, SHORT))[0] == undisturbed

    on_engine(scenario)


# --- statistics


def test_statistics_are_exact_where_they_can_be(on_engine: Any) -> None:
    async def scenario(engine: VllmEngine) -> None:
        await engine.reset_prefix_cache()
        before = engine.stats()
        for _ in range(2):
            await ask(engine, 10, range(5000, 5100))
        after = engine.stats()
        assert after.prefix_queries - before.prefix_queries == 200
        assert after.prefix_hits - before.prefix_hits == 96, "three full blocks of 32 ids, the second time"
        assert after.sampled_tokens - before.sampled_tokens == 20
        assert 0 < (after.prefix_hit_rate or 0) < 1
        assert 0 < after.tokens_per_second < 10_000
        assert (after.open, after.running, after.queued, after.kv_usage) == (0, 0, 0, 0.0)
        assert await engine.devices() == ["cpu"]

    on_engine(scenario)


def test_profile_is_written_to_the_configured_folder(on_engine: Any, profiles: Path) -> None:
    async def scenario(engine: VllmEngine) -> None:
        await engine.start_profile()
        await ask(engine, 2)
        await engine.stop_profile()

    on_engine(scenario)
    assert any(path.stat().st_size for path in profiles.glob("*.pt.trace.json.gz"))


# --- seeds


def test_seeded_ids_stay_equal_when_prompts_are_chunked(
    on_engine: Callable[[Scenario], None],
) -> None:
    # together more ids than one step of the engine takes
    prompts = [range(start, start + 400) for start in (1000, 9000)]

    async def seeded(engine: VllmEngine, prompt: range, into: list[list[int]]) -> None:
        wanted = request(6, prompt, seed=7)
        wanted = dataclasses.replace(wanted, sampling=dataclasses.replace(wanted.sampling, temperature=1.0))
        ids, finish = await controlling.ask(engine, wanted)
        assert finish.reason is FinishReason.LENGTH
        into.append(ids)

    async def scenario(engine: VllmEngine) -> None:
        alone: list[list[int]] = []
        for prompt in prompts:
            await seeded(engine, prompt, alone)
        await engine.reset_prefix_cache()
        together: list[list[int]] = []
        async with anyio.create_task_group() as group:
            for prompt in prompts:
                group.start_soon(seeded, engine, prompt, together)
        assert sorted(together) == sorted(alone)
        assert alone[0] != alone[1]

    on_engine(scenario)


# --- the end of the engine


def test_failed_load_ends_the_engine_and_every_episode(
    doomed_float32_engine: PooledEngine, small_model_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The tensors in the folder change between the check and the load."""
    from safetensors.torch import load_file, save_file

    tensors, saved = load_file(small_model_folder / "model.safetensors"), tmp_path / "model.safetensors"
    save_file(tensors, saved)

    async def scenario(engine: VllmEngine) -> None:
        weights = engine.vllm.weights
        check = weights.check

        async def check_too_early(given: Any) -> CheckedWeights:
            checked: CheckedWeights = await check(given)
            save_file({**tensors, NORM: tensors[NORM][:-1]}, saved)
            return checked

        monkeypatch.setattr(weights, "check", check_too_early)
        version = engine.weight_version
        got: list[Trajectory] = []

        async def update() -> None:
            await begun(engine)
            with pytest.raises(EngineDead, match="could not be loaded: "):
                await engine.update_weights(tmp_path)

        async with anyio.create_task_group() as group:
            group.start_soon(update)
            with pytest.raises(EngineDead, match="could not be loaded: "):
                await until_end(Run(Endless, engine, tasks=tasks(20), breaker=1.0), got)
        # On a slow machine some episodes end while the folder is written.
        cut = [trajectory for trajectory in got if trajectory.outcome is not Outcome.COMPLETED]
        assert {trajectory.outcome for trajectory in cut} == {Outcome.ENGINE_ERROR}
        assert (engine.is_alive(), engine.weight_version) == (False, version)
        for late in (engine.health, engine.resume, lambda: ask(engine, 3)):
            with pytest.raises(EngineDead, match="could not be loaded: ") as raised:
                await late()
            assert {trajectory.error for trajectory in cut} == {str(raised.value)}
        assert list(open_memories()) == []

    playing_on(doomed_float32_engine)(scenario)
