"""The silence limit: it counts only while the engine samples nothing for any request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import anyio
import pytest

from runner import Environment, Limits, Outcome, Run, Task, TokenEngine, TokenOutput, TokenSampling, reward
from runner.concurrency.clocks import FIRST_STEP_FACTOR, Clock, Progress
from runner.engines.vllm.scheduler_stats import SchedulerStats
from runner.testing import VirtualClock
from runner.tokens.byte_tokenizer import ByteTokenizer
from tests.engines.vllm.test_scheduler_stats import stats

pytestmark = pytest.mark.anyio

STALL_SECONDS = 120.0


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    clock = VirtualClock()
    return clock.asyncio_backend if request.param == "asyncio" else clock.trio_backend


class Talks(Environment):
    """Environment of one turn, whose prompt selects the behaviour of the engine."""

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        self.names = names

    def tasks(self) -> Iterator[Task]:
        for name in self.names:
            yield Task(id=name, prompt=f"be {name}")

    @reward
    async def spoke(self) -> bool:
        return True


TOKENIZER = ByteTokenizer()


async def answer(prompt: list[int], sampling: TokenSampling, *, session: str) -> AsyncIterator[TokenOutput]:
    """Sample as the prompt asks: an id every ten seconds, a first id after 400 s, or two ids and then none."""
    text = TOKENIZER.decode(prompt)
    if "be talker" in text:
        for _ in range(60):
            await anyio.sleep(10)
            yield TokenOutput([97], [-0.5])
    elif "be patient" in text:
        await anyio.sleep(400)
    else:
        yield TokenOutput([97, 98], [-0.5, -0.5])
        await anyio.sleep_forever()
    yield TokenOutput([sampling.stop_ids[0]], [-0.5], "stop")


async def played(*names: str, retries: int = 0) -> tuple[Run, list[tuple[str, Outcome]]]:
    engine = TokenEngine(answer, tokenizer=TOKENIZER, template="hermes", context=4096, takes=["logprobs"])
    limits = replace(Limits.defaults().lifted(), stall_seconds=STALL_SECONDS)
    async with Run(Talks(names), engine, limits=limits, retries=retries) as run:
        ends = [(trajectory.task.id, trajectory.outcome) async for trajectory in run]
    return run, ends


async def test_a_turn_waits_for_its_first_id_while_others_are_sampled() -> None:
    """The turn waits for 400 s, which is longer than `stall_seconds`, while another turn gets an id every 10 s."""
    _, ends = await played("patient", "talker")
    assert sorted(ends) == [("patient", Outcome.COMPLETED), ("talker", Outcome.COMPLETED)]


async def test_a_turn_that_waits_alone_is_cut() -> None:
    _, ends = await played("patient")
    assert ends == [("patient", Outcome.ENGINE_ERROR)]


async def test_a_lost_turn_is_cut_once_the_engine_does_nothing_more() -> None:
    run, ends = await played("silent", "talker")
    assert ends == [("talker", Outcome.COMPLETED), ("silent", Outcome.ENGINE_ERROR)]
    assert run.summary.retried == 0


async def test_retry_records_its_cause() -> None:
    run, _ = await played("silent", retries=2)
    assert run.summary.retried == 2
    assert dict(run.summary.retry_causes) == {"the engine sent nothing for 120 s": 2}
    assert run.summary.as_dict()["retry_causes"] == {"the engine sent nothing for 120 s": 2}


# --- steps without ids


@pytest.mark.parametrize("turns", [1, 64])
async def test_first_step_may_take_ten_times_as_long(turns: int) -> None:
    progress = Progress(first=FIRST_STEP_FACTOR)
    async with anyio.create_task_group() as group:
        clocks = [Clock(STALL_SECONDS) for _ in range(turns)]

        async def wait(clock: Clock, done: anyio.Event) -> None:
            with clock, progress.watched(clock):
                await done.wait()

        done = anyio.Event()
        for clock in clocks:
            group.start_soon(wait, clock, done)
        await anyio.sleep(9 * STALL_SECONDS)
        progress.note()
        await anyio.sleep(STALL_SECONDS - 1)
        assert not any(clock.fired for clock in clocks)
        await anyio.sleep(2)  # after the first step, the limit is the given one
        assert all(clock.fired for clock in clocks)


async def test_engine_without_a_first_step_has_stalled() -> None:
    progress = Progress(first=FIRST_STEP_FACTOR)
    with Clock(STALL_SECONDS) as clock, progress.watched(clock):
        await anyio.sleep(11 * STALL_SECONDS)
    assert clock.fired
    assert clock.seconds == 10 * STALL_SECONDS  # the message has the real duration


async def test_later_turn_has_its_own_limit() -> None:
    progress = Progress(first=FIRST_STEP_FACTOR)
    progress.note()
    with Clock(STALL_SECONDS) as clock, progress.watched(clock):
        await anyio.sleep(1.1 * STALL_SECONDS)
    assert clock.fired


async def test_steps_that_compute_prompts_restart_clocks() -> None:
    count, progress = SchedulerStats(), Progress()
    count.on_progress = progress.note
    with Clock(STALL_SECONDS) as clock, progress.watched(clock):
        for _ in range(40):
            await anyio.sleep(STALL_SECONDS / 10)
            count.record(0, stats(2), prompt_tokens=512)
    assert not clock.fired
    assert (count.steps, count.prompt_tokens) == (40, 40 * 512)


async def test_steps_that_compute_nothing_restart_no_clock() -> None:
    count, progress = SchedulerStats(), Progress()
    count.on_progress = progress.note
    with Clock(STALL_SECONDS) as clock, progress.watched(clock):
        for _ in range(40):
            await anyio.sleep(STALL_SECONDS / 10)
            count.record(0, stats(2))
    assert clock.fired
    assert count.steps == 0


async def test_the_shortest_patience_is_not_missed_beside_longer_ones() -> None:
    progress = Progress()
    with Clock(1000 * STALL_SECONDS) as long, progress.watched(long):
        progress.note()
        with Clock(STALL_SECONDS) as short, progress.watched(short):
            for _ in range(40):
                await anyio.sleep(STALL_SECONDS / 4)
                progress.note()
    assert not short.fired
    assert not long.fired


async def test_a_clock_that_is_not_watched_any_more_is_left_alone() -> None:
    progress = Progress()
    with Clock(STALL_SECONDS) as clock:
        with progress.watched(clock):
            progress.note()
        for _ in range(20):
            await anyio.sleep(STALL_SECONDS / 10)
            progress.note()
    assert clock.fired


async def test_a_lifted_limit_stays_lifted() -> None:
    progress = Progress()
    with Clock(None) as clock, progress.watched(clock):
        progress.note()
        await anyio.sleep(10 * STALL_SECONDS)
    assert not clock.fired
