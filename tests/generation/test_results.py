"""Results as rows finish: their order, and no open request after the caller stops reading."""

from __future__ import annotations

import gc
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from anyio.from_thread import start_blocking_portal

from runner import FinishReason
from runner.generation import BatchResults, Generation
from runner.testing import Fault, Latency, ModelCall, Reply, ScriptedEngine, cancel_everywhere, no_leaks
from tests.generation.batching import EOS_ID, collect, generating, loudly, padded, texts_of
from tests.playing import assert_nothing_open

pytestmark = [pytest.mark.anyio, pytest.mark.both_backends]

WATCHDOG_SECONDS = 600.0


class Boom(Exception):
    """An error in a trainer's code."""


def in_turn(asked: ModelCall) -> Reply:
    """Reply with the prompt; "c" finishes first, then "b", then "a"."""
    return Reply(loudly(asked), latency=Latency(first=30 - 10 * (ord(asked.prompt) - ord("a"))))


def silent_but_first(asked: ModelCall) -> Fault | None:
    """Finish only row "a". All other rows become silent and stay open until they are cut."""
    return None if asked.prompt == "a" else Fault.stall(at=1)


BATCH = padded(["a", "b", "c"])


async def test_rows_come_as_each_finishes_and_each_is_a_batch_of_one() -> None:
    async with generating(in_turn) as (generation, _):
        said = [(index, result) async for index, result in generation.generate_async(BATCH)]
    assert [index for index, _ in said] == [2, 1, 0]
    for index, result in said:
        letter = "abc"[index]
        assert result["output_ids"].tolist() == [[ord(letter), ord(letter.upper()), EOS_ID]]
        assert result["generation_lengths"].tolist() == [2]
        assert len(result["finish_reasons"]) == len(result["weight_versions"]) == 1


async def test_reader_can_stop_and_continue_and_take_the_rest_at_once() -> None:
    async with generating(in_turn) as (generation, _):
        results = generation.generate_async(BATCH)
        async for index, _ in results:
            assert index == 2
            break
        assert (await anext(results))[0] == 1
        assert texts_of(await results.all()) == ["A"]
        assert [pair async for pair in results] == []


async def test_nothing_is_sampled_before_it_is_read() -> None:
    async with generating() as (generation, engine):
        results = generation.generate_async(BATCH)
        await anyio.wait_all_tasks_blocked()
        assert engine.calls == []
        await results.aclose()
        assert [pair async for pair in results] == []
    assert engine.calls == []


@pytest.mark.parametrize("begun", [False, True], ids=["before it began", "while it was sampled"])
async def test_results_that_were_closed_are_not_taken_for_a_whole_batch(begun: bool) -> None:
    async with generating(in_turn) as (generation, _):
        results = generation.generate_async(BATCH)
        if begun:
            await anext(results)
        await results.aclose()
        for use in (results.all, results.__aenter__):
            with pytest.raises(RuntimeError, match="the results were closed"):
                await use()


async def test_several_readers_share_the_rows() -> None:
    said: list[tuple[int, Any]] = []
    async with generating(latency=Latency(jitter=5)) as (generation, _):
        results = generation.generate_async(padded([f"{number}" for number in range(20)]))
        async with anyio.create_task_group() as readers:
            for _ in range(3):
                readers.start_soon(collect, results, said)
    assert sorted(index for index, _ in said) == list(range(20))


async def test_batches_at_once_do_not_disturb_each_other() -> None:
    said: dict[str, list[str]] = {}

    async def generate(generation: Generation, name: str) -> None:
        said[name] = texts_of(await generation.generate(padded([f"{name}{number}" for number in range(9)])))

    setting = generating(places=2, latency=Latency(jitter=5))
    async with setting as (generation, _), anyio.create_task_group() as trainers:
        for name in "xyz":
            trainers.start_soon(generate, generation, name)
    assert said == {name.lower(): [f"{name}{number}" for number in range(9)] for name in "XYZ"}


# --- a reader that leaves


async def leave_the_block(generation: Generation) -> None:
    async with generation.generate_async(BATCH) as results:
        async for index, _ in results:
            assert index == 0
            break


async def boom_in_the_block(generation: Generation) -> None:
    async with generation.generate_async(BATCH) as results:
        await anext(results)
        raise Boom


async def leave_the_block_by_exception(generation: Generation) -> None:
    with pytest.raises(Boom):
        await boom_in_the_block(generation)


async def close(generation: Generation) -> None:
    results = generation.generate_async(BATCH)
    await anext(results)
    await results.aclose()
    await results.aclose()
    assert [pair async for pair in results] == []


async def cancel_in_the_block(generation: Generation) -> None:
    with anyio.CancelScope() as scope:
        async with generation.generate_async(BATCH) as results:
            await anext(results)
            scope.cancel()
            await anext(results)
    assert scope.cancelled_caught


async def cancel_the_whole_batch(generation: Generation) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generation.generate, BATCH)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    "leave",
    [leave_the_block, leave_the_block_by_exception, close, cancel_in_the_block, cancel_the_whole_batch],
    ids=lambda leave: leave.__name__,
)
async def test_when_a_reader_has_left_no_request_is_open(leave: Any) -> None:
    async with generating(faults=silent_but_first, places=2) as (generation, engine):
        with anyio.fail_after(WATCHDOG_SECONDS):
            await leave(generation)
            assert_nothing_open(engine)
        assert {str(call.finish.reason) for call in engine.calls if call.finish} == {"stop", "abort"}
        assert texts_of(await generation.generate(padded(["a"]))) == ["A"]


async def break_the_loop(generation: Generation) -> None:
    async for index, _ in generation.generate_async(BATCH):
        assert index == 0
        break


async def return_from_the_loop(generation: Generation) -> int:
    async for index, _ in generation.generate_async(BATCH):
        return index
    raise AssertionError("no row came")


async def boom_in_the_loop(generation: Generation) -> None:
    async for _ in generation.generate_async(BATCH):
        raise Boom


async def raise_in_the_loop(generation: Generation) -> object:
    with pytest.raises(Boom) as caught:
        await boom_in_the_loop(generation)
    return caught  # with its frames


async def cancel_the_loop(generation: Generation) -> None:
    with anyio.CancelScope() as scope:
        async for _ in generation.generate_async(BATCH):
            scope.cancel()
    assert scope.cancelled_caught


async def drop_it_in_another_thread(generation: Generation) -> None:
    kept = [generation.generate_async(BATCH)]
    await anext(kept[0])
    await anyio.to_thread.run_sync(kept.clear)


async def drop_it_in_a_cycle(generation: Generation) -> None:
    cycle: list[Any] = [generation.generate_async(BATCH)]
    await anext(cycle[0])
    cycle.append(cycle)
    del cycle
    await anyio.to_thread.run_sync(gc.collect)


@pytest.mark.parametrize(
    "leave",
    [
        break_the_loop,
        return_from_the_loop,
        raise_in_the_loop,
        cancel_the_loop,
        drop_it_in_another_thread,
        drop_it_in_a_cycle,
    ],
    ids=lambda leave: leave.__name__,
)
async def test_dropped_results_abort_their_requests_without_a_block(leave: Any) -> None:
    async with generating(faults=silent_but_first, places=2) as (generation, engine):
        with anyio.fail_after(WATCHDOG_SECONDS):
            held = await leave(generation)
            while engine.stats().open or engine.stats().waiting:
                await anyio.lowlevel.checkpoint()
        del held
        aborted = [call for call in engine.calls if call.finish and call.finish.reason is FinishReason.ABORT]
        assert len(aborted) == len(engine.calls) - 1


async def test_held_results_end_with_the_generation_and_an_error() -> None:
    async with ScriptedEngine(loudly, faults=silent_but_first) as engine:
        async with Generation(engine) as generation:
            results = generation.generate_async(BATCH)
            await anext(results)
        assert_nothing_open(engine)
        with pytest.raises(
            RuntimeError, match=r"2 rows were cut: the block of `async with Generation\(\.\.\.\)` was left"
        ):
            await anext(results)


async def test_rows_ready_at_the_end_of_the_block_can_still_be_read() -> None:
    async with Generation(ScriptedEngine(in_turn)) as generation:
        results = generation.generate_async(BATCH)
        await anext(results)
        await anyio.wait_all_tasks_blocked()
    assert [index async for index, _ in results] == [1, 0]


async def boom_in_a_generation(engine: ScriptedEngine) -> None:
    async with Generation(engine) as generation:
        await anext(generation.generate_async(BATCH))
        raise Boom


async def test_exception_that_leaves_the_generation_is_not_wrapped() -> None:
    async with ScriptedEngine(loudly, faults=silent_but_first) as engine:
        with pytest.raises(Boom):
            await boom_in_a_generation(engine)
        assert_nothing_open(engine)


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize("read", ["at once", "as each finishes", "in a block"])
async def test_cancelled_anywhere_nothing_is_left_open(read: str) -> None:
    async with ScriptedEngine(loudly, chunks=1, latency=Latency(first=1, between=1), places=2) as engine:

        async def scenario() -> None:
            async with Generation(engine) as generation:
                results: BatchResults[Any] = generation.generate_async(BATCH)
                if read == "at once":
                    await generation.generate(BATCH)
                elif read == "in a block":
                    async with results:
                        assert sorted([index async for index, _ in results]) == [0, 1, 2]
                else:
                    assert sorted([index async for index, _ in results]) == [0, 1, 2]

        with no_leaks(engine):
            points = await cancel_everywhere(scenario, check=lambda: assert_nothing_open(engine))
    assert points >= 3


# --- entry


async def test_generation_outside_of_its_block_names_the_fix() -> None:
    generation = Generation(ScriptedEngine(loudly))
    for call in (generation.generate_async, generation.generate_text_async):
        with pytest.raises(RuntimeError, match=r"write `async with Generation\(engine, config\) as generation:`"):
            call(BATCH)
    async with generation:
        with pytest.raises(RuntimeError, match="entered already"):
            await generation.__aenter__()
        results = generation.generate_async(BATCH)
    with pytest.raises(RuntimeError, match="write `async with"):
        await anext(results)


async def test_generation_closes_only_an_engine_that_it_entered() -> None:
    engine = ScriptedEngine(loudly)
    async with Generation(engine) as generation:
        assert texts_of(await generation.generate(BATCH)) == ["A", "B", "C"]
    assert not engine.running
    async with engine:
        for _ in range(2):
            async with Generation(engine) as generation:
                assert texts_of(await generation.generate(BATCH)) == ["A", "B", "C"]
        assert engine.running


def test_a_trainer_without_an_event_loop_generates_through_a_portal() -> None:
    engine = ScriptedEngine(loudly)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(Generation(engine)) as generation:
        assert texts_of(portal.call(generation.generate, BATCH)) == ["A", "B", "C"]
        assert portal.call(generation.generate_text, {"prompts": ["a"]}, True) == {"texts": ["A"]}
    assert not engine.running
